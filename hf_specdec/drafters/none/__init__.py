"""Plain decoding behind the drafter's interface."""

from ..auto import Method, register
from .session import NoDrafter

register(Method(name="none", for_target=NoDrafter.for_target))
