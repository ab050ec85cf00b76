"""Drafters: the contract, the door, and one folder per method."""

from .auto import AutoDrafter, DrafterFormat
from .base import Drafter, DraftRequest, DraftSession, Signals, TargetSignals

__all__ = ["AutoDrafter", "DraftRequest", "DraftSession", "Drafter", "DrafterFormat", "Signals", "TargetSignals"]
