"""A smaller language model as the drafter."""

from ..auto import Method, register
from .checkpoints import detect, load
from .drafter import DraftModelDrafter

__all__ = ["DraftModelDrafter"]

register(Method(name="draft_model", detect=detect, from_repository=load))
