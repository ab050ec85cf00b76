"""Tiny targets with MTP layers under names of their own."""

from importlib import import_module

import torch
import transformers
from mtp_published import SHAPE, PlainBlock, Published, block_of, per_expert, random_layer, under
from tiny import PAD, VOCAB_SIZE
from tiny_hybrids import config_of
from transformers import AutoModelForImageTextToText


def ernie4_5_moe() -> Published:
    config = transformers.Ernie4_5_MoeConfig(
        **SHAPE,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        rms_norm_eps=1e-6,
    )
    config.num_nextn_predict_layers = 1
    layer = random_layer(7, [block_of(config, "Ernie4_5_MoeDecoderLayer")], final=False)  # layer 0 is a dense one
    tensors = {
        "mtp_emb_norm.0.weight": layer.norms["embedding"],
        "mtp_hidden_norm.0.weight": layer.norms["hidden"],
        "mtp_linear_proj.0.weight": layer.projection,
        **under("mtp_block.0.", layer.blocks[0].state_dict()),
    }
    return Published(config, [layer], under("model.", tensors))


def nemotron_h(num_layers: int = 1) -> Published:
    config = config_of("nemotron_h")
    config.num_nextn_predict_layers, config.layer_norm_epsilon = num_layers, 1e-6
    kinds = config.mtp_layers_block_type
    tensors, layers = {}, []
    for i in range(num_layers):
        blocks = [block_of(config, "NemotronHBlock", j, layers_block_type=kinds) for j in range(2)]
        layer = random_layer(7 + i, blocks)
        first = {
            "enorm.weight": layer.norms["embedding"],
            "hnorm.weight": layer.norms["hidden"],
            "eh_proj.weight": layer.projection,
            **blocks[0].state_dict(),
        }
        last = {"final_layernorm.weight": layer.norms["final"], **per_expert(blocks[1].state_dict())}
        tensors |= under(f"mtp.layers.{2 * i}.", first) | under(f"mtp.layers.{2 * i + 1}.", last)
        layers.append(layer)
    return Published(config, layers, tensors)


def mimo() -> Published:
    """MiMo-7B's names for the class that its own code derives from."""
    config = transformers.Qwen2Config(**SHAPE)
    layer = random_layer(7, [block_of(config, "Qwen2DecoderLayer")])
    tensors = {
        "token_layernorm.weight": layer.norms["embedding"],
        "hidden_layernorm.weight": layer.norms["hidden"],
        "input_proj.weight": layer.projection,
        "final_layernorm.weight": layer.norms["final"],
        **layer.blocks[0].state_dict(),
    }
    return Published(config, [layer], under("model.mtp_layers.0.", tensors), hidden_first=True)


def step3p7() -> Published:
    """Three layers that slide, with more heads than others; the second one has experts."""
    full, sliding = "full_attention", "sliding_attention"
    shape = dict(
        SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        share_expert_dim=32,
        sliding_window=8,
        rms_norm_eps=1e-6,
        attention_other_setting={"num_attention_heads": 8},
    )
    text = dict(
        shape,
        layer_types=[full, sliding, full, sliding, sliding, sliding],
        moe_layers_enum="1,2,4",
        num_nextn_predict_layers=3,
        rope_theta=[10000.0, 5000.0, 10000.0, 5000.0, 5000.0, 5000.0],
        swiglu_limits_shared=[0.0, 0.0, 0.3, 0.0, 0.0, 0.0],
    )
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Step3p7Config(text_config=text, vision_config=vision, image_token_id=VOCAB_SIZE - 1)
    block_config = transformers.Step3p7Config(
        text_config=dict(shape, layer_types=[sliding] * 3, moe_layers_enum="1", rope_theta=5000.0), vision_config=vision
    ).text_config
    block_config._attn_implementation = block_config._experts_implementation = "eager"
    module = import_module("transformers.models.step3p7.modeling_step3p7")
    layers = [random_layer(7 + i, [module.Step3p7DecoderLayer(block_config, i).eval()]) for i in range(3)]
    tensors = {}
    for i, layer in enumerate(layers):
        prefix, infix = f"model.layers.{3 + i}.", "transformer." if i == 2 else ""
        tensors |= under(
            prefix,
            {
                "enorm.weight": layer.norms["embedding"] - 1,
                "hnorm.weight": layer.norms["hidden"] - 1,
                "eh_proj.weight": layer.projection,
                f"{infix}shared_head.norm.weight": layer.norms["final"] - 1,
            },
        )
        for name, tensor in layer.blocks[0].state_dict().items():
            name = name.replace("mlp.shared_experts.", "share_expert.").replace("mlp.gate.weight", "moe.gate.weight")
            name = name.replace("mlp.gate.e_score_correction_bias", "moe.router_bias")
            name = name.replace("mlp.experts.down_proj", "moe.down_proj.weight")
            if name == "mlp.experts.gate_up_proj":
                parts = dict(zip(("moe.gate_proj.weight", "moe.up_proj.weight"), tensor.chunk(2, dim=1), strict=True))
            else:
                parts = {name: tensor}
            tensors |= under(prefix + infix, parts)
    return Published(
        config,
        layers,
        tensors,
        carry="raw",
        target_state="raw",
        window=8,
        kind=sliding,
        auto=AutoModelForImageTextToText,
    )


