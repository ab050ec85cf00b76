"""Tiny random models that keep a cache of their own: recurrent and hybrid ones, and attention that is not ragged."""

import functools

import torch
import transformers
from tiny import EOS, PAD, VOCAB_SIZE, randomise
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_UNTIED = {"tie_word_embeddings": False}  # a tied random model repeats its last token
_SPECIAL = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    **_SPECIAL,
}
_DELTA = {  # gated delta net
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_TWO_OF_FOUR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_DECODER = {  # BART and its relatives
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 512,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "tie_word_embeddings": False,
    "scale_embedding": False,
    **_SPECIAL,
    "forced_eos_token_id": None,
}
_ZAMBA = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "linear_attention", "hybrid"]

# name -> (config class, its arguments), by the way in which rejected tokens are forgotten
CONFIGS: dict[str, dict[str, tuple[str, dict]]] = {
    "replay": {
        "qwen3_next": ("Qwen3NextConfig", {**_SHAPE, **_DELTA, **_EXPERTS, "layer_types": _TWO_OF_FOUR}),
        "qwen3_5": ("Qwen3_5TextConfig", {**_SHAPE, **_DELTA, "layer_types": _TWO_OF_FOUR}),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_SHAPE, **_DELTA, **_EXPERTS, "layer_types": _TWO_OF_FOUR}),
        "mamba2": (
            "Mamba2Config",
            {**_SHAPE, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2},
        ),
        "falcon_h1": ("FalconH1Config", {**_SHAPE, **_MAMBA, "mamba_d_ssm": 128}),
        "bamba": ("BambaConfig", {**_SHAPE, **_MAMBA, "attn_layer_indices": [1, 3]}),
        "nemotron_h": (
            "NemotronHConfig",
            {
                **_SHAPE,
                "layers_block_type": ["mamba", "attention", "moe", "mamba", "attention"],
                "num_hidden_layers": 5,
                "mamba_num_heads": 8,
                "mamba_head_dim": 16,
                "ssm_state_size": 8,
                "n_groups": 1,
                "chunk_size": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 32,
            },
        ),
        "zamba2": (
            "Zamba2Config",
            {
                **_SHAPE,
                "num_hidden_layers": 6,
                "layers_block_type": _ZAMBA,
                "attention_hidden_size": 128,
                "attention_head_dim": 32,
                "num_key_value_heads": 4,
                "n_mamba_heads": 8,
                "mamba_headdim": 16,
                "mamba_d_state": 8,
                "mamba_ngroups": 1,
                "chunk_size": 16,
            },
        ),
    },
    "crop": {
        "lfm2": (
            "Lfm2Config",
            {**_SHAPE, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_ff_dim": 96},
        ),
        "bart": ("BartConfig", {**_DECODER}),
        "marian": ("MarianConfig", {**_DECODER, "decoder_vocab_size": VOCAB_SIZE}),
        "bloom": (
            "BloomConfig",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 3, "n_head": 4, **_SPECIAL, **_UNTIED},
        ),
        "gpt_neo": (
            "GPTNeoConfig",
            {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "num_layers": 4,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 2]],
                "window_size": 8,
                "max_position_embeddings": 512,
                **_SPECIAL,
                **_UNTIED,
            },
        ),
        "mpt": (
            "MptConfig",
            {
                "vocab_size": VOCAB_SIZE,
                "d_model": 64,
                "n_heads": 4,
                "n_layers": 3,
                "max_seq_len": 512,
                **_SPECIAL,
                **_UNTIED,
                "use_cache": True,
            },
        ),
    },
    "stepwise": {
        "recurrent_gemma": (
            "RecurrentGemmaConfig",
            {**_SHAPE, "lru_width": 64, "attention_window_size": 8, "num_hidden_layers": 3},
        ),
        "mamba": ("MambaConfig", {**_SHAPE, "state_size": 8}),
        "jamba": (
            "JambaConfig",
            {
                **_SHAPE,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "num_experts": 4,
                "mamba_d_state": 8,
                "mamba_dt_rank": 4,
                "use_mamba_kernels": False,
            },
        ),
    },
}


def config_of(name: str) -> PreTrainedConfig:
    cls, arguments = next(names[name] for names in CONFIGS.values() if name in names)
    return getattr(transformers, cls)(**arguments)


@functools.cache
def tiny_own(name: str, seed: int = 0) -> PreTrainedModel:
    """A random fp32 target on the CPU that is served over its own cache. Shared between tests: leave it as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(name)).float().eval()
    randomise(model, seed)
    return model
