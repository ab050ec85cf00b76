"""What we expect of transformers' private functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

DEFAULT_NUM_ASSISTANT_TOKENS = 20  # what transformers fills in where the user gave nothing

# Methods of GenerationMixin that we wrap or call, and their parameters.
EXPECTED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "_validate_generation_mode": ("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
    "_get_candidate_generator": (
        "self",
        "generation_config",
        "input_ids",
        "inputs_tensor",
        "logits_processor",
        "model_kwargs",
        "assistant_model",
        "target_tokenizer",
        "assistant_tokenizer",
    ),
    "_assisted_decoding": (
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "inputs_tensor",
        "assistant_model",
        "assistant_tokenizer",
        "tokenizer",
        "model_kwargs",
    ),
    "_prefill": ("self", "input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "prepare_inputs_for_generation": (
        "self",
        "input_ids",
        "next_sequence_length",
        "cache",  # `past_key_values` before 5.24, as in the forward of every model
        "attention_mask",
        "inputs_embeds",
        "is_first_iteration",
        "kwargs",
    ),
    "_prepare_cache_for_generation": (
        "self",
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ),
}

# Inputs that have a column for each token; `_update_model_kwargs_for_generation` adds columns of these values.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def new_token_types(name: str, values: torch.Tensor) -> torch.Tensor:
    """[B, 1] what transformers adds for each new token to an input of TOKEN_TYPES [B, W]."""
    return values[:, -1:] if name == "token_type_ids" else torch.zeros_like(values[:, -1:])


# A function of transformers' generation.utils.
UTILS_PARAMETERS: dict[str, tuple[str, ...]] = {"_slice_mm_encoder_output": ("output", "rows")}

# What we wrap or call of pipelines: methods of Pipeline, and a function of its module.
PIPELINE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "__init__": (
        "self",
        "model",
        "tokenizer",
        "feature_extractor",
        "image_processor",
        "video_processor",
        "processor",
        "task",
        "device",
        "binary_output",
        "kwargs",
    ),
    "_sanitize_parameters": ("self", "pipeline_parameters"),
    "_prepare_generate_kwargs": ("self", "generate_kwargs", "overrides"),
}
ASSISTANT_PARAMETERS: dict[str, tuple[str, ...]] = {
    "load_assistant_model": ("model", "assistant_model", "assistant_tokenizer"),
}


def check_signatures(owner: Any, expected_parameters: dict[str, tuple[str, ...]] | None = None) -> None:
    """Refuse to work on a transformers whose internals have changed.

    Args:
        owner: the class or module.
        expected_parameters: of its functions; those of GenerationMixin by default.

    Raises:
        RuntimeError: a method is gone or takes other parameters; the sentence names it.
    """
    import transformers

    for name, expected in (expected_parameters or EXPECTED_PARAMETERS).items():
        method: Callable | None = getattr(owner, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            change = "is gone" if found is None else f"takes {', '.join(found)} instead of {', '.join(expected)}"
            raise RuntimeError(
                f"hf_specdec does not know transformers {transformers.__version__}: {owner.__name__}.{name} {change}. "
                "This version was written for transformers 5.24: install that one, or a newer hf_specdec."
            )
