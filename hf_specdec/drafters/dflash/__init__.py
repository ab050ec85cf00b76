"""DFlash and DFlash 2 drafters in every published format."""

from ..auto import Method, register
from .checkpoints import detect, load
from .session import DFlashDrafter

__all__ = ["DFlashDrafter"]

register(Method(name="dflash", detect=detect, from_repository=load))
