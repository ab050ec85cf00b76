"""EAGLE-3 heads in every published format."""

from ..auto import Method, register
from .checkpoints import detect, load
from .session import Eagle3Drafter

__all__ = ["Eagle3Drafter"]

register(Method(name="eagle3", detect=detect, from_repository=load))
