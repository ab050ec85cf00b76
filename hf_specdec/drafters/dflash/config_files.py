"""What the config.json of every published DFlash format says, as one BlockConfig.

Sizes come from the tensors where tensors can say them: configs copy fields of the target, or hold nulls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..auto import Repository
from ..common.block_config import BlockConfig
from ..common.config_files import (
    activation_of,
    check_fc,
    check_vocabulary,
    draft_vocabulary_of,
    heads_of,
    layer_fields_of,
    needed,
    refuse_quantised,
    rope_of,
    rows_of,
    windows_of,
)
from ..common.fields import Fields
from .layer_ids import read_aux_layers
from .modeling import DFlash2Parts

NATIVE = "muse_glimmer_assistant"
"""The model type of transformers' own DFlash class."""

_NATIVE_DEFAULTS = {  # of MuseGlimmerAssistantConfig
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "sliding_window": 2048,
    "head_dim": 128,
}
_DEFAULT_BLOCK_SIZE = {"z-lab": 16, "speculators": 8, "transformers": 16}
_REFUSED_TENSORS = (  # part of a name, what it belongs to
    ("mask_embedding", "a mask embedding of its own (mask_embedding)"),
    ("sink", "attention sinks (attention_sink_bias)"),
    ("prefix_gru", "a Domino projector (prefix_gru)"),
    ("qkv_proj", "fused queries, keys and values (qkv_proj)"),
    ("g_proj.", "gated attention (g_proj)"),
    ("aux_hidden_norms.", "a norm for each hidden state (aux_hidden_norms)"),
)


def read_config(
    repository: Repository, tensors: dict[str, torch.Tensor], target: PreTrainedModel, aux_layers: Sequence[int] | None
) -> tuple[BlockConfig, DFlash2Parts | None]:
    """(the network, what DFlash 2 adds to it)."""
    path, top = repository.path, Fields(repository.path, repository.config)
    spelling = "speculators" if "speculators_model_type" in top else "z-lab"
    spelling = "transformers" if top.content.get("model_type") == NATIVE else spelling
    layer, nested = top.inner("transformer_layer_config"), top.inner("dflash_config")
    defaults = _native_defaults(tensors, target) if spelling == "transformers" else {}
    fields = Fields(path, defaults, top.content, layer, nested)
    _refuse_variants(repository, tensors, fields)
    theirs = target.config.get_text_config()
    check_vocabulary(repository, tensors, fields, theirs.vocab_size)

    hidden_size = rows_of(repository, tensors, "fc.weight")
    parts = _read_parts(repository, tensors, fields, hidden_size, theirs.vocab_size)
    num_heads, num_key_value_heads, head_dim = heads_of(repository, tensors, fields)
    windows, causal = _read_attention(fields, tensors, spelling, parts is not None)
    target_size = fields.integer("target_hidden_size", theirs.hidden_size)
    layers = read_aux_layers(fields, len(windows), theirs.num_hidden_layers, aux_layers)
    check_fc(repository, tensors, layers, target_size)
    said = fields.integer("draft_vocab_size", theirs.vocab_size)
    block_size, first_slot = _read_block(fields, spelling)
    scale, cap = _read_logits(fields, spelling)
    config = BlockConfig(
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=draft_vocabulary_of(repository, tensors, said),
        target_hidden_size=target_size,
        aux_layers=layers,
        block_size=block_size,
        first_slot=first_slot,
        mask_token_id=_read_mask_token(fields),
        windows=windows,
        causal=causal,
        windows_from_anchor=spelling == "speculators",
        hidden_act=activation_of(fields),
        rope_parameters=rope_of(fields),
        max_position_embeddings=fields.integer("max_position_embeddings", 32768),
        **layer_fields_of(repository, tensors, fields),
        embedding_scale=fields.number("input_embedding_scale", 1.0) if spelling == "z-lab" else 1.0,
        logit_scale=scale,
        logit_cap=cap,
    )
    return config, parts


