"""What the config.json of every published DSpark format says, as one BlockConfig and one DSparkHeads.

Trainers start from a copy of the target's config, so a field may describe the target and not the drafter: whatever
tensors can say is taken from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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
from .head_files import W2, read_heads
from .modeling import DSparkHeads

_Q, _Q_NORM = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_norm.weight"
_CAUSAL_FIELDS = ("is_causal", "causal", "dflash_query_causal")


def is_gemma4(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether the layers are of Gemma 4's kind."""
    return "layers.0.pre_feedforward_layernorm.weight" in tensors


def read_config(
    repository: Repository,
    tensors: dict[str, torch.Tensor],
    target: PreTrainedModel,
    aux_layers: Sequence[int] | None = None,
    first_slot: int | None = None,
) -> tuple[BlockConfig, DSparkHeads]:
    """What the drafter is.

    Raises:
        ValueError: a field or a tensor is missing, wrong, contradicts another, or stands for what is not served.
    """
    path, top = repository.path, Fields(repository.path, repository.config)
    own = Fields(path, top.content, top.inner("dflash_config"))  # what the method itself has set
    fields = Fields(path, own.content, top.inner("transformer_layer_config"))
    gemma4, target_config = is_gemma4(tensors), target.config.get_text_config()
    _refuse_variants(repository, tensors, fields, gemma4)
    vocab_size = target_config.vocab_size
    check_vocabulary(repository, tensors, fields, vocab_size)
    layers = _aux_layers(repository, top, own, target_config.num_hidden_layers, aux_layers)
    hidden_size = rows_of(repository, tensors, "fc.weight")
    target_size = fields.integer("target_hidden_size", target_config.hidden_size)
    check_fc(repository, tensors, layers, target_size)
    said = rows_of(repository, tensors, W2) if W2 in tensors else vocab_size
    num_heads, num_key_value_heads, head_dim = _heads(repository, tensors, fields)
    windows = windows_of(tensors, fields)
    block_size = _needed_integer(own, "block_size")
    activation = ("hidden_activation", "gelu_pytorch_tanh") if gemma4 else ()
    config = BlockConfig(
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocabulary_of(repository, tensors, said),
        target_hidden_size=target_size,
        aux_layers=layers,
        block_size=block_size,
        first_slot=_first_slot(top, own, block_size, first_slot),
        mask_token_id=_needed_integer(own, "mask_token_id", least=0),
        windows=windows,
        causal=_causal(own, windows),
        windows_from_anchor="speculators_model_type" in top,
        hidden_act=activation_of(fields, *activation),
        rope_parameters=_proportional_rope(fields) if gemma4 else rope_of(fields),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        **layer_fields_of(repository, tensors, fields),
        attention_scale=1.0 if gemma4 else None,
        embedding_scale=hidden_size**0.5 if gemma4 else own.number("input_embedding_scale", 1.0),
        logit_scale=own.number("output_multiplier", 1.0),
        logit_cap=own.number("final_logit_softcapping", 1.0) if "final_logit_softcapping" in own else None,
    )
    return config, read_heads(repository, tensors, own, config)


def _refuse_variants(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields, gemma4: bool) -> None:
    """Drafters whose graph or storage is another one."""
    path = repository.path
    without_copies = {name: value for name, value in fields.content.items() if name != "quantization_config"}
    refuse_quantised(repository, tensors, Fields(path, without_copies))
    if not fields.flag("rope_is_neox_style", True):
        raise ValueError(f"{path} has rope_is_neox_style false, an interleaved rotary embedding: not served yet.")
    if fields.text("attention_mode", "gqa") != "gqa" or any("kv_a_proj" in name for name in tensors):
        mode = fields.text("attention_mode", "mla")
        raise ValueError(f"{path} has the attention_mode {mode!r}; drafters with 'gqa' attention are served.")
    if fields.flag("attention_sink_bias", False) or any("sink" in name for name in tensors):
        raise ValueError(f"{path} has attention sinks (attention_sink_bias), which are not served yet.")
    if fields.flag("use_swa", False):
        raise ValueError(f"{path} has use_swa true, which does not say which layers slide: not served yet.")
    if fields.number("attention_value_scale", 1.0) != 1.0:
        raise ValueError(f"{path} has an attention_value_scale, which is not served yet.")
    if fields.content.get("log_snr_conditioning"):
        raise ValueError(f"{path} has log_snr_conditioning, which is not served yet.")
    if "mask_embedding" in tensors or "mask_embedding.weight" in tensors:
        raise ValueError(f"{path} has a mask_embedding of its own beside the embedding, which is not served yet.")
    if any(".experts." in name for name in tensors):
        raise ValueError(f"{path} has mixtures of experts in its layers, which are not served yet.")
    if gemma4 and any("per_layer_input_gate" in name for name in tensors):
        raise ValueError(f"{path} has hidden_size_per_layer_input, which is not served yet.")


