"""What the config.json of every published EAGLE-3 format says, as one Eagle3Config.

Sizes come from the tensors where tensors can say them: configs copy fields of the target, or hold nulls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..auto import Repository
from .configuration import Eagle3Config, resolve_aux_layers
from .fields import Fields

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_KEEPS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_MOST_PADDING_ROWS = 1024  # the vocabulary of a target and that of its head differ by padding only
_MOST_PADDING_SHARE = 0.1


def read_config(
    repository: Repository,
    tensors: dict[str, torch.Tensor],
    target: PreTrainedModel,
    aux_layers: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> tuple[Eagle3Config, bool]:
    """(the head's config, whether its layer ids had to be guessed)."""
    path, top = repository.path, Fields(repository.path, repository.config)
    eagle = Fields(path, top.inner("eagle_config"))
    fields = Fields(path, eagle.content, top.content, top.inner("transformer_layer_config"))
    _refuse_variants(repository, tensors, fields)
    target_config = target.config.get_text_config()
    _check_vocabulary(repository, tensors, fields, target_config.vocab_size)
    _check_flags(repository, tensors, fields)

    hidden_size = _rows(repository, tensors, "layers.0.self_attn.o_proj.weight")
    num_heads, num_key_value_heads, head_dim = _heads(repository, tensors, fields)
    target_size = fields.integer("target_hidden_size", target_config.hidden_size)
    layers: tuple[int, ...] = ()
    guessed = False
    if fields.flag("use_aux_hidden_state", True):
        layers, guessed = _aux_layers(repository, tensors, top, eagle, target_config.num_hidden_layers, aux_layers)
        found = _needed(repository, tensors, "fc.weight").shape[-1]
        if found != len(layers) * target_size:
            raise ValueError(
                f"{path} has an fc for {found} inputs, and {len(layers)} hidden states {list(layers)} of a target of "
                f"width {target_size} make {len(layers) * target_size}; it was trained for another target, or on other "
                "layers (aux_layers=...)."
            )
    vocab_size, draft_vocab_size = (
        target_config.vocab_size,
        fields.integer("draft_vocab_size", target_config.vocab_size),
    )
    if "lm_head.weight" in tensors:
        draft_vocab_size = _rows(repository, tensors, "lm_head.weight")
    elif "d2t" in tensors:
        draft_vocab_size = tensors["d2t"].numel()
    activation = fields.text("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ValueError(f"{path} has hidden_act {activation!r}, which transformers does not know.")
    config = Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=_rows(repository, tensors, "layers.0.mlp.gate_proj.weight"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_size,
        aux_layers=layers,
        windows=_windows(tensors, fields),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        hidden_act=activation,
        rope_parameters=_rope(fields),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        # Where the field is missing, servers take speculators' heads as trained with it and all others without.
        norm_before_residual=fields.flag("norm_before_residual", "speculators_model_type" in top),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=fields.flag("norm_output", False) if norm_output is None else norm_output,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    return config, guessed


def _refuse_variants(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Heads whose graph or storage is another one."""
    path = repository.path
    if "mask_hidden" in tensors or fields.content.get("speculators_model_type") == "peagle":
        raise ValueError(f"{path} is a P-EAGLE head (parallel drafting), which is not served yet.")
    if any("q_a_proj" in name or "kv_a_proj" in name for name in tensors):
        raise ValueError(f"{path} is a head with latent attention (MLA), which is not served yet.")
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    packed = [name for name, tensor in tensors.items() if tensor.dtype not in plain and name not in ("d2t", "t2d")]
    scales = [name for name in tensors if name.endswith(("_scale", "_scale_inv", "_scale_2"))]
    if packed or scales or "quantization_config" in fields or (path / "hf_quant_config.json").is_file():
        raise ValueError(f"{path} is quantised, which is not served yet; take the unquantised head.")


def _check_vocabulary(
    repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields, vocab_size: int
) -> None:
    found = tensors["t2d"].numel() if "t2d" in tensors else fields.integer("vocab_size", vocab_size)
    if abs(found - vocab_size) > min(_MOST_PADDING_ROWS, _MOST_PADDING_SHARE * max(found, vocab_size)):
        raise ValueError(
            f"{repository.path} was trained for a vocabulary of {found} and the target's is {vocab_size}; it belongs "
            "to another target."
        )


def _check_flags(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    for flag, tensor in (
        ("norm_before_fc", "input_norm.weight"),
        ("fc_norm", "fc_norm.0.weight"),
        ("use_aux_norm", "fc_norm.0.weight"),
        ("use_aux_hidden_state", "fc.weight"),
    ):
        present = tensor in tensors
        if flag in fields and fields.flag(flag, present) != present:
            raise ValueError(
                f"{repository.path} says {flag} is {not present} and {'has' if present else 'lacks'} the tensor "
                f"{tensor}; one of the two is wrong."
            )


def _aux_layers(
    repository: Repository,
    tensors: dict[str, torch.Tensor],
    top: Fields,
    eagle: Fields,
    num_target_layers: int,
    override: Sequence[int] | None,
) -> tuple[tuple[int, ...], bool]:
    """(hidden states that the head reads, whether their ids had to be guessed)."""
    if override is not None:
        layers, guessed = tuple(override), False
    else:
        field = "eagle_aux_hidden_state_layer_ids"
        entering = top.layer_ids(field) or eagle.layer_ids("layer_ids")
        layers, guessed = resolve_aux_layers(num_target_layers, entering, eagle.layer_ids(field))
    if not layers or min(layers) < 0 or max(layers) > num_target_layers:
        raise ValueError(
            f"{repository.path} reads the hidden states {list(layers)} and the target has {num_target_layers} layers; "
            "it was trained for another target, or on other layers (aux_layers=...)."
        )
    return layers, guessed


def _heads(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> tuple[int, int, int]:
    """(attention heads, key-value heads, head size)."""
    queries = _rows(repository, tensors, "layers.0.self_attn.q_proj.weight")
    keys = _rows(repository, tensors, "layers.0.self_attn.k_proj.weight")
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


def _windows(tensors: dict[str, torch.Tensor], fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer. How many layers there are is up to the tensors: configs copy the target's number."""
    num_layers = 1 + max(int(m.group(1)) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name)))
    kinds = fields.texts("layer_types")
    if not kinds and fields.flag("use_sliding_window", False):
        full = fields.integer("max_window_layers", 1) if fields.content.get("max_window_layers") else 0
        kinds = ["sliding_attention" if i >= full else "full_attention" for i in range(num_layers)]
    slides = [kind == "sliding_attention" for kind in kinds[:num_layers]] + [False] * (num_layers - len(kinds))
    window = fields.integer("sliding_window", 1) if "sliding_window" in fields else None
    return tuple(window if slide else None for slide in slides)


def _rope(fields: Fields) -> dict[str, Any]:
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


def _needed(repository: Repository, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight without which nothing can be said."""
    if name not in tensors:
        raise ValueError(f"{repository.path} lacks the tensor {name}. Found {repository.describe()}.")
    if tensors[name].dim() != 2:
        raise ValueError(f"{repository.path} has {name} of shape {list(tensors[name].shape)} where a matrix belongs.")
    return tensors[name]


def _rows(repository: Repository, tensors: dict[str, torch.Tensor], name: str) -> int:
    return _needed(repository, tensors, name).shape[0]
