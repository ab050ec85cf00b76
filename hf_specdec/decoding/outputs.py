"""What leaves the loop while it runs: tokens to a streamer, scores to the returned dictionary."""

from __future__ import annotations

from typing import Any

import torch

from .rows import Rows
from .stopping import ScoresAfter, no_scores


class Publisher:
    """Gives a streamer the tokens of a step as soon as every row has them, in order, as plain decoding would.

    Args:
        streamer: transformers' streamer, or None.
        rows: the rows, at the end of their prompts.
    """

    def __init__(self, streamer: Any | None, rows: Rows) -> None:
        self.streamer = streamer
        self.published = max(rows.widths)

    def publish(self, rows: Rows) -> None:
        """Put the columns that are complete."""
        if self.streamer is None:
            return
        going = [width for width, done in zip(rows.widths, rows.finished, strict=True) if not done]
        end = min(going) if going else max(rows.widths)
        for column in rows.ids[:, self.published : end].cpu().unbind(dim=1):
            self.streamer.put(column)
        self.published = max(self.published, end)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


class Recorder:
    """Keeps the scores and raw logits of the emitted tokens of one row, one [1, V] tensor a token.

    Args:
        scores, logits: which of the two to keep; what is not kept stays None.
    """

    def __init__(self, scores: bool, logits: bool) -> None:
        self._scores: list[torch.Tensor] | None = [] if scores else None
        self._logits: list[torch.Tensor] | None = [] if logits else None

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        return None if self._scores is None else tuple(self._scores)

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        return None if self._logits is None else tuple(self._logits)

    def keep_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """A copy of [1, m, V] logits where they are wanted; processors may write over the original."""
        return None if self._logits is None else logits.clone()

    def scores_after(self, scores: torch.Tensor) -> ScoresAfter:
        """The scores of the text after some tokens of a block with `scores` [1, m, V], for stopping criteria."""
        if self._scores is None:
            return no_scores
        before, block = tuple(self._scores), scores.unbind(dim=1)
        return lambda count: before + block[:count]

    def record(self, logits: torch.Tensor | None, scores: torch.Tensor, rows: Rows) -> None:
        """Keep the positions whose tokens reached the text."""
        count = len(rows.emitted[0])
        if self._scores is not None:
            self._scores.extend(scores[:, :count].clone().unbind(dim=1))
        if self._logits is not None and logits is not None:
            self._logits.extend(logits[:, :count].unbind(dim=1))
