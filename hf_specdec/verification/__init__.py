"""Noise and rules: given a draft, its law and the target's scores, which tokens are emitted."""

from .kernels import implementation
from .laws import Draft, OneHot, Sampled, Verdict
from .lenient_rule import LenientRule
from .noise import BONUS, DRAFT, RESIDUAL, TARGET, Noise, RoundNoise
from .rules import RULES, verify

__all__ = [
    "BONUS",
    "DRAFT",
    "RESIDUAL",
    "RULES",
    "TARGET",
    "Draft",
    "LenientRule",
    "Noise",
    "OneHot",
    "RoundNoise",
    "Sampled",
    "Verdict",
    "implementation",
    "verify",
]