def _refuse_variants(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Drafters whose graph or storage is another one."""
    path, projector = repository.path, fields.text("projector_type", "dflash")
    if projector == "domino":
        raise ValueError(f"{path} is a Domino drafter (projector_type 'domino'), which is not served yet.")
    if projector != "dflash":
        raise ValueError(f"{path} has projector_type {projector!r}, which is not known; DFlash drafters have none.")
    refuse_quantised(repository, tensors, fields)
    for part, what in _REFUSED_TENSORS:
        name = next((name for name in tensors if part in name), None)
        if name is not None:
            raise ValueError(f"{path} has the tensor {name}: {what}, which is not served yet.")
    if fields.content.get("attention_sink_bias"):
        raise ValueError(f"{path} has attention_sink_bias, which is not served yet.")
    scale = fields.number("attention_value_scale", 1.0)
    if scale != 1.0:
        raise ValueError(f"{path} has attention_value_scale {scale}, which is not served yet.")
    if any(isinstance(value, dict) for value in fields.inner("rope_parameters").values()):
        raise ValueError(f"{path} has rope_parameters for each type of layer, which is not served yet.")


def _read_block(fields: Fields, spelling: str) -> tuple[int, int]:
    """(rows of a block, the first one that guesses)."""
    first_slot = 0 if fields.flag("sample_from_anchor", False) else 1
    block_size = fields.integer("block_size", _DEFAULT_BLOCK_SIZE[spelling])
    if block_size <= first_slot:
        raise ValueError(f"config.json in {fields.path} has block_size {block_size}, and the anchor's row is no draft.")
    return block_size, first_slot


def _read_mask_token(fields: Fields) -> int:
    value = fields.content.get("mask_token_id")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"config.json in {fields.path} has mask_token_id {value!r} where the id of a token belongs.")
    return value


def _read_logits(fields: Fields, spelling: str) -> tuple[float, float | None]:
    """(what logits are multiplied with, their cap); a cap of 0 is none. speculators trains on bare logits, whatever
    the layer's config copies from the target."""
    if spelling == "speculators":
        return 1.0, None
    capped = fields.content.get("final_logit_softcapping") not in (0, 0.0)
    cap = fields.number("final_logit_softcapping", 1.0) if capped and "final_logit_softcapping" in fields else None
    return fields.number("output_multiplier", 1.0), cap


def _read_attention(
    fields: Fields, tensors: dict[str, torch.Tensor], spelling: str, is_second: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """(window of each layer, whether it is causal inside a block)."""
    kinds = set(fields.texts("layer_types"))
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"config.json in {fields.path} has layers of type {', '.join(sorted(unknown))}; full_attention and "
            "sliding_attention are served."
        )
    slides = "sliding_attention" in kinds or fields.flag("use_sliding_window", False)
    if slides and "sliding_window" not in fields:
        raise ValueError(f"config.json in {fields.path} has layers that slide and no sliding_window.")
    windows = windows_of(tensors, fields)
    if fields.flag("use_swa", False):  # ModelOpt leaves layer_types as they are
        if "swa_window_size" not in fields:
            raise ValueError(f"config.json in {fields.path} has use_swa and no swa_window_size.")
        windows = (fields.integer("swa_window_size", 1),) * len(windows)
    if spelling == "transformers":
        # A bidirectional window of transformers includes the token at that distance, z-lab's does not.
        return tuple(None if window is None else window + 1 for window in windows), (False,) * len(windows)
    causal = tuple(window is not None for window in windows)  # a full layer sees the whole block
    if spelling == "speculators":
        return windows, (False,) * len(windows) if fields.flag("sliding_window_non_causal", is_second) else causal
    for name in ("is_causal", "causal"):
        if name in fields:
            return windows, (fields.flag(name, False),) * len(windows)
    return windows, causal


def _read_parts(
    repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields, hidden_size: int, vocab_size: int
) -> DFlash2Parts | None:
    """What DFlash 2 adds, None for DFlash; the convolutions and the selector come together."""
    kernel, codebook = "layers.0.attention_conv.base_kernel", "candidate_selector.predecessor_codebook"
    named = fields.content.get("architectures") == ["DFlash2DraftModel"]
    if (
        not named
        and fields.content.get("speculators_model_type") != "dflash2"
        and tensors.keys().isdisjoint({kernel, codebook})
    ):
        return None
    path, base = repository.path, tensors.get(kernel)
    if base is None or base.dim() != 3 or base.shape[0] != 2 or base.shape[2] != hidden_size:
        found = "none" if base is None else f"one of shape {list(base.shape)}"
        raise ValueError(
            f"{path} is a DFlash 2 drafter, whose {kernel} has the shape [2, taps, {hidden_size}]; it has {found}."
        )
    num_taps = base.shape[1]
    rows = rows_of(repository, tensors, "layers.0.attention_conv.kernel_projection.weight")
    num_groups = rows // max(2 * num_taps, 1)
    if not num_groups or rows != 2 * num_taps * num_groups or hidden_size % num_groups:
        raise ValueError(
            f"{path} has convolutions with {rows} dynamic weights for {num_taps} taps and {hidden_size} channels, "
            "which makes no groups of equal size."
        )
    codes = needed(repository, tensors, codebook)
    if codes.shape[0] < vocab_size:
        raise ValueError(
            f"{path} has a candidate selector for {codes.shape[0]} tokens and the target has {vocab_size}; it was "
            "trained for another target."
        )
    return DFlash2Parts(
        num_taps=num_taps,
        group_size=hidden_size // num_groups,
        num_codes=codes.shape[0],
        rank=codes.shape[1],
        num_candidates=fields.integer("selector_top_k", 16),
    )


def _native_defaults(tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> dict[str, Any]:
    """What config.json may leave out, and how the target makes logits of its head, which the class leaves to it."""
    names = [f"layers.{i}.input_layernorm.weight" for i in range(len(tensors))]
    num_layers, theirs = sum(name in tensors for name in names), target.config.get_text_config()
    fields = ("final_logit_softcapping", "output_multiplier")
    logits = {name: getattr(theirs, name) for name in fields if getattr(theirs, name, None) is not None}
    return {**_NATIVE_DEFAULTS, "layer_types": ["sliding_attention"] * num_layers, **logits}
