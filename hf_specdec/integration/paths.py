"""Which way a target takes through the loop: the one place that chooses.

Ragged rows serve a whole batch at once, and are taken wherever the target's source and a self-check allow them. Other
targets keep their own cache and are served row by row; those that even that does not suit are refused.
"""

from __future__ import annotations

from ..decoding.ragged_model import why_not_ragged
from .generate import Generated, generate
from .prepared import Prepared
from .probe import NotRagged
from .row_by_row import generate_row_by_row


def decode(prepared: Prepared) -> Generated:
    """Decode with a drafter, on the path that the target takes."""
    if why_not_ragged(prepared.model) is None:
        try:
            return generate(prepared)
        except NotRagged:  # raised before anything was run or given away
            pass
    return generate_row_by_row(prepared)
