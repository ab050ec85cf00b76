"""Prompt lookup: what followed the last time this text was written (Saxena 2023, "Prompt Lookup Decoding").

An encoder-decoder's text is searched together with what its encoder read, which summaries and edits copy from.

An index of short n-grams finds the earlier places that end like the text does now. They are ranked by how far back
they agree with the text, then by recency, and the tokens after the best one are the draft. Cost: one dictionary entry
per token, one look-up per draft, all on the host, next to nothing when nothing matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedModel

from ...verification import Draft, OneHot
from ..base import Drafter, DraftSession
from ..request import DraftRequest


class LookupDrafter(Drafter):
    """Drafts by copying from the prompt and the output. Needs no weights and serves any target.

    Args:
        min_ngram: shortest end of the text that an earlier place has to share, in tokens.
        max_ngram: agreement beyond this length no longer counts in the ranking.
        max_candidates: most recent earlier places that are compared.
    """

    method = "lookup"
    default_num_draft_tokens = 10
    option_names = ("min_ngram", "max_ngram", "max_candidates")

    def __init__(self, min_ngram: int = 2, max_ngram: int = 16, max_candidates: int = 16, **options: Any) -> None:
        super().__init__(**options)
        for name, value in (("min_ngram", min_ngram), ("max_candidates", max_candidates)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; give an integer of at least 1.")
        if not isinstance(max_ngram, int) or max_ngram < min_ngram:
            raise ValueError(f"`max_ngram` is {max_ngram!r}; give an integer of at least `min_ngram` ({min_ngram}).")
        self.min_ngram, self.max_ngram, self.max_candidates = min_ngram, max_ngram, max_candidates

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Drafter:
        return cls(**options).bind(target)

    def start(self, request: DraftRequest) -> DraftSession:
        return LookupSession(self, request)


class LookupSession(DraftSession):
    def __init__(self, drafter: LookupDrafter, request: DraftRequest) -> None:
        self.rows, self.vocab_size = request.rows, request.vocab_size
        read = None if request.source is None else request.source.ids
        self.sources = read or [[] for _ in self.rows.texts]
        self.indices = [
            NgramIndex(list(source), drafter.min_ngram, drafter.max_ngram, drafter.max_candidates)
            for source in self.sources
        ]

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        device = self.rows.ids.device
        for index, source, text in zip(self.indices, self.sources, self.rows.texts, strict=True):
            index.text.extend(text[len(index.text) - len(source) :])
        drafts = [
            self._within_vocabulary(index.continuation(k)) if k > 0 and not done else []
            for index, k, done in zip(self.indices, budget, self.rows.finished, strict=True)
        ]
        num_slots = max(map(len, drafts))
        if num_slots == 0:
            return Draft.empty(len(drafts), device)
        padded = [draft + [-1] * (num_slots - len(draft)) for draft in drafts]
        tokens = torch.tensor(padded, device=device)
        return Draft(tokens, torch.tensor([len(draft) for draft in drafts], device=device), OneHot())

    def _within_vocabulary(self, draft: list[int]) -> list[int]:
        """The draft up to an id that the target has no score for, as the placeholder of an image may be."""
        return list(takewhile(lambda token: token < self.vocab_size, draft))


class NgramIndex:
    """Where each n-gram of a growing text ended before.

    Args:
        text: the token ids; the list may grow, and is read at every look-up.
        size: length of the indexed n-grams.
        max_agreement: longest agreement that is measured.
        max_candidates: most recent occurrences that are compared.
    """

    def __init__(self, text: list[int], size: int, max_agreement: int, max_candidates: int) -> None:
        self.text = text
        self.size, self.max_agreement, self.max_candidates = size, max_agreement, max_candidates
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self.indexed = size - 1  # columns already entered; the text's own end is never among them

    def candidates(self) -> list[int]:
        """Where the text went on after earlier places that end as it does now, best first."""
        text, size = self.text, self.size
        for end in range(self.indexed, len(text) - 1):
            self.ends.setdefault(tuple(text[end - size + 1 : end + 1]), []).append(end)
        self.indexed = max(self.indexed, len(text) - 1)
        if len(text) < size:
            return []
        ends = self.ends.get(tuple(text[-size:]), [])[-self.max_candidates :]
        return [end + 1 for end in sorted(ends, key=lambda end: (self._agreement(end), end), reverse=True)]

    def continuation(self, length: int) -> list[int]:
        """The `length` tokens after the best candidate, [] where there is none.

        Where the text ends first the copy goes on with itself, which continues a repetition with its period.
        """
        found = self.candidates()
        if not found:
            return []
        draft: list[int] = []
        for i in range(found[0], found[0] + length):
            draft.append(self.text[i] if i < len(self.text) else draft[i - len(self.text)])
        return draft

    def _agreement(self, end: int) -> int:
        """How many tokens up to `end` equal the end of the text; at least `size`."""
        text, n = self.text, self.size
        while n < self.max_agreement and n <= end and text[end - n] == text[-1 - n]:
            n += 1
        return n
