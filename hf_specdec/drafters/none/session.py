"""No drafter: plain decoding with the keyed noise of speculative decoding.

The text is what every drafter gives under `rule="coupled"` with the same seed, so this is their reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ...verification import Draft
from ..base import Drafter, DraftSession
from ..request import DraftRequest


class NoDrafter(Drafter):
    """Drafts nothing; every step of the target is a plain one."""

    method = "none"
    default_num_draft_tokens = 0

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Drafter:
        return cls(**options).bind(target)

    def start(self, request: DraftRequest) -> DraftSession:
        return NoSession(request)


class NoSession(DraftSession):
    def __init__(self, request: DraftRequest) -> None:
        self.rows = request.rows

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        return Draft.empty(len(budget), self.rows.ids.device)
