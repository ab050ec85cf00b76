"""Masked diffusion language models as drafters."""

from ..auto import Method, register
from .checkpoints import detect, load
from .drafter import DiffusionDrafter

__all__ = ["DiffusionDrafter"]

register(Method(name="diffusion", detect=detect, from_repository=load))