def inkling(chain_norm: bool = True) -> Published:
    """Two layers with short convolutions and learned biases for positions, one norm for both of them."""
    text = dict(
        {name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "pad_token_id")},
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=8,
        local_layer_ids=[0],
        d_rel=8,
        rel_extent=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        logits_mup_width_multiplier=2.0,
        pad_token_id=PAD,
    )
    mtp = {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": chain_norm}
    parts = {
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        "vision_config": {"patch_size": 4, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    config = transformers.InklingConfig(text_config=dict(text), mtp_config=mtp, **parts)
    blocks = [
        block_of(
            config.text_config, "InklingDecoderLayer", i, layer_types=["hybrid"] * 3, mlp_layer_types=["dense"] * 3
        )
        for i in range(2)
    ]
    layers = [random_layer(7 + i, [block], final=chain_norm) for i, block in enumerate(blocks)]
    tensors = {}
    if chain_norm:
        layers[1].norms["final"] = layers[0].norms["final"]
        tensors["chain_norm.weight"] = layers[0].norms["final"]
    names = {
        "self_attn.q_proj": "attn.wq_du",
        "self_attn.k_proj": "attn.wk_dv",
        "self_attn.v_proj": "attn.wv_dv",
        "self_attn.r_proj": "attn.wr_du",
        "self_attn.o_proj": "attn.wo_ud",
        "self_attn": "attn",
        "sconv.conv1d": "sconv",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "mlp.down_proj": "mlp.w2_md",
    }
    for i, layer in enumerate(layers):
        tensors |= under(
            f"layers.{i}.",
            {
                "embed_norm.weight": layer.norms["embedding"],
                "hidden_norm.weight": layer.norms["hidden"],
                "input_proj.weight": layer.projection,
            },
        )
        block = layer.blocks[0].state_dict()
        gate_up = [block.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        block["mlp.w13_dn.weight"] = torch.stack(gate_up, dim=1).flatten(0, 1)  # rows by turns
        for name, tensor in block.items():
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            tensors[f"layers.{i}.transformer_block.{name}"] = tensor
    return Published(
        config,
        layers,
        under("model.mtp.", tensors),
        hidden_first=True,
        auto=AutoModelForImageTextToText,
        divisor=2.0,
    )


def inkling_without_norm() -> Published:
    return inkling(chain_norm=False)


def mimo_v2_flash(num_layers: int = 3) -> Published:
    """Layers that slide and all of which read the target's states; nothing in the config tells their number."""
    full, sliding = "full_attention", "sliding_attention"
    config = transformers.MiMoV2FlashConfig(
        **{**SHAPE, "num_key_value_heads": 1},
        head_dim=16,
        v_head_dim=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=[full, sliding, full],
        rms_norm_eps=1e-6,
        rope_parameters={
            full: {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            sliding: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    )
    changes = {"layer_types": [sliding] * 3, "mlp_layer_types": ["dense"] * 3}
    tensors, layers = {}, []
    for i in range(num_layers):
        layer = random_layer(7 + i, [block_of(config, "MiMoV2FlashDecoderLayer", i, **changes)])
        layers.append(layer)
        own = {
            "enorm.weight": layer.norms["embedding"],
            "hnorm.weight": layer.norms["hidden"],
            "eh_proj.weight": layer.projection,
            "final_layernorm.weight": layer.norms["final"],
        }
        for name, tensor in layer.blocks[0].state_dict().items():
            name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
            own[name.replace("self_attn.sinks", "self_attn.attention_sink_bias")] = tensor
        tensors |= under(f"model.mtp.layers.{i}.", own)
    return Published(config, layers, tensors, window=8, kind=sliding, chained=False)


def longcat_flash() -> Published:
    """A dense block, where the target's layers are pairs with experts beside them."""
    shape = {**SHAPE, "num_key_value_heads": 4}
    config = transformers.LongcatFlashConfig(
        **{name: value for name, value in shape.items() if name not in ("intermediate_size", "num_hidden_layers")},
        num_layers=3,
        ffn_hidden_size=96,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=16,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        expert_ffn_hidden_size=32,
        rms_norm_eps=1e-6,
    )
    whole = block_of(config, "LongcatFlashDecoderLayer")
    block = PlainBlock(whole.self_attn[0], whole.mlps[0], [whole.input_layernorm[0], whole.post_attention_layernorm[0]])
    layer = random_layer(7, [block])
    tensors = {
        "norm.weight": layer.norms["final"],
        "layers.0.enorm.m.weight": layer.norms["embedding"],
        "layers.0.hnorm.m.weight": layer.norms["hidden"],
        "layers.0.eh_proj.weight": layer.projection,
    }
    for name, tensor in block.state_dict().items():
        tensors["layers.0." + name.replace("mlp.", "transformer_layer.mlp.", 1)] = tensor
    return Published(config, [layer], under("model.mtp.", tensors))
