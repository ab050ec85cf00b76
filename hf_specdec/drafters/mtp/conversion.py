"""From tensors as they are published to those that a target's decoder layer has: block scales, experts in one tensor.

The second is what transformers' loader does, so its own rules are applied, by the target's model type.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from .families import without_outer

# What a weight's name ends in and its scale's in the place of that; they multiply it in spite of the first one's name.
_SCALES = (("", "_scale_inv"), ("", "_scale"), ("weight", "scale"))
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_USUAL_BLOCK = (128, 128)  # DeepSeek-V3's
_FP4_BLOCK = (1, 32)  # of the OCP microscaling formats, as DeepSeek-V4's experts are packed
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 by its lower three bits; the fourth is the sign


def dequantised(
    tensors: dict[str, torch.Tensor], quantisation: Any, dtype: torch.dtype, where: str
) -> dict[str, torch.Tensor]:
    """The tensors with fp8 weights, and fp4 ones packed by two in a byte, multiplied out: those in `dtype`.

    Args:
        tensors: as published; a scale of X is X_scale_inv or X_scale, or of X.weight it is X.scale.
        quantisation: the checkpoint's `quantization_config`, None without one.
        where: of the checkpoint, for messages.

    Raises:
        ValueError: weights are packed in another way, or a scale has no place.
    """
    size = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    size = size or getattr(quantisation, "weight_block_size", None) or _USUAL_BLOCK
    plain, scales = dict(tensors), {}
    for name, tensor in tensors.items():
        for scale in (name.removesuffix(old) + new for old, new in _SCALES if name.endswith(old)):
            if scale in plain and (tensor.dtype in _FP8 or _is_fp4(tensor, tensors[scale])):
                scales[name] = plain.pop(scale)
    for name, tensor in plain.items():
        if name in scales and tensor.dtype in _FP8:
            plain[name] = _multiplied(name, tensor.float(), scales[name], tuple(size), where).to(dtype)
        elif name in scales:
            plain[name] = _multiplied(name, _unpacked(tensor), scales[name], _FP4_BLOCK, where).to(dtype)
        elif tensor.dtype not in _PLAIN:
            lack = " without a scale" if tensor.dtype in _FP8 else ""
            raise ValueError(
                f"{where} holds {name} as {tensor.dtype}{lack}; MTP layers are read from plain weights, from fp8 and "
                "from fp4 with block scales. Take an unquantised repository: "
                "AutoDrafter.for_target(model, 'mtp', repository=...)."
            )
    return plain


def _is_fp4(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether bytes are pairs of fp4 numbers, with an exponent for each block of them."""
    return (
        weight.dtype in (torch.int8, torch.uint8)
        and scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
        and weight.dim() == scale.dim() == 2
        and 2 * weight.shape[1] == _FP4_BLOCK[1] * scale.shape[1]
    )


def _unpacked(weight: torch.Tensor) -> torch.Tensor:
    """[rows, 2 n] fp32 numbers of bytes [rows, n], each with the first one in its lower half."""
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)], device=weight.device)
    pairs = weight.view(torch.uint8).int()
    return numbers[torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)]


def _multiplied(
    name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...], where: str
) -> torch.Tensor:
    """A weight [..., rows, columns] in fp32 times a scale for each block, row, column or tensor."""
    scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
    if scale.numel() > 1:
        if scale.dim() == 1:
            scale = scale[:, None]
        for dim, size in zip((-2, -1), block, strict=True):
            length, given = weight.shape[dim], scale.shape[dim]
            if given in (1, length):
                continue
            if given != math.ceil(length / size):
                raise ValueError(
                    f"{where} has a scale of shape {list(scale.shape)} for {name} of shape {list(weight.shape)}, which "
                    f"blocks of {list(block)} do not explain."
                )
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, length)
    return weight * scale


def converted(
    tensors: dict[str, torch.Tensor], expected: Collection[str], target: PreTrainedModel
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Tensors of decoder layers, named as in a checkpoint of the target's text part, as its classes hold them.

    Args:
        expected: names that the classes have; what no rule leads to one of them stays as it is.
        target: whose rules apply.

    Returns:
        (the tensors, names of those that others were to be joined with and that are not there).
    """
    rules = _rules(target)
    joins = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renames = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in joins for pattern in rule.source_patterns}
    done: dict[str, torch.Tensor] = {}
    pending: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renames, joins)
        renamed = _in_text_part(renamed)
        if renamed not in expected:
            done[name] = tensors[name]
        elif pattern is None:
            done[renamed] = tensors[name]
        else:
            if renamed not in pending:  # a rule collects the tensors of one result
                pending[renamed] = copy.deepcopy(by_pattern[pattern])
            pending[renamed].add_tensor(renamed, name, pattern, tensors[name])
    missing = [name for rule in pending.values() for name in _partners(rule) if name not in tensors]
    if missing:
        return done, missing
    for name, rule in pending.items():
        for full_name, tensor in rule.convert(name, config=target.config).items():
            done[full_name] = tensor[0] if isinstance(tensor, list) else tensor
    return done, []


def _rules(target: PreTrainedModel) -> list[Any]:
    """transformers' rules for a target and for its text part, by class or else by model type."""
    rules, seen = [], set()
    for part in (target, target.get_decoder()):
        for key in (type(part).__name__, part.config.model_type):
            found = get_checkpoint_conversion_mapping(key)
            if found is not None:
                if key not in seen:
                    rules += found
                seen.add(key)
                break
    return rules


def _in_text_part(name: str) -> str:
    """A name as a checkpoint of the text part alone has it: rules of composite models put its place in front."""
    return "model." + without_outer(name)


def _partners(rule: WeightConverter) -> set[str]:
    """Names that a rule's tensors ask for: an expert with a gate has an "up", too."""
    tails = [pattern.rpartition("*")[2] for pattern in rule.source_patterns]
    names = [name for sources in rule.layer_targets.values() for name in sources]
    return {name.removesuffix(old) + new for name in names for old in tails if name.endswith(old) for new in tails}
