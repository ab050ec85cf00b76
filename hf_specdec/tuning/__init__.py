"""Choosing options by measuring: effort, lenience and draft length on a user's own prompts."""

from .front import Limits
from .sweep import pareto

__all__ = ["Limits", "pareto"]
