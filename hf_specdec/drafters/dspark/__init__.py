"""DSpark drafters in every published format."""

from ..auto import Method, register
from .checkpoints import detect, load, load_beside
from .session import DSparkDrafter

__all__ = ["DSparkDrafter"]

register(Method(name="dspark", detect=detect, from_repository=load, for_target=load_beside))
