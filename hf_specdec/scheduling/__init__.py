"""How many tokens to draft."""

from .governor import Governor

__all__ = ["Governor"]
