"""What the target's forwards leave for a drafter that reads its hidden states: a feature for each column."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import nn

from ..request import RowsView

_CHECK_AFTER = 64  # verifications
_FLOOR = 0.05  # drafts whose first token was accepted; a wrong drafter stays below, a weak one does not


class Missing(NamedTuple):
    """Columns that a drafter has not run yet.

    Attributes:
        features: [B, num_columns, H] of the columns; some were run before, where rows differ in what they miss.
        columns: [B, num_columns] themselves.
        host_offsets: the first one of each row, on the host.
    """

    features: torch.Tensor
    columns: torch.Tensor
    host_offsets: list[int]

    @property
    def offsets(self) -> torch.Tensor:
        """[B] the first column of each row."""
        return self.columns[:, 0]

    @property
    def num_columns(self) -> int:
        return self.columns.shape[1]


class TargetFeatures:
    """Features of the columns that the target has processed, all but each row's last one.

    Args:
        rows: of the call.
        width: H.
        device, dtype: of the drafter.

    Attributes:
        first: the first column; those before it would need hidden states from before this call.
    """

    def __init__(self, rows: RowsView, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows, self.first = rows, 0
        self.values = torch.empty(len(rows.widths), 0, width, device=device, dtype=dtype)  # [B, columns, H]
        self.taken = [0] * len(rows.widths)  # columns of each row that the drafter has run

    def add(self, features: torch.Tensor) -> None:
        """Keep the features [B, m, H] of the columns that the target has just processed, the rejected ones among them:
        the next verification processes those columns again."""
        rows, count = self.rows, features.shape[1]
        starts = [width - 1 - len(new) for width, new in zip(rows.widths, rows.emitted, strict=True)]
        if self.values.shape[1] == 0:  # the prefill: every column of the prompt that was not in a cache before
            self.first = rows.widths[0] - len(rows.emitted[0]) - count
            starts = self.taken = [self.first] * len(starts)
        self._reserve(max(starts) + count)
        columns = torch.tensor(starts, device=features.device)[:, None] + torch.arange(count, device=features.device)
        index = columns[..., None].expand(-1, -1, features.shape[-1])
        self.values.scatter_(1, index, features.to(self.values.dtype))  # autocast changes what a layer gives

    def take(self, again: int = 0) -> list[Missing]:
        """The columns that the target has processed and the drafter has not, the oldest first.

        Args:
            again: that many columns before them are given once more.

        One piece, as wide as what the row that misses most misses. Where a row has not that many columns, a short
        prompt whose neighbour has got ahead, there are several, none wider than the shortest row.
        """
        rows, starts = self.rows, [max(taken - again, self.first) for taken in self.taken]
        unfinished = [(w - 1, t) for w, t, done in zip(rows.widths, starts, rows.finished, strict=True) if not done]
        left, widest = max(end - taken for end, taken in unfinished), min(end for end, _ in unfinished)
        pieces = []
        while left > 0:
            count = min(left, widest)
            pieces.append(self._columns(left, count))
            left -= count
        self.taken = [width - 1 for width in rows.widths]
        return pieces

    def _columns(self, left: int, count: int) -> Missing:
        """The first `count` of the last `left` processed columns; of all columns where a row has fewer than `left`."""
        rows, device = self.rows, self.values.device
        offsets = (rows.lengths - 1 - left).clamp_min(0).to(device)
        columns = offsets[:, None] + torch.arange(count, device=device)
        features = self.values.gather(1, columns[..., None].expand(-1, -1, self.values.shape[-1]))
        return Missing(features, columns, [max(width - 1 - left, 0) for width in rows.widths])

    def _reserve(self, num_columns: int) -> None:
        missing = num_columns - self.values.shape[1]
        if missing > 0:
            self.values = nn.functional.pad(self.values, (0, 0, 0, max(missing, self.values.shape[1], 256)))


class MismatchCheck:
    """Warns once when a drafter's tokens are accepted so rarely that it is probably not this target's.

    First tokens count: the share of all drafted tokens would fall with the length of the drafts.

    Args:
        rows: of the call.
        causes: what to look for, the likeliest first.
    """

    def __init__(self, rows: RowsView, causes: str) -> None:
        self.rows, self.causes = rows, causes
        self.judged, self.drafted, self.accepted = 0, 0, 0  # verifications, and drafts of all rows

    def observe(self) -> None:
        """Look at the last verification."""
        rows = self.rows
        if not any(rows.drafted):
            return
        self.judged += 1
        self.drafted += sum(drafted > 0 for drafted in rows.drafted)
        self.accepted += sum(accepted > 0 for accepted in rows.accepted)
        if self.judged == _CHECK_AFTER and self.accepted < _FLOOR * self.drafted:
            warnings.warn(
                f"this drafter looks mismatched: of {self.drafted} drafts, {self.accepted} had their first token "
                f"accepted. Look for, in this order: {self.causes}.",
                stacklevel=2,
            )
