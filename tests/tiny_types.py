"""A tiny random model of any causal-LM type of transformers: its default config with every size made small."""

import re
from typing import Any

import torch
from tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
_LAYERS = "layers"  # stands for the number of layers
_SIZES: list[tuple[str, Any]] = [
    (r"hidden_size|d_model|n_embd|n_embed|dim|embed_dim|embedding_size|\w+_hidden_size|word_embed_proj_dim", 64),
    (r"lru_width|emb_dim|projection_dim|hidden_dim|dim_model|text_embed_dim|block_size_embed", 64),
    (r"((num_)?(hidden|decoder|encoder)|num|depth_decoder)_layers|n_layers?|depth|num_blocks", _LAYERS),
    (r"(num|\w+)_attention_heads|n_heads?|num_heads|attention_heads", 4),
    (r"(swa_)?num_key_value_heads(_global)?|num_global_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads", 2),
    (r"((swa|global|attention|attn|linear|lightning|\w*value|swa_v|v)_)?head_dim|d_kv|dim_head|kv_channels", 16),
    (r"qk_nope_head_dim|indexer?_head_dim", 16),
    (r"(qk|index)_rope_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"\w*lora_rank|\w*low_rank\w*dim", 32),
    (r"index_n_heads|(num_index|index_num|indexer_num)_heads", 16),
    (r"index(er)?_top_?k", 8),
    (r"\w*intermediate_size(_mlp)?|\w*ffn_dim|\w*ffn_hidden_size|n_inner|inner_dim|dim_ff|d_inner|ff_dim|dff|d_ff", 64),
    (r"mlp_hidden_size|block_ff_dim|expert_dim", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|(moe_)?top_?k|moe_topk|moe_k|num_selected_experts|experts_per_token|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group|(n|num|moe_num)_shared_experts", 1),
    (r"\w*vocab_size(_per_layer_input)?", VOCAB_SIZE),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_sequence_length|max_\w+_positions", 256),
    (r"original_max_position_embeddings", 256),
    (r"\w*sliding_window(_size)?|\w*window_size|attention_window|local_attention|attention_chunk_size", WINDOW),
    (r"mamba_d_state|(ssm_)?state_size|mamba_state_dim", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_value_heads", 4),
    (r"linear_num_key_heads|(num_)?linear_(num_)?heads", 2),
    (r"linear_(key|value)_head_dim|mamba_d_head|mamba_headdim|mamba_head_dim", 16),
    (r"(mamba_)?n_groups|mamba_ngroups", 1),
    (r"(mamba_)?chunk_size", 16),
    (r"time_step_rank|(mamba_)?dt_rank", 4),
    (r"hidden_size_per_layer_input|laurel_rank", 8),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"type_vocab_size", 2),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id|cls_token_id", 1),
    (r"eos_token_id|sep_token_id", 2),
    (r"\w+_token_(id|index)", VOCAB_SIZE - 1),
    (r"\w*dropout|\w*dropout_prob|\w*_pdrop|\w*layerdrop|\w*jitter\w*", 0.0),
    (r"num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers", 0),
]
_RULES = [(re.compile(pattern), size) for pattern, size in _SIZES]
_SLIDING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_CONV = ["conv", "full_attention"] * 2
_ZAMBA = ["linear_attention", "linear_attention", "hybrid"] * 2
_SPECIAL: dict[str, dict[str, Any]] = {  # what the rules cannot know
    "bailing_hybrid": {"layer_types": _LINEAR},
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "doge": {"keep_window_size": 2048},
    "dots1": {
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "layer_types": _SLIDING,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING},
    "gemma4_unified_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR},
    "laguna": {"layer_types": _SLIDING},
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": _SLIDING},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16, "layer_types": _SLIDING},
    "mpt": {"use_cache": True},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": _ZAMBA,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": _ZAMBA,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
    },
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": WINDOW,
        "num_experts_per_tok": 1,
    },
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_BUILDS = ((4, True), (4, False), (8, False), (6, True))  # layers, whether lists with one entry a layer are cut
_MOST_PARAMETERS = 130_000_000


def tiny_of_type(model_type: str) -> PreTrainedModel:
    """A random fp32 model.

    Raises:
        ValueError: no small config of this type could be found; the sentence says what went wrong.
    """
    faults = []
    for layers, cut in _BUILDS:
        try:
            return _build(small_config(CONFIG_MAPPING[model_type], layers, cut, _SPECIAL.get(model_type, {})))
        except Exception as fault:
            faults.append(f"{type(fault).__name__}: {str(fault).splitlines()[0][:120] if str(fault) else ''}")
    raise ValueError(faults[0])


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval().float()
        if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
            raise ValueError("it stays large")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.08)
            if not model(torch.randint(5, 90, (1, 12))).logits.isfinite().all():
                raise ValueError("its logits are not finite")
    return model


