"""The one place that picks what verifies: Triton's kernels on a GPU, torch elsewhere.

The kernels are a project of their own (`kernels/`), linked into this package as `_kernels`. With the environment
variable HF_SPECDEC_KERNELS=hub they are fetched from the Hub instead, by the package `kernels`.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from .laws import Draft, OneHot, Sampled, Verdict
from .noise import SLOT_BITS, TARGET, RoundNoise

if TYPE_CHECKING:
    from .lenient_rule import LenientRule

HUB_REPOSITORY, HUB_VERSION = "hf-specdec/specdec-verify", 0
_RULES = ("match", "coupled", "rejection", "block")


@functools.cache
def load() -> ModuleType:
    """The kernel package.

    Raises:
        ImportError: Triton, or the package `kernels` for those of the Hub, is not installed.
    """
    source = os.environ.get("HF_SPECDEC_KERNELS", "")
    if source == "hub":
        return importlib.import_module("kernels").get_kernel(HUB_REPOSITORY, version=HUB_VERSION)
    if source:
        raise ValueError(f"HF_SPECDEC_KERNELS is {source!r}; the only value is 'hub', unset it otherwise.")
    from .. import _kernels

    return _kernels


def implementation(kernels: str, rule: str | LenientRule, device: torch.device) -> str:
    """ "triton" or "torch": what verifies a call.

    Args:
        kernels: `SpecConfig.kernels`.
        rule: the call's rule.
        device: where the target's scores are.

    Raises:
        ValueError: `kernels` is "triton" and they cannot run.
    """
    if kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return "torch"
    reason = _why_not(rule, device)
    if reason is None:
        return "triton"
    if kernels == "auto":
        return "torch"
    raise ValueError(f"`kernels` is 'triton', but {reason}; use 'auto' or 'torch'.")


def _why_not(rule: str | LenientRule, device: torch.device) -> str | None:
    """Why the kernels cannot serve a call, None where they can."""
    if rule not in _RULES:
        return f"{rule!r} is verified by torch only"
    try:
        interpreted = load().INTERPRETED
    except ImportError as error:
        return f"they cannot be loaded here ({error})"
    if device.type != "cuda" and not interpreted:
        return f"the target is on {device} and they run on a GPU"
    return None


def verify(draft: Draft, scores: torch.Tensor, rule: str, noise: RoundNoise | None) -> Verdict:
    """Decide a draft by a lossless rule; arguments and result are those of `rules.verify`, which checks them."""
    kernels, tokens, lengths = load(), draft.tokens, draft.lengths
    if rule in ("match", "coupled"):
        drawn: dict[str, Any] = {}
        if noise is not None:
            drawn = dict(keys=noise.noise.keys, counters=noise.positions.to(torch.int32), stream=TARGET)
            if draft.parents is not None:
                drawn["slots"] = pad(draft.depths(), (1, 0)).to(torch.int32)
        return _verdict(kernels.walk(scores, "gumbel" if drawn else "greedy", tokens, lengths, draft.parents, **drawn))
    assert noise is not None
    counters = torch.full(lengths.shape, noise.verification << SLOT_BITS, dtype=torch.int32, device=lengths.device)
    decide = kernels.residual if rule == "rejection" else kernels.block_mass
    law = _law(kernels, draft.law, scores.shape[-1])
    return _verdict(decide(scores, tokens, lengths, law, keys=noise.noise.keys, counters=counters))


def _law(kernels: ModuleType, law: OneHot | Sampled, vocab_size: int) -> Any:
    """The law as the kernels take it."""
    if isinstance(law, OneHot):
        return None
    is_reduced = law.ids is not None and law.ids.dim() == 1
    return kernels.DraftLaw(
        law.logits,
        positions=kernels.candidate_positions(law.ids, vocab_size) if is_reduced else None,
        ids=None if is_reduced else law.ids,
        one_hot=law.one_hot,
        lse=law.lse,
    )


def _verdict(found: Any) -> Verdict:
    return Verdict(found.num_accepted, found.tokens, found.path)
