"""How many tokens to draft, and how many of them to verify."""

from .confidence import Schedule
from .governor import Governor

__all__ = ["Governor", "Schedule"]
