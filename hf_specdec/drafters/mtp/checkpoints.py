"""MTP layers from a target's own checkpoint, or from a repository that holds nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...decoding.placement import input_device, present_weight
from ..auto import DrafterFormat, Repository
from ..base import Drafter, check_decoder_only
from ..common.checkpoints import compare, read_tensors, target_ids_of
from ..common.vocabulary import checked_draft_vocab
from .conversion import converted, dequantised
from .families import FAMILIES, MtpFamily, family_of, without_outer
from .modeling import MtpModel, num_blocks
from .refusals import NOT_SERVED
from .session import MtpDrafter
from .source import source_of

# What engines leave beside weights: positions that are computed anew, scales of activations and of caches.
_IGNORED = ("rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale")
_OF_DSPARK = ".main_proj."  # DeepSeek-V4-Flash-0731 calls its drafter's layers as others call MTP layers
_FAMILY_FIELD = "mtp_family"  # in config.json of a standalone repository, where names leave it open
_CARRY_FIELD = "mtp_carry"  # there, too, for layers that were trained on another state than their family's


def detect(repository: Repository) -> DrafterFormat | None:
    """By tensors: MTP layers of a known family, and no other layer beside them."""
    if repository.tensors is None:
        return None
    names = repository.tensors - {"d2t", "t2d"}  # which tokens they draft
    family = next((family for family in FAMILIES if family.fills(names)), None)
    if family is None:
        return None
    reason = "tensors are those of MTP layers, without a target"
    return DrafterFormat("mtp", f"standalone, names of {family.name}", reason)


def load(
    repository: Repository,
    *,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    draft_vocab: int | Sequence[int] | torch.Tensor | None = None,
    **overrides: Any,
) -> MtpDrafter:
    """Read a repository that holds MTP layers only.

    Args:
        repository: the folder.
        target: the model that they were trained for.
        dtype, device: of the weights.
        draft_vocab: the tokens to draft, as ids or how many of the lowest ones; by default those that d2t names, a
            tensor as EAGLE-3 heads have it, or all.
        overrides: fields of SpecConfig.

    Raises:
        ValueError: tensors are missing, surplus or of a wrong shape, or the target is another one.
    """
    check_decoder_only(target, MtpDrafter.method)
    MtpDrafter.check_options(**overrides)
    vocab_size = target.config.get_text_config().vocab_size
    tensors = read_tensors(repository)
    size = tensors["d2t"].numel() if "d2t" in tensors else vocab_size
    target_ids = target_ids_of(repository, tensors, size, vocab_size)
    if draft_vocab is not None:
        target_ids = checked_draft_vocab(draft_vocab, vocab_size)
    family = _with_carry(repository, _standalone_family(repository, target, tensors))
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        found, wanted = repository.config.get(name), getattr(target.config.get_text_config(), name)
        if found is not None and found != wanted:
            raise ValueError(
                f"{repository.path} was made for a target with {name} {found} and this one's is {wanted}; it belongs "
                "to another target."
            )
    model = build(repository, tensors, family, target, dtype, (repository.config,))
    return MtpDrafter(model.eval(), target_ids, **overrides).to(device)


def load_from_target(
    target: PreTrainedModel,
    *,
    repository: str | Path | None = None,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    draft_vocab: int | Sequence[int] | torch.Tensor | None = None,
    **overrides: Any,
) -> Drafter:
    """The MTP layers in the target's own checkpoint; of its files, only those that hold them are read.

    Args:
        target: the model.
        repository: another checkpoint of it to read from, an unquantised one for instance.
        revision, subfolder, token, local_files_only: as in transformers; the revision by default that of the target.
        dtype, device: of the weights; by default the target's dtype and the device of its last layer.
        draft_vocab: the tokens to draft, as ids or how many of the lowest ones; all by default.
        overrides: fields of SpecConfig.

    Raises:
        ValueError: the family is not known, or its tensors are not there or not complete.
        OSError: the checkpoint cannot be found or downloaded.
    """
    check_decoder_only(target, MtpDrafter.method)
    MtpDrafter.check_options(**overrides)
    text = target.config.get_text_config()
    family = family_of(text.model_type)
    if text.model_type in NOT_SERVED:
        raise ValueError(
            f"`method` is 'mtp' and targets of type {text.model_type!r} are not served: {NOT_SERVED[text.model_type]}. "
            "Take another drafter; AutoDrafter.for_target(model, 'lookup') needs no weights."
        )
    if family is None:
        known = ", ".join(model_type for row in FAMILIES for model_type in row.model_types)
        raise ValueError(
            f"`method` is 'mtp' and no MTP layers are known for targets of type {text.model_type!r}; they are for "
            f"{known}."
        )
    target_ids = None if draft_vocab is None else checked_draft_vocab(draft_vocab, text.vocab_size)
    source = source_of(target, repository, revision, subfolder, token, local_files_only)
    configs = (text, target.config)
    num_layers = _num_layers(source.name, list(source.files), family, target, configs)
    prefixes = _all_prefixes(family, target, num_layers)
    wanted = [name for name in source.files if any(without_outer(name).startswith(old) for old, _ in prefixes)]
    if name := next((name for name in wanted if _OF_DSPARK in name), None):
        raise ValueError(
            f"`method` is 'mtp' and {source.name} has a DSpark drafter ({name}) in the place of MTP layers, which is "
            "not read from there. Name a repository that has them: for_target(model, 'mtp', repository=...)."
        )
    found = Repository(
        Path(source.name),
        config={"quantization_config": getattr(target.config, "quantization_config", None)},
        tensors=None,
    )
    dtype = target.dtype if dtype is None else dtype
    model = build(found, source.read(wanted), family, target, dtype, configs)
    device = _last_device(target) if device is None else device
    return MtpDrafter(model.eval(), target_ids, **overrides).to(device).bind(target)


def build(
    repository: Repository,
    tensors: dict[str, torch.Tensor],
    family: MtpFamily,
    target: PreTrainedModel,
    dtype: torch.dtype,
    configs: tuple[Any, ...],
) -> MtpModel:
    """The network with its weights.

    Args:
        repository: where the tensors are from; its config tells how they are quantised.
        tensors: as published.
        configs: what tells the number of layers.
    """
    where = str(repository.path)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_IGNORED)}
    num_layers = _num_layers(where, list(tensors), family, target, configs)
    tensors = dequantised(tensors, repository.config.get("quantization_config"), dtype, where)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    theirs = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    shared = {without_outer(name): tensor for name, tensor in tensors.items() if without_outer(name) in theirs}
    layers = [{**shared, **_of_layer(tensors, family, target, index)} for index in range(num_layers)]
    own = {
        name
        for name, module in theirs.items()
        if any(name in layer and not _is_copy(layer[name], module) for layer in layers)
    }
    with torch.device("meta"):
        model = MtpModel(target, family, num_layers, "embed_tokens.weight" in own, "lm_head.weight" in own)
    found = {
        f"layers.{index}.{name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
        if name not in theirs or name in own
    }
    expected = model.state_dict()
    found = _converted_blocks(repository, found, expected, target, model)
    ours, theirs = ({model.published_name(name): tensor for name, tensor in one.items()} for one in (expected, found))
    compare(repository, ours, theirs)
    in_fp32 = tuple(target._get_dtype_plan(dtype))
    model.load_state_dict(
        {
            name: tensor.to(torch.float32 if any(part in name for part in in_fp32) else dtype)
            for name, tensor in found.items()
        },
        assign=True,
    )
    if stuck := [name for name, tensor in model.named_buffers() if tensor.is_meta]:
        raise ValueError(f"MTP layers of {type(target).__name__} are not served: {stuck[0]} is in no checkpoint.")
    return model.requires_grad_(False)


def _num_layers(
    where: str, names: list[str], family: MtpFamily, target: PreTrainedModel, configs: tuple[Any, ...]
) -> int:
    """MTP layers that the config promises or, where it says nothing, the tensors show.

    Raises:
        ValueError: there are none.
    """
    text = target.config.get_text_config()
    there = family.count(names, text.num_hidden_layers, num_blocks(text, family))
    told = family.num_layers(*configs)
    examples = ", ".join(old + "*" for old, _ in family.prefixes(0, text.num_hidden_layers)[:3])
    if told is not None and told[0] > 0 and not there:
        raise ValueError(
            f"the config promises {told[0]} MTP layers ({told[1]}) and {where} has no tensors named {examples}; it was "
            "published without them. Name a repository that has them: for_target(model, 'mtp', repository=...)."
        )
    if not there or (told is not None and told[0] == 0):
        unset = f"no config field {' or '.join(family.count_fields)} is above zero, or " if family.count_fields else ""
        raise ValueError(f"{where} has no MTP layers for this target: {unset}no tensors are named {examples}.")
    return told[0] if told is not None else there


def _standalone_family(repository: Repository, target: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> MtpFamily:
    """The row that a standalone repository names, else that of the target, else the first whose names are its."""
    named, names = repository.config.get(_FAMILY_FIELD), list(tensors)
    if named is not None:
        family = next((family for family in FAMILIES if family.name == named), None)
        if family is None or not family.fills(names):
            known = ", ".join(family.name for family in FAMILIES)
            raise ValueError(
                f"config.json in {repository.path} has {_FAMILY_FIELD} {named!r}, which its tensors do not bear out; "
                f"families are {known}."
            )
        return family
    of_target = family_of(target.config.get_text_config().model_type)
    if of_target is not None and of_target.fills(names):
        return of_target
    return next(family for family in FAMILIES if family.fills(names))


def _with_carry(repository: Repository, family: MtpFamily) -> MtpFamily:
    """The row with the carry that a standalone repository names, if it does."""
    carry = repository.config.get(_CARRY_FIELD, family.carry)
    if carry not in ("raw", "normed"):
        raise ValueError(f"config.json in {repository.path} has {_CARRY_FIELD} {carry!r}; it is 'raw' or 'normed'.")
    if family.streams is not None and carry != "raw":
        raise ValueError(
            f"config.json in {repository.path} has {_CARRY_FIELD} {carry!r}; layers of {family.name} pass on the "
            "streams as they are, so it is 'raw'."
        )
    return replace(family, carry=carry)


def _all_prefixes(family: MtpFamily, target: PreTrainedModel, num_layers: int) -> list[tuple[str, str]]:
    text = target.config.get_text_config()
    count = num_blocks(text, family)
    return [pair for i in range(num_layers) for pair in family.prefixes(i, text.num_hidden_layers, count)]


def _of_layer(
    tensors: dict[str, torch.Tensor], family: MtpFamily, target: PreTrainedModel, index: int
) -> dict[str, torch.Tensor]:
    """The tensors of MTP layer `index` by our names in it; those that all layers share are among them."""
    text = target.config.get_text_config()
    prefixes = family.prefixes(index, text.num_hidden_layers, num_blocks(text, family))
    named = {family.ours(name, prefixes): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def _converted_blocks(
    repository: Repository,
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    target: PreTrainedModel,
    model: MtpModel,
) -> dict[str, torch.Tensor]:
    """The tensors with those of the blocks as the target's classes hold them."""
    result = dict(found)
    for number in range(len(model.layers) * model.num_blocks):
        index, block = divmod(number, model.num_blocks)
        ours, theirs = f"layers.{index}.blocks.{block}.", f"model.layers.{model.first_layer + number}."
        named = {name.replace(ours, theirs, 1): result.pop(name) for name in found if name.startswith(ours)}
        wanted = {name.replace(ours, theirs, 1) for name in expected if name.startswith(ours)}
        named, missing = converted(named, wanted, target)
        if missing:
            names = sorted(model.published_name(name.replace(theirs, ours, 1)) for name in missing)
            raise ValueError(f"{repository.path} lacks the tensors {', '.join(names[:5])}.")
        result.update({name.replace(theirs, ours, 1): tensor for name, tensor in named.items()})
    return result


def _is_copy(weight: torch.Tensor, module: Any) -> bool:
    """Whether a published embedding or output head is the target's own, which is then not kept twice."""
    if module is None or getattr(module, "bias", None) is not None:
        return False
    with present_weight(module) as theirs:
        if theirs.dim() != 2 or theirs.shape[1] != weight.shape[1] or not theirs.is_floating_point():
            return False
        num_rows = min(len(theirs), len(weight))  # the target's may have been resized
        return torch.equal(weight[:num_rows].to(theirs.device, theirs.dtype), theirs[:num_rows].detach())


def _last_device(target: PreTrainedModel) -> torch.device | str:
    """Where the target's last layer runs, for its output is what the MTP layers read."""
    device = next(target.get_decoder().layers[-1].parameters()).device
    return input_device(target) if device.type == "meta" else device
