"""What the config.json of every published EAGLE-3 format says, as one Eagle3Config.

Sizes come from the tensors where tensors can say them: configs copy fields of the target, or hold nulls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..auto import Repository
from ..common.config_files import (
    activation_of,
    check_fc,
    check_vocabulary,
    draft_vocabulary_of,
    heads_of,
    layer_fields_of,
    refuse_quantised,
    rope_of,
    rows_of,
    windows_of,
)
from ..common.fields import Fields
from .configuration import Eagle3Config, resolve_aux_layers

_MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")


def is_parallel(config: dict[str, Any], names: Collection[str]) -> bool:
    """Whether a head with these tensors guesses a whole draft at once (P-EAGLE)."""
    return "mask_hidden" in names or config.get("speculators_model_type") == "peagle"


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
    check_vocabulary(repository, tensors, fields, target_config.vocab_size)
    _check_flags(repository, tensors, fields)

    hidden_size = rows_of(repository, tensors, "layers.0.self_attn.o_proj.weight")
    num_heads, num_key_value_heads, head_dim = heads_of(repository, tensors, fields)
    target_size = fields.integer("target_hidden_size", target_config.hidden_size)
    layers: tuple[int, ...] = ()
    guessed = False
    if fields.flag("use_aux_hidden_state", True):
        layers, guessed = _aux_layers(repository, tensors, top, eagle, target_config.num_hidden_layers, aux_layers)
        check_fc(repository, tensors, layers, target_size)
    said = fields.integer("draft_vocab_size", target_config.vocab_size)
    mask_token_id = num_parallel_tokens = None
    if is_parallel(top.content, tensors):
        mask_token_id, num_parallel_tokens = _mask_token(path, top, eagle), _trained_length(path, top)
    config = Eagle3Config(
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=target_config.vocab_size,
        draft_vocab_size=draft_vocabulary_of(repository, tensors, said),
        target_hidden_size=target_size,
        aux_layers=layers,
        windows=windows_of(tensors, fields),
        hidden_act=activation_of(fields),
        rope_parameters=rope_of(fields),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        # Where the field is missing, servers take speculators' heads as trained with it and all others without.
        norm_before_residual=fields.flag("norm_before_residual", "speculators_model_type" in top),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=fields.flag("norm_output", False) if norm_output is None else norm_output,
        **layer_fields_of(repository, tensors, fields),
        fc_bias="fc.bias" in tensors,
        mask_token_id=mask_token_id,
        num_parallel_tokens=num_parallel_tokens,
    )
    return config, guessed


def _refuse_variants(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Heads whose graph or storage is another one."""
    if any("q_a_proj" in name or "kv_a_proj" in name for name in tensors):
        raise ValueError(f"{repository.path} is a head with latent attention (MLA), which is not served yet.")
    refuse_quantised(repository, tensors, fields)


def _mask_token(path: Path, top: Fields, eagle: Fields) -> int:
    """The token that stands for those to be guessed."""
    fields = Fields(path, eagle.content, top.content)  # not the layers', which are often a copy of the target's
    name = next((name for name in _MASK_TOKEN_FIELDS if name in fields), None)
    if name is None:
        raise ValueError(
            f"{path} is a P-EAGLE head and its config.json does not say which token it masks with; one of "
            f"{', '.join(_MASK_TOKEN_FIELDS)} belongs there."
        )
    return fields.integer(name, 0, least=0)


def _trained_length(path: Path, top: Fields) -> int | None:
    """Tokens that a draft of speculators' training has; nobody else writes it down."""
    name, proposals = "speculative_tokens", Fields(path, top.inner("speculators_config")).objects("proposal_methods")
    lengths = [one.integer(name, 1) for one in (Fields(path, proposal) for proposal in proposals) if name in one]
    return max(lengths, default=None)


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
