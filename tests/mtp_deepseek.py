"""Tiny targets with MTP layers under DeepSeek's names, and under names close to them."""

from dataclasses import replace

import torch
import transformers
from mtp_published import SHAPE, SIZE, PlainBlock, Published, block_of, deepseek_names, random_layer, under
from tiny import VOCAB_SIZE
from transformers import AutoModelForImageTextToText

_LATENT = {**SHAPE, "num_key_value_heads": 4}  # attention over a compressed state
_LATENT |= {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_SPARSE = ["dense", "sparse", "sparse"]
_INDEXED = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "mlp_layer_types": _SPARSE}
_SHARED = {**_INDEXED, "indexer_types": ["full", "shared", "shared"]}  # a choice of keys for the layers behind it, too


def deepseek_v3(num_layers: int = 1) -> Published:
    config = transformers.DeepseekV3Config(**_LATENT, first_k_dense_replace=1, num_nextn_predict_layers=num_layers)
    layers = [
        random_layer(7 + i, [block_of(config, "DeepseekV3DecoderLayer", first_k_dense_replace=0)])
        for i in range(num_layers)
    ]
    tensors = {}
    for i, layer in enumerate(layers):
        tensors |= deepseek_names(layer, 3 + i)
    return Published(config, layers, tensors)


def llama(num_layers: int = 1) -> Published:
    """DeepSeek's names for a target that is published without MTP layers, as a training recipe writes them."""
    config = transformers.LlamaConfig(**SHAPE)
    layers = [random_layer(7 + i, [block_of(config, "LlamaDecoderLayer")]) for i in range(num_layers)]
    tensors = {}
    for i, layer in enumerate(layers):
        tensors |= deepseek_names(layer, 3 + i)
    return Published(config, layers, tensors)


def glm4_moe() -> Published:
    config = transformers.Glm4MoeConfig(
        **SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        rms_norm_eps=1e-6,
        num_nextn_predict_layers=1,
    )
    layer = random_layer(7, [block_of(config, "Glm4MoeDecoderLayer", first_k_dense_replace=0)])
    return Published(config, [layer], deepseek_names(layer, 3))


def _one_layer(config: transformers.PreTrainedConfig, block: str, **changes: object) -> Published:
    """A target with one MTP layer that the config counts."""
    config.num_nextn_predict_layers, config.rms_norm_eps = 1, 1e-6
    layer = random_layer(7, [block_of(config, block, index=1, **changes)])
    return Published(config, [layer], deepseek_names(layer, 3))


def glm4_moe_lite() -> Published:
    return _one_layer(transformers.Glm4MoeLiteConfig(**_LATENT, mlp_layer_types=_SPARSE), "Glm4MoeLiteDecoderLayer")


def deepseek_v32() -> Published:
    """Attention to the eight keys that an indexer chooses."""
    return _one_layer(transformers.DeepseekV32Config(**_LATENT, **_INDEXED), "DeepseekV32DecoderLayer")


def glm_moe_dsa() -> Published:
    """The same with interleaved rotary positions, and a target whose last layer takes the choice of the one before."""
    config = transformers.GlmMoeDsaConfig(**_LATENT, **_INDEXED, indexer_types=["full", "full", "shared"])
    return _one_layer(config, "GlmMoeDsaDecoderLayer", indexer_types=["full"] * 3)


def glm_ocr() -> Published:
    """A dense layer with norms behind its parts, in a composite model."""
    text = {**SHAPE, "head_dim": 16, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": SIZE}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.GlmOcrConfig(
        text_config=text, vision_config=vision, image_token_id=VOCAB_SIZE - 1, video_token_id=VOCAB_SIZE - 2
    )
    layer = random_layer(7, [block_of(config.text_config, "GlmOcrTextDecoderLayer")])
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in deepseek_names(layer, 3).items()
    }
    return Published(config, [layer], tensors, auto=AutoModelForImageTextToText)


