"""How far the emitted tokens were from the target's law, summed on the device."""

from __future__ import annotations

import torch

from ..metrics import RowStats
from ..verification import Verdict


class DivergenceSums:
    """TV and KL of each row's tokens. They are read once, at the end: reading them every round would stop the host."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None  # [2, B]

    def add(self, verdict: Verdict, starts: torch.Tensor, ends: torch.Tensor) -> None:
        """Count the tokens of a round that reached the text.

        Args:
            verdict: of the round; lossless rules give no distances.
            starts, ends: [B] columns of the rows before and after it.
        """
        if verdict.tv is None or verdict.kl is None:
            return
        distances = torch.stack([verdict.tv, verdict.kl])
        emitted = torch.arange(distances.shape[-1], device=distances.device) < (ends - starts)[:, None]
        sums = distances.masked_fill(~emitted, 0.0).sum(dim=-1, dtype=torch.float64)
        self.sums = sums if self.sums is None else self.sums + sums

    def write(self, rows: list[RowStats]) -> None:
        """Put the sums into the rows' statistics."""
        if self.sums is not None:
            for row, tv, kl in zip(rows, *self.sums.tolist(), strict=True):
                row.tv, row.kl = tv, kl
