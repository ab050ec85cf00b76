"""Tiny targets with hyper-connections whose MTP layers read and pass on several streams."""

from dataclasses import replace

import torch
import transformers
from mtp_published import SHAPE, SIZE, Published, block_of, per_expert, random_layer, under
from tiny import EOS, PAD

_EPS = 1e-6
_SPECIAL = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}


def _drawn(seed: int, *shape: int) -> torch.Tensor:
    return 0.15 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def deepseek_v4(num_layers: int = 1) -> Published:
    """A sliding layer with experts, where the target's last one compresses what it attends to."""
    sliding = "sliding_attention"
    shape = {name: SHAPE[name] for name in SHAPE if name not in ("intermediate_size", "num_key_value_heads")}
    config = transformers.DeepseekV4Config(
        **shape,
        moe_intermediate_size=32,
        head_dim=16,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=[sliding, "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        sliding_window=8,
        hc_mult=3,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=64,  # ties among fewer would be broken otherwise in blocks than token by token
        num_nextn_predict_layers=num_layers,
    )
    changes = {"layer_types": [sliding] * 3, "mlp_layer_types": ["moe"] * 3}
    layers, tensors = [], {}
    for i in range(num_layers):
        layer = random_layer(7 + i, [block_of(config, "DeepseekV4DecoderLayer", **changes)])
        for number, (name, parameter) in enumerate(layer.blocks[0].named_parameters()):
            if parameter.dim() == 1 and "norm" not in name:  # a decoder layer leaves these as memory was
                parameter.data = _drawn(40 + number, len(parameter)) + name.endswith("scale")
        fn, base, scale = _drawn(20 + i, 3, 3 * SIZE), _drawn(21 + i, 3), 1 + _drawn(22 + i, 1)
        layer.join = lambda x, fn=fn, base=base, scale=scale: _weighted(x, fn, base, scale)
        own = {
            "enorm.weight": layer.norms["embedding"],
            "hnorm.weight": layer.norms["hidden"],
            "norm.weight": layer.norms["final"],
            "e_proj.weight": layer.projection[:, :SIZE],
            "h_proj.weight": layer.projection[:, SIZE:],
            "hc_head_fn": fn,
            "hc_head_base": base,
            "hc_head_scale": scale,
        }
        for name, tensor in per_expert(layer.blocks[0].state_dict()).items():
            for ours, theirs in _V4_NAMES.items():
                name = name.replace(ours, theirs)
            own[name] = tensor
        tensors |= under(f"mtp.{i}.", own)
        layers.append(layer)
    return Published(
        config, layers, tensors, carry="raw", target_state="raw", window=8, num_streams=3, streams_apart=True
    )


_V4_NAMES = {
    "self_attn.": "attn.",
    "q_a_norm": "q_norm",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "attn.kv_proj": "attn.wkv",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "attn.sinks": "attn.attn_sink",
    "mlp.": "ffn.",
    "e_score_correction_bias": "bias",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_",
}


def _weighted(x: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[n, H] streams [n, 3 H] weighted by sigmoids of what they are, all of them normed as one."""
    normed = x / (x.pow(2).mean(-1, keepdim=True) + _EPS).sqrt()
    weights = torch.sigmoid(normed @ fn.double().T * scale.double() + base.double()) + _EPS
    return (weights[..., None] * x.view(len(x), 3, SIZE)).sum(1)


def qwen4_exp() -> Published:
    """A layer that attends to the blocks of keys it chooses, where the target's last one is recurrent."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = transformers.Qwen4ExpTextConfig(
        **{name: SHAPE[name] for name in names},
        **_SPECIAL,
        max_position_embeddings=512,
        head_dim=16,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "indexed_attention", "linear_attention"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        hc_count=3,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=4,
        indexer_compress_ratio=2,
        tie_word_embeddings=False,
    )
    config.mtp_num_hidden_layers = 1
    layer = random_layer(7, [block_of(config, "Qwen4ExpTextDecoderLayer", index=1)], final=False)
    layer.norms["hidden"] = 1 + 2 * _drawn(23, 3 * SIZE)
    norm, down, up = 1 + 2 * _drawn(24, 3 * SIZE), _drawn(25, 8, 3 * SIZE), _drawn(26, 3 * SIZE, 8)
    layer.join = lambda x: _gated(x, norm, down, up)
    tensors = {
        "pre_fc_norm_embedding.weight": layer.norms["embedding"] - 1,
        "pre_fc_norm_hidden.weight": layer.norms["hidden"] - 1,
        "fc_embedding.weight": layer.projection[:, :SIZE],
        "fc_hidden.weight": layer.projection[:, SIZE:],
        "hyper_connection_mixer.hc_norm.weight": norm - 1,
        "hyper_connection_mixer.input_mix_weight_down.weight": down,
        "hyper_connection_mixer.input_mix_weight_up.weight": up,
        **under("layers.0.", layer.blocks[0].state_dict()),  # this checkpoint's experts are in one tensor
    }
    return Published(config, [layer], under("mtp.", tensors), carry="raw", target_state="raw", num_streams=3)


def qwen4_exp_vl() -> Published:
    """The same layer in a composite model, as it is published."""
    published = qwen4_exp()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": SIZE}
    config = transformers.Qwen4ExpConfig(text_config=published.config.to_dict(), vision_config=vision)
    return replace(published, config=config, auto=transformers.AutoModelForImageTextToText)


def _gated(x: torch.Tensor, norm: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[n, H] the mean of streams [n, 3 H], each normed and then weighted by a gate that sees all of them."""
    streams = x.view(len(x), 3, SIZE)
    normed = (streams / (streams.pow(2).mean(-1, keepdim=True) + _EPS).sqrt()).flatten(1) * norm.double()
    gates = torch.sigmoid(torch.nn.functional.silu(normed @ down.double().T / 3) @ up.double().T)
    return (gates * normed).view(len(x), 3, SIZE).mean(1)
