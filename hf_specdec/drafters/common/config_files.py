"""What the config.json files of drafters have in common, read against their tensors.

Sizes come from the tensors where tensors can say them: configs copy fields of the target, or hold nulls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers.activations import ACT2FN

from ..auto import Repository
from .fields import Fields
from .vocabulary import same_but_for_padding

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_KEEPS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def refuse_quantised(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Refuse packed weights."""
    path, plain = repository.path, (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    packed = [name for name, tensor in tensors.items() if tensor.dtype not in plain and name not in ("d2t", "t2d")]
    scales = [name for name in tensors if name.endswith(("_scale", "_scale_inv", "_scale_2"))]
    if packed or scales or "quantization_config" in fields or (path / "hf_quant_config.json").is_file():
        raise ValueError(f"{path} is quantised, which is not served yet; take the unquantised one.")


def check_vocabulary(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields, vocab_size: int) -> None:
    """Refuse a drafter whose target's vocabulary, `t2d` or else what its config says, is not of the target's size."""
    found = tensors["t2d"].numel() if "t2d" in tensors else fields.integer("vocab_size", vocab_size)
    if not same_but_for_padding(found, vocab_size):
        raise ValueError(
            f"{repository.path} was trained for a vocabulary of {found} and the target's is {vocab_size}; it belongs "
            "to another target."
        )


def heads_of(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> tuple[int, int, int]:
    """(attention heads, key-value heads, head size)."""
    queries = rows_of(repository, tensors, "layers.0.self_attn.q_proj.weight")
    keys = rows_of(repository, tensors, "layers.0.self_attn.k_proj.weight")
    if "head_dim" not in fields and "num_attention_heads" not in fields:
        raise ValueError(f"config.json in {repository.path} has neither num_attention_heads nor head_dim.")
    # Tensors say how wide all heads are together; the size of one is only in the config.
    num_heads = fields.integer("num_attention_heads", 1)
    head_dim = fields.integer("head_dim", max(1, queries // num_heads))
    if "num_attention_heads" not in fields:
        num_heads = queries // head_dim
    num_key_value_heads = keys // head_dim
    fits = num_heads * head_dim == queries and num_key_value_heads * head_dim == keys
    if not fits or head_dim % 2 or num_heads % max(num_key_value_heads, 1):
        raise ValueError(
            f"config.json in {repository.path} has {num_heads} heads of size {head_dim}, and the tensors have "
            f"{queries} rows of queries and {keys} of keys."
        )
    return num_heads, num_key_value_heads, head_dim


def layer_fields_of(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> dict[str, Any]:
    """Fields of a drafter's config that tell of its decoder layers, the same in every method."""
    return {
        "intermediate_size": rows_of(repository, tensors, "layers.0.mlp.gate_proj.weight"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "output_bias": "layers.0.self_attn.o_proj.bias" in tensors,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in tensors,
    }


def check_fc(
    repository: Repository, tensors: dict[str, torch.Tensor], layers: Sequence[int], target_hidden_size: int
) -> None:
    """Refuse a drafter whose `fc` takes another number of hidden states, or wider ones, than `layers` of the target."""
    found, made = needed(repository, tensors, "fc.weight").shape[1], len(layers) * target_hidden_size
    if found != made:
        raise ValueError(
            f"{repository.path} has an fc for {found} inputs, and {len(layers)} hidden states {list(layers)} of a "
            f"target of width {target_hidden_size} make {made}; it was trained for another target, or on other layers "
            "(aux_layers=...)."
        )


def draft_vocabulary_of(repository: Repository, tensors: dict[str, torch.Tensor], said: int) -> int:
    """Tokens that the drafter can draft, by its head or its map; `said` where the files bring neither."""
    if "lm_head.weight" in tensors:
        return rows_of(repository, tensors, "lm_head.weight")
    return tensors["d2t"].numel() if "d2t" in tensors else said


def activation_of(fields: Fields, name: str = "hidden_act", usual: str = "silu") -> str:
    """The activation of the MLP."""
    activation = fields.text(name, usual)
    if activation not in ACT2FN:
        raise ValueError(f"{fields.path} has {name} {activation!r}, which transformers does not know.")
    return activation


def windows_of(tensors: dict[str, torch.Tensor], fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer. How many layers there are is up to the tensors: configs copy the target's number."""
    num_layers = 1 + max(int(m.group(1)) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name)))
    kinds = fields.texts("layer_types")
    if not kinds and fields.flag("use_sliding_window", False):
        full = fields.integer("max_window_layers", 1) if fields.content.get("max_window_layers") else 0
        kinds = ["sliding_attention" if i >= full else "full_attention" for i in range(num_layers)]
    slides = [kind == "sliding_attention" for kind in kinds[:num_layers]] + [False] * (num_layers - len(kinds))
    window = fields.integer("sliding_window", 1) if "sliding_window" in fields else None
    return tuple(window if slide else None for slide in slides)


def rope_of(fields: Fields) -> dict[str, Any]:
    """Rotary parameters in transformers' spelling; text positions are the same on all axes of mrope."""
    rope = Fields(fields.path, fields.inner("rope_scaling"), fields.inner("rope_parameters"))
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = "default" if kind == "mrope" else kind
    if kind not in _ROPE_NEEDS:
        raise ValueError(f"{fields.path} has a rotary embedding of type {kind!r}; {', '.join(_ROPE_NEEDS)} are served.")
    missing = [name for name in _ROPE_NEEDS[kind] if name not in rope]
    if missing:
        raise ValueError(f"{fields.path} has a rotary embedding of type {kind!r} without {', '.join(missing)}.")
    found: dict[str, Any] = {"rope_type": kind}
    found["rope_theta"] = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    found.update({name: rope.number(name, 1.0) for name in _ROPE_NEEDS[kind]})
    if kind == "yarn":
        numbers = {name: value for name, value in rope.content.items() if isinstance(value, int | float)}
        found.update({name: numbers[name] for name in _ROPE_KEEPS if name in numbers})
    if kind in ("yarn", "llama3"):
        original = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings", 2048))
        found["original_max_position_embeddings"] = original
    return found


def needed(repository: Repository, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight without which nothing can be said."""
    if name not in tensors:
        raise ValueError(f"{repository.path} lacks the tensor {name}. Found {repository.describe()}.")
    if tensors[name].dim() != 2:
        raise ValueError(f"{repository.path} has {name} of shape {list(tensors[name].shape)} where a matrix belongs.")
    return tensors[name]


def rows_of(repository: Repository, tensors: dict[str, torch.Tensor], name: str) -> int:
    """Outputs of a projection."""
    return needed(repository, tensors, name).shape[0]