def _heads(repository: Repository, tensors: dict[str, torch.Tensor], fields: Fields) -> tuple[int, int, int]:
    """(attention heads, key-value heads, head size); a norm per head tells their size."""
    queries = rows_of(repository, tensors, _Q)
    mixed = needed(repository, tensors, "layers.0.self_attn.o_proj.weight").shape[1]
    if queries == 2 * mixed:
        raise ValueError(
            f"{repository.path} has a q_proj of {queries} rows for an o_proj of {mixed} inputs, so its attention has "
            "an output gate (attn_output_gate), which is not served yet."
        )
    if _Q_NORM in tensors:
        size = max(1, tensors[_Q_NORM].numel())
        fields = Fields(fields.path, fields.content, {"head_dim": size, "num_attention_heads": max(1, queries // size)})
    return heads_of(repository, tensors, fields)


def _aux_layers(
    repository: Repository, top: Fields, own: Fields, num_target_layers: int, override: Sequence[int] | None
) -> tuple[int, ...]:
    """Hidden states that the drafter reads, as entering ids: `target_layer_ids` name the layer that one comes out of,
    speculators' `aux_hidden_state_layer_ids` the layer that it enters."""
    if override is not None:
        layers = tuple(override)
    elif "speculators_model_type" in top:
        layers = top.layer_ids("aux_hidden_state_layer_ids")
    else:
        layers = tuple(i + 1 for i in own.layer_ids("target_layer_ids"))
    if not layers:
        raise ValueError(
            f"config.json in {repository.path} does not say which hidden states the drafter reads (target_layer_ids, "
            "aux_hidden_state_layer_ids); give aux_layers=..., where index e is the input of layer e."
        )
    trained_on = own.integer("num_target_layers", num_target_layers)
    if min(layers) < 0 or max(layers) > num_target_layers or trained_on != num_target_layers:
        raise ValueError(
            f"{repository.path} reads the hidden states {list(layers)} of a target of {trained_on} layers and the "
            f"target has {num_target_layers} layers; it was trained for another target, or on other layers "
            "(aux_layers=...)."
        )
    return layers


def _first_slot(top: Fields, own: Fields, block_size: int, override: int | None) -> int:
    """The first row of a block that guesses. A wrong one gives no error, only few accepted tokens."""
    if override is not None:
        if override not in (0, 1) or isinstance(override, bool):
            raise ValueError(f"`first_slot` is {override!r}; give 0 (the anchor's row guesses) or 1 (it does not).")
        return override
    told = "sample_from_anchor" in own
    by_flag = 0 if own.flag("sample_from_anchor", "speculators_model_type" not in top) else 1
    if not own.flag("shift_label", True):  # ModelOpt's word for it
        by_flag = 1
    proposals = top.inner("speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict) else {}
    proposal = Fields(top.path, first)
    if "speculative_tokens" not in proposal:
        return by_flag
    by_count = block_size - proposal.integer("speculative_tokens", block_size)
    if by_count not in (0, 1):
        if told:
            return by_flag
        raise ValueError(
            f"config.json in {top.path} has speculative_tokens {block_size - by_count} for a block_size of "
            f"{block_size}, which does not say which row of a block guesses first; give first_slot=0 or first_slot=1."
        )
    if told and by_count != by_flag:
        warnings.warn(
            f"config.json in {top.path} has sample_from_anchor {not by_flag}, and speculative_tokens say otherwise; "
            f"first_slot={by_count} is taken. If acceptance is low, give first_slot={by_flag}.",
            stacklevel=2,
        )
    return by_count


def _causal(own: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Where no field says it for all layers, layers with a window are causal inside a block and others are not."""
    for name in _CAUSAL_FIELDS:
        if name in own:
            return (own.flag(name, False),) * len(windows)
    slides_causally = not own.flag("sliding_window_non_causal", False)
    return tuple(window is not None and slides_causally for window in windows)


def _proportional_rope(fields: Fields) -> dict[str, object]:
    """Gemma 4's rotary embedding of full attention: the first part of a head turns, at the frequencies of all of it."""
    rope = Fields(fields.path, fields.inner("rope_parameters"))
    rope = Fields(fields.path, rope.content, rope.inner("full_attention"))
    kind = rope.text("rope_type", "proportional")
    if kind not in ("proportional", "default"):
        raise ValueError(f"{fields.path} has a rotary embedding of type {kind!r}; Gemma 4's is 'proportional'.")
    found: dict[str, object] = {"rope_type": kind, "rope_theta": rope.number("rope_theta", 1e6)}
    if kind == "proportional":
        found["partial_rotary_factor"] = rope.number("partial_rotary_factor", 0.25)
    return found


def _needed_integer(fields: Fields, name: str, least: int = 1) -> int:
    if name not in fields:
        raise ValueError(f"config.json in {fields.path} has no {name}, which a DSpark drafter needs.")
    return fields.integer(name, least, least)
