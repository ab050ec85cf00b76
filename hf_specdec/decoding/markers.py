"""Which slots of a draft stand between two markers: the places where a call with `lenient_between` may be lenient."""

from __future__ import annotations

import torch

from ..verification import Draft
from .rows import Rows

Marker = tuple[int, ...]  # token ids


class Between:
    """Knows of every row whether its text is between the markers: the last one that is complete is the start.

    A text in a cache, or in embeddings, shows no tokens, so its markers do not count.

    Args:
        start, end: neither ends with the other.
        num_rows: of the call.
    """

    def __init__(self, start: Marker, end: Marker, num_rows: int) -> None:
        self.start, self.end = start, end
        self._overlap = max(len(start), len(end)) - 1  # tokens of a text that a marker may begin with
        self._read = [0] * num_rows  # tokens of each text that have been looked at
        self._inside = [False] * num_rows

    def read(self, rows: Rows) -> None:
        """Look at the texts before a draft. They go to the device here, where no forward is in flight to wait for."""
        known = []
        for b, text in enumerate(rows.texts):
            last = text[max(0, len(text) - self._overlap) :] if self._overlap else []
            known.append([self._is_inside(b, text), *[-1] * (self._overlap - len(last)), *last])
        packed = torch.tensor(known, device=rows.ids.device)
        self._states, self._last = packed[:, :1].bool(), packed[:, 1:]

    def slots(self, draft: Draft) -> torch.Tensor:
        """[B, n] bool, slots of a chain that have the start behind them and not the end: in the text, or left of them
        in the draft."""
        num_slots, overlap = draft.num_slots, self._overlap
        tokens = torch.cat([self._last, draft.tokens], dim=1)

        def ends_here(marker: Marker) -> torch.Tensor:
            """[B, n] whether a marker ends at a slot."""
            first = overlap + 1 - len(marker)
            found = [tokens[:, first + i : first + i + num_slots] == token for i, token in enumerate(marker)]
            return torch.stack(found).all(dim=0)

        starts = ends_here(self.start)
        marked = starts | ends_here(self.end)
        states = torch.cat([self._states, starts], dim=1)
        numbers = torch.arange(1, num_slots + 1, device=tokens.device)
        latest = torch.where(marked, numbers, 0).cummax(dim=1).values  # the last marked slot, from 1, up to each
        before = torch.nn.functional.pad(latest, (1, 0))[:, :num_slots]
        return states.gather(1, before)

    def _is_inside(self, row: int, text: list[int]) -> bool:
        """Whether a text ends between the markers; what was read before is not read again."""
        for end in range(len(text), self._read[row], -1):
            if _ends_with(text, end, self.start) or _ends_with(text, end, self.end):
                self._inside[row] = _ends_with(text, end, self.start)
                break
        self._read[row] = len(text)
        return self._inside[row]


def _ends_with(text: list[int], end: int, marker: Marker) -> bool:
    return text[end - 1] == marker[-1] and tuple(text[max(0, end - len(marker)) : end]) == marker