def _renamed(published: Published, names: dict[str, str]) -> Published:
    """The same with parts of the tensors' names replaced."""
    tensors = {}
    for name, tensor in published.tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    published.tensors = tensors
    return published


def hy_v3() -> Published:
    """Names of its own for the last norm and within the experts, and an output head that is left unused."""
    config = transformers.HYV3Config(
        **SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=_SPARSE,
        rms_norm_eps=1e-6,
    )
    names = {
        "shared_head.norm": "final_layernorm",
        "mlp.gate.weight": "mlp.router.gate.weight",
        "mlp.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_experts.": "mlp.shared_mlp.",
    }
    published = _renamed(_one_layer(config, "HYV3DecoderLayer"), names)
    published.tensors["model.layers.3.shared_head.weight"] = torch.zeros(VOCAB_SIZE, SIZE)
    return published


def bailing_hybrid() -> Published:
    """Full attention with a gate, where the target's last layer is a recurrent one."""
    others = ("n_routed_experts", "max_position_embeddings")
    latent = {name: value for name, value in _LATENT.items() if name not in others}
    config = transformers.BailingHybridConfig(
        **latent,
        num_local_experts=4,
        model_max_length=512,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=_SPARSE,
    )
    names = {
        "shared_head.norm": "final_layernorm",
        "self_attn.o_proj": "attention.dense",
        "self_attn.": "attention.",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    }
    return _renamed(_one_layer(config, "BailingHybridDecoderLayer"), names)


def dots3_note() -> Published:
    """A dense layer that slides, with heads of other sizes than those of layers that choose their keys."""
    indexed, sliding = "indexed_attention", "sliding_attention"
    config = transformers.Dots3NoteTextConfig(
        **_LATENT,
        **_INDEXED,
        head_dim=24,
        layer_types=[indexed, sliding, indexed],
        sliding_window=8,
        shared_experts_intermediate_size=32,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=48,
        swa_head_dim=24,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=8,
    )
    config.rms_norm_eps = 1e-6
    layer = random_layer(7, [block_of(config, "Dots3NoteTextDecoderLayer", index=1, mlp_layer_types=["dense"] * 3)])
    return Published(config, [layer], deepseek_names(layer, 3), window=8, kind=sliding)


def _hy_v4(text: transformers.PreTrainedConfig, block: str) -> Published:
    text.num_nextn_predict_layers, text.rms_norm_eps = 2, 1e-6
    whole = block_of(text, block, index=1, indexer_types=["full"] * 3)
    norms = [whole.input_layernorm, whole.post_attention_layernorm]
    layer = random_layer(7, [PlainBlock(whole.self_attn, whole.mlp, norms)])
    tensors = {
        "enorm.weight": layer.norms["embedding"],
        "hnorm.weight": layer.norms["hidden"],
        "eh_proj.weight": layer.projection,
        "final_layernorm.weight": layer.norms["final"],
    }
    for name, tensor in layer.blocks[0].state_dict().items():
        name = name.replace("self_attn.gate_proj", "self_attn.linear_gate")
        tensors[name.replace("self_attn.sinks", "self_attn.learnable_sink_param")] = tensor
    return Published(text, [layer], under("model.mtp_layers.0.", tensors))


def hy_v4() -> Published:
    """Attention that chooses its keys, without the hyper-connections of the target; the config counts one too many."""
    return _hy_v4(transformers.HYV4Config(**_LATENT, **_SHARED), "HYV4DecoderLayer")


def hy_v4_vl() -> Published:
    """The same in a composite model."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    vision |= {"out_hidden_size": SIZE, "max_image_size": 64}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = transformers.HYV4VLConfig(
        text_config={**_LATENT, **_SHARED, "rope_parameters": rotary},
        vision_config=vision,
        image_token_id=VOCAB_SIZE - 1,
        video_token_id=VOCAB_SIZE - 2,
    )
    published = _hy_v4(config.text_config, "HYV4VLDecoderLayer")
    return replace(published, config=config, auto=AutoModelForImageTextToText)
