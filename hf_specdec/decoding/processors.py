"""Logits processors over a block of positions.

transformers' processors take one position at a time. Here they are sorted into three kinds:

* pure warpers look at the scores only: one call over all positions of all rows;
* other pure processors are functions of (ids, scores): one call for each width at which a row has a position, with the
  whole batch at that width, so that they see what they would see in plain decoding (warpers between them go along);
* stateful ones count on being called once per emitted token: with them nothing is drafted, and every step is plain.

A processor that is not part of transformers counts as pure, as upstream's assisted decoding treats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from transformers.generation import logits_process

from .warpers import fuse

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
        reading = [i for i, processor in enumerate(processors) if type(processor) not in _WARPER_TYPES]
        first, last = (reading[0], reading[-1] + 1) if reading else (0, 0)
        self.before, self.reading = fuse(processors[:first]), processors[first:last]
        self.after = fuse(processors[last:])

    @property
    def read_ids(self) -> bool:
        """Whether any of them looks at the ids."""
        return bool(self.reading)

    def __call__(self, scores: torch.Tensor, widths: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """Process m consecutive positions of each row.

        Args:
            scores: [B, m, V] fp32 logits; may be overwritten.
            widths: the first position of row b follows its first `widths[b]` columns.
            ids: [B, columns] the rows with their drafted tokens.

        Returns:
            [B, m, V] processed scores.
        """
        scores = self._warp(self.before, scores, ids)
        if self.reading:
            scores = self._by_width(scores, widths, ids)
        return self._warp(self.after, scores, ids)

    @staticmethod
    def _warp(warpers: Sequence[Processor], scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = scores.flatten(0, 1)
        for warper in warpers:
            flat = warper(ids, flat)
        return flat.view(scores.shape)

    def _by_width(self, scores: torch.Tensor, widths: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        num_positions, vocab_size = scores.shape[1:]
        common = min(widths) == max(widths)
        rows = torch.arange(len(widths), device=scores.device)
        starts = torch.full_like(rows, widths[0]) if common else torch.tensor(widths, device=scores.device)
        processed = torch.empty_like(scores)
        ids = ids[:, : max(widths) + num_positions].clone()
        for width in sorted({start + slot for start in set(widths) for slot in range(num_positions)}):
            # Rows without a position at this width take part with one of theirs; the result is thrown away.
            slots = (width - starts).clamp(0, num_positions - 1)
            has_position = (width >= starts) & (width < starts + num_positions)
            at_width = scores[:, width - widths[0]].clone() if common else scores[rows, slots]
            for processor in self.reading:
                if not common and isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
                    here = [b for b, start in enumerate(widths) if start <= width < start + num_positions]
                    at_width = _constrain(processor, ids[:, :width], at_width, here)
                else:
                    at_width = processor(ids[:, :width], at_width)
            if common:
                processed[:, width - widths[0]] = at_width
            else:
                processed[rows, slots] = torch.where(has_position[:, None], at_width, processed[rows, slots])
            if width + 1 < ids.shape[1]:
                # Nothing after a drafted token that is forbidden here can be accepted. The best allowed token stands
                # in for it, because a constraint may raise when it is shown a text that breaks it.
                drafted = ids[:, width].clamp(0, vocab_size - 1)
                forbidden = has_position & at_width.gather(1, drafted[:, None])[:, 0].isneginf()
                ids[:, width] = torch.where(forbidden, at_width.argmax(dim=-1), ids[:, width])
        return processed


def _constrain(
    processor: logits_process.PrefixConstrainedLogitsProcessor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    rows: Sequence[int],
) -> torch.Tensor:
    """Ask a constraint about some rows only: the others hold no text of this width, and it may raise for them."""
    constrained = scores.clone()
    for b in rows:
        allowed = partial(processor._prefix_allowed_tokens_fn, b // processor._num_beams)
        own = logits_process.PrefixConstrainedLogitsProcessor(lambda _, text, allowed=allowed: allowed(text), 1)
        constrained[b : b + 1] = own(ids[b : b + 1], scores[b : b + 1])
    return constrained
