"""The one place that picks what verifies: Triton's kernels on a GPU, torch elsewhere.

The kernels are a project of their own (`kernels/`), linked into this package as `_kernels`. With the environment
variable HF_SPECDEC_KERNELS=hub they are fetched from the Hub instead, by the package `kernels`.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .noise import TARGET, RoundNoise

if TYPE_CHECKING:
    from .lenient_rule import LenientRule

HUB_REPOSITORY, HUB_VERSION = "hf-specdec/specdec-verify", 0
_RULES = ("match", "coupled")


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
        return f"`rule` {rule!r} is verified by torch only"
    try:
        interpreted = load().INTERPRETED
    except ImportError as error:
        return f"they cannot be loaded here ({error})"
    if device.type != "cuda" and not interpreted:
        return f"the target is on {device} and they run on a GPU"
    return None


def choose(
    scores: torch.Tensor, noise: RoundNoise | None, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's choice at every row of `scores` [B, m, V], and a weight that is NaN where the row is broken.

    Args:
        scores: fp32, bf16 or fp16.
        noise: None takes the argmax, otherwise the choice is a draw with the target's own stream.
        slots: [B, m] positions past the round's first; None is 0 .. m - 1.
    """
    kernels = load()
    if noise is None:
        drawn = kernels.row_sample(scores, "greedy")
    else:
        drawn = kernels.row_sample(
            scores,
            "gumbel",
            keys=noise.noise.keys,
            counters=noise.positions.to(torch.int32),
            slots=None if slots is None else slots.to(torch.int32).contiguous(),
            stream=TARGET,
        )
    weights = torch.zeros_like(drawn.token, dtype=torch.float32)
    return drawn.token.clamp_min(0), weights.masked_fill(drawn.status != kernels.OK, torch.nan)
