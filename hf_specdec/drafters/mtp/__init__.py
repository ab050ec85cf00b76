"""Multi-token prediction layers: drafters that a target's own checkpoint holds."""

from ..auto import Method, register
from .checkpoints import detect, load, load_from_target
from .session import MtpDrafter

__all__ = ["MtpDrafter"]

register(Method(name="mtp", detect=detect, from_repository=load, for_target=load_from_target))
