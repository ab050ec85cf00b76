"""Logits processors over a block of positions.

transformers' processors take one position at a time. Here they are sorted into three kinds:

* pure warpers look at the scores only: one call over all positions of all rows;
* other pure processors are functions of (ids, scores): one call for each width at which a row has a position, with the
  whole batch at that width, so that they see what they would see in plain decoding;
* stateful ones count on being called once per emitted token: with them nothing is drafted, and every step is plain.

A processor that is not part of transformers counts as pure, as upstream's assisted decoding treats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from transformers.generation import logits_process

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_WARPERS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
_STATEFUL = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaEOSDelayPatternLogitsProcessor",
)


def _classes(names: Iterable[str]) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


_WARPER_TYPES, _STATEFUL_TYPES = _classes(_WARPERS), _classes(_STATEFUL)


class BlockProcessors:
    """The processors of a call, ready for blocks.

    Args:
        processors: transformers' LogitsProcessorList, in order.
    """

    def __init__(self, processors: Iterable[Processor]) -> None:
        processors = list(processors)
        self.stateful = [type(p).__name__ for p in processors if isinstance(p, _STATEFUL_TYPES)]
        # A subclass may look at the ids, so only the classes themselves count as warpers.
        self.runs = [(warps, list(run)) for warps, run in groupby(processors, lambda p: type(p) in _WARPER_TYPES)]

    @property
    def read_ids(self) -> bool:
        """Whether any of them looks at the ids."""
        return any(not warps for warps, _ in self.runs)

    def __call__(self, scores: torch.Tensor, widths: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """Process m consecutive positions of each row.

        Args:
            scores: [B, m, V] fp32 logits; may be overwritten.
            widths: the first position of row b follows its first `widths[b]` columns.
            ids: [B, columns] the rows with their drafted tokens.

        Returns:
            [B, m, V] processed scores.
        """
        for warps, run in self.runs:
            if warps:
                flat = scores.flatten(0, 1)
                for processor in run:
                    flat = processor(ids, flat)
                scores = flat.view(scores.shape)
            else:
                scores = self._by_width(run, scores, widths, ids)
        return scores

    @staticmethod
    def _by_width(
        run: Sequence[Processor], scores: torch.Tensor, widths: Sequence[int], ids: torch.Tensor
    ) -> torch.Tensor:
        num_positions = scores.shape[1]
        common = min(widths) == max(widths)
        rows = torch.arange(len(widths), device=scores.device)
        starts = torch.tensor(widths, device=scores.device)
        processed = torch.empty_like(scores)
        for width in range(min(widths), max(widths) + num_positions):
            # Rows without a position at this width take part with one of theirs; the result is thrown away.
            slots = (width - starts).clamp(0, num_positions - 1)
            at_width = scores[:, width - widths[0]] if common else scores[rows, slots]
            at_width = at_width.clone()
            for processor in run:
                at_width = processor(ids[:, :width], at_width)
            if common:
                processed[:, width - widths[0]] = at_width
            else:
                has_position = (width >= starts) & (width < starts + num_positions)
                processed[rows, slots] = torch.where(has_position[:, None], at_width, processed[rows, slots])
        return processed
