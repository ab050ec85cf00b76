"""How many tokens to draft, how many of them to verify, and with which settings."""

from .confidence import Schedule
from .governor import Governor
from .sla import SLAController

__all__ = ["Governor", "SLAController", "Schedule"]
