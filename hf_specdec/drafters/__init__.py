"""Drafters: the contract, the door, and one folder per method."""

from .auto import AutoDrafter, DrafterFormat
from .base import Drafter, DraftSession, Signals, TargetSignals
from .request import DraftRequest

__all__ = ["AutoDrafter", "DraftRequest", "DraftSession", "Drafter", "DrafterFormat", "Signals", "TargetSignals"]
