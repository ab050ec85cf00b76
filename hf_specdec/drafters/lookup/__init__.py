"""Prompt lookup: drafts copied from the text so far."""

from ..auto import Method, register
from .session import LookupDrafter

register(Method(name="lookup", for_target=LookupDrafter.for_target))