def small_config(cls: type[PreTrainedConfig], layers: int, cut: bool, special: dict[str, Any]) -> PreTrainedConfig:
    """The default config of a class with small sizes.

    Args:
        layers: number of layers.
        cut: whether lists with one entry a layer are cut to as many; left alone otherwise.
        special: what to set beside.
    """
    default = cls()
    before = next((n for name in _LAYER_COUNTS if isinstance(n := getattr(default, name, None), int)), None)
    kinds = getattr(default, "layer_types", None) or getattr(default, "layers_block_type", None)
    kept = _kept_layers(kinds, layers) if kinds else list(range(layers))
    small: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name.startswith("_") or name in ("model_type", "architectures", "transformers_version", "dtype"):
            continue
        if isinstance(value, PreTrainedConfig):
            small[name] = small_config(type(value), layers, cut, _SPECIAL.get(value.model_type, {}))
        elif cut and before and isinstance(value, (list, tuple)) and len(value) == before:
            small[name] = [value[i] for i in kept]
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            small[name] = {key: _rope(part) if isinstance(part, dict) else part for key, part in _rope(value).items()}
        else:
            small.update(_sized(name, value, layers))
    small.update(_related(default))
    small.update(special)
    return cls(**small)


def _kept_layers(kinds: list, layers: int) -> list[int]:
    """Indices of some layers, each kind among them."""
    kinds = [str(kind) for kind in kinds]
    kept = list(range(min(layers, len(kinds))))
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in [kinds[i] for i in kept]]
    for i, kind in enumerate(missing[: layers - 1]):
        kept[-1 - i] = kinds.index(kind)
    return sorted(kept)


def _sized(name: str, value: Any, layers: int) -> dict[str, Any]:
    size = next((size for pattern, size in _RULES if pattern.fullmatch(name)), None)
    if size is None or isinstance(value, bool):
        return {}
    if size == _LAYERS:
        return {name: layers}
    if size == 0.0 and isinstance(value, int):
        return {name: 0}
    if isinstance(value, (int, float)) or (value is None and name in ("pad_token_id", "bos_token_id", "eos_token_id")):
        return {name: size}
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], int) and "token" in name:
        return {name: [size]}
    return {}


def _related(default: PreTrainedConfig) -> dict[str, Any]:
    """Sizes that depend on others."""
    has, related = vars(default), {}
    if "tie_word_embeddings" in has:  # a tied random model repeats its last token
        related["tie_word_embeddings"] = False
    if "is_decoder" in has:
        related["is_decoder"] = True
    if "qk_rope_head_dim" in has and "head_dim" in has:
        related["head_dim"] = 8
    if "kv_lora_rank" in has and "num_key_value_heads" in has:
        related["num_key_value_heads"] = 4
    if "n_routed_experts" in has:
        related["n_routed_experts"] = 4
    if "mamba_expand" in has and "mamba_n_heads" in has:
        related.update(mamba_n_heads=8, mamba_d_head=16)
    if "mamba_d_ssm" in has:
        related["mamba_d_ssm"] = 128
    if "rotary_dim" in has:
        related["rotary_dim"] = 8
    name = type(default).__name__
    if name == "DbrxAttentionConfig":
        related.update(rope_theta=1e4, clip_qkv=8)
    if name == "CohereCompassTextConfig":
        kinds = ("sliding_attention", "full_attention")
        related["layer_types"] = [kinds[0]] * 3 + [kinds[1]]
        related["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}
    return related


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(parameters)
    if "mrope_section" in parameters:
        parameters["mrope_section"] = [1, 1, 0] if parameters.get("partial_rotary_factor", 1) < 1 else [4, 2, 2]
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 256
    return parameters
