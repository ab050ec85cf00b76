"""What leaves the loop while it runs: tokens to a streamer, scores and states to the returned dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


RETURNED = ("scores", "logits", "hidden_states", "attentions")


@dataclass(frozen=True)
class States:
    """What a forward gave besides logits, where the call returns it: one tensor for each layer.

    Attributes:
        hidden_states: [B, m, H] each; None where they are not returned.
        attentions: [B, heads, m, columns] each; None where they are not returned.
    """

    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None


class Recorder:
    """Keeps what the returned dictionary holds, as plain decoding would.

    That is a tuple over steps of [B, V] scores and logits, and of tuples over layers of [B, 1, H] hidden states and
    [B, heads, 1, columns] attentions. The first step's states are those of the whole prompt.

    Rows are ragged while the loop runs, so everything is kept by row and joined at the end.

    Args:
        wanted: which of RETURNED to keep; what is not kept stays None.
        windows: for each layer the columns that its attentions have at most, None for all.
        earlier: columns before the prompt.
    """

    def __init__(
        self,
        wanted: frozenset[str] = frozenset(),
        windows: Sequence[int | None] = (),
        earlier: int = 0,
    ) -> None:
        self.wanted = wanted
        self._kept: dict[str, list[list[Any]]] = {name: [] for name in RETURNED}  # by row, then by step
        self._windows, self._earlier = windows, earlier
        self._settled: list[torch.Tensor] = []  # scores of the first steps, for stopping criteria
        self._prompt: States | None = None

    @staticmethod
    def joined(recorders: Sequence[Recorder]) -> Recorder:
        """What recorders of one row each have kept, as if it had been one batch. No attentions."""
        whole = Recorder(recorders[0].wanted)
        whole._kept = {name: [row for one in recorders for row in one._kept[name]] for name in RETURNED}
        prompts = [one._prompt.hidden_states for one in recorders if one._prompt and one._prompt.hidden_states]
        if prompts:
            whole._prompt = States(tuple(torch.cat(layer) for layer in zip(*prompts, strict=True)), None)
        return whole

    def keep_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """A copy of [B, m, V] logits where they are wanted; processors may write over the original."""
        return logits.clone() if "logits" in self.wanted else None

    def scores_after(self, scores: torch.Tensor, rows: Rows) -> ScoresAfter:
        """The scores of the text after some tokens of a block with `scores` [B, m, V], for stopping criteria.

        Where a row has not come to a step, or has ended before it, it has zeros there.
        """
        if "scores" not in self.wanted:
            return no_scores
        kept = self._kept["scores"] or [[] for _ in range(len(rows))]
        going = [len(row) for row, done in zip(kept, rows.finished, strict=True) if not done]
        nothing = torch.zeros_like(scores[0, 0])

        def at(step: int) -> torch.Tensor:
            in_block = [step - len(row) for row in kept]
            return torch.stack(
                [
                    row[step] if j < 0 else scores[b, j] if j < scores.shape[1] and not rows.finished[b] else nothing
                    for b, (row, j) in enumerate(zip(kept, in_block, strict=True))
                ]
            )

        def after(count: int) -> tuple[torch.Tensor, ...]:
            # What every row has come to will not change any more.
            self._settled += [at(step) for step in range(len(self._settled), min(going))]
            steps = len(kept[0]) + count
            return tuple(self._settled[:steps]) + tuple(at(step) for step in range(len(self._settled), steps))

        return after

    def record(self, logits: torch.Tensor | None, scores: torch.Tensor, states: States | None, rows: Rows) -> None:
        """Keep the positions whose tokens have just reached the text.

        Args:
            logits: [B, m, V] from `keep_logits`.
            scores: [B, m, V], processed.
            states: of the forward, where any are wanted.
            rows: after their commit.
        """
        if not self.wanted:
            return
        ranges = [range(len(new)) for new in rows.emitted]
        before = [width - len(new) for width, new in zip(rows.widths, rows.emitted, strict=True)]
        self._keep(logits, scores, states, ranges, before)

    def record_padding(
        self, logits: torch.Tensor, scores: torch.Tensor, states: States | None, first: int, rows: Rows
    ) -> None:
        """Keep what plain decoding would have computed for rows that ended before others, on their padding.

        Args:
            logits, scores, states: of a forward over the columns from `first` to the last but one.
            first: its first column.
            rows: the rows, at their ends.
        """
        ends = first + logits.shape[1]
        ranges = [range(width - 1 - first, ends - first) for width in rows.widths]
        self._keep(logits, scores, states, ranges, [first + 1] * len(rows))

    def _keep(
        self,
        logits: torch.Tensor | None,
        scores: torch.Tensor,
        states: States | None,
        ranges: Sequence[range],
        before: Sequence[int],
    ) -> None:
        """Keep some positions of each row; position j of row b follows its first `before[b] + j` columns."""
        blocks: dict[str, Any] = {"scores": scores.clone() if "scores" in self.wanted else None, "logits": logits}
        for name in ("scores", "logits"):
            if name in self.wanted:
                self._extend(name, [[blocks[name][b, j] for j in range_] for b, range_ in enumerate(ranges)])
        if states is None:
            return
        if self._prompt is None:
            self._prompt = self._within_windows(states)
            ranges = [range(0)] * len(ranges)
        if states.hidden_states is not None:
            layers = states.hidden_states
            self._extend(
                "hidden_states",
                [[[layer[b, j : j + 1] for layer in layers] for j in range_] for b, range_ in enumerate(ranges)],
            )
        if states.attentions is not None:
            self._extend(
                "attentions",
                [
                    [self._attention(states.attentions, b, j, self._earlier + before[b] + j) for j in range_]
                    for b, range_ in enumerate(ranges)
                ],
            )

    def _within_windows(self, states: States) -> States:
        """The states of the prompt; a sliding layer had the end of an earlier text before it."""
        if states.attentions is None:
            return states
        attentions = []
        for layer, window in zip(states.attentions, self._windows or [None] * len(states.attentions), strict=False):
            earlier = layer.shape[-1] - layer.shape[-2]
            attentions.append(layer if window is None else layer[..., max(0, earlier - window + 1) :])
        return States(states.hidden_states, tuple(attentions))

    def _attention(self, layers: Sequence[torch.Tensor], row: int, position: int, columns: int) -> list[torch.Tensor]:
        """Each layer's attention [heads, 1, columns] of one position; nothing where the backend gives none."""
        windows = (self._windows or [None] * len(layers))[: len(layers)]
        starts = [0 if window is None else max(0, columns - window) for window in windows]
        return [
            layer[row, :, position : position + 1, start:columns] for layer, start in zip(layers, starts, strict=True)
        ]

    def _extend(self, name: str, new: list[list[Any]]) -> None:
        kept = self._kept[name]
        kept.extend([] for _ in range(len(new) - len(kept)))
        for row, more in zip(kept, new, strict=True):
            row.extend(more)

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        return self._per_step("scores")

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        return self._per_step("logits")

    @property
    def hidden_states(self) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        return self._per_layer("hidden_states")

    @property
    def attentions(self) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        return self._per_layer("attentions")

    def _per_step(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """One [B, ...] tensor for each step that every row has come to."""
        if name not in self.wanted:
            return None
        return tuple(torch.stack(step) for step in zip(*self._kept[name], strict=False))

    def _per_layer(self, name: str) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        if name not in self.wanted or self._prompt is None:
            return None
        steps = zip(*self._kept[name], strict=False)
        later = (tuple(torch.stack(layer) for layer in zip(*step, strict=True)) for step in steps)
        return (getattr(self._prompt, name), *later)
