"""Google's multi-token-prediction assistants of Gemma 4."""

from ..auto import Method, register
from .checkpoints import detect, from_model, load
from .session import Gemma4Drafter

__all__ = ["Gemma4Drafter"]

register(Method(name="gemma4", detect=detect, from_repository=load, from_model=from_model))
