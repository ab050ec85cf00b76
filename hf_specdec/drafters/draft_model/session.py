"""Drafting with a smaller causal language model (Leviathan, Kalman, Matias 2023).

The model keeps its own cache between rounds and forgets rejected tokens by writing over them, so a round of k tokens
costs k of its forwards and nothing is prepared twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ...decoding.placement import input_device
from ...decoding.ragged_model import RaggedModel, max_positions
from ...verification import Draft, Verdict
from ..base import DraftSession, Signals
from ..common.chain import draw_chain
from ..common.vocabulary import over_target_vocabulary
from ..request import DraftRequest


class DraftModelSession(DraftSession):
    """The draft model's cache and what of it is still right.

    Args:
        model: the draft model.
        request: the call.

    Attributes:
        valid: columns of each row whose keys and values in the draft's cache belong to the row's text.
    """

    def __init__(self, model: PreTrainedModel, request: DraftRequest) -> None:
        self.model, self.device = model, input_device(model)
        self.request, self.rows = request, request.rows
        self.ragged: RaggedModel | None = None
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)  # [B] left padding
        self.max_positions = max_positions(self.model)
        self.valid = [0] * len(self.rows.widths)
        self.num_drafted = 0

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        rows = self.rows
        budget = self._within_positions(budget)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            if token is None:
                return self._fit(self._catch_up())
            offsets, host_offsets = rows.lengths + slot - 1, [width + slot - 1 for width in rows.widths]
            return self._fit(self._forward(token, offsets, host_offsets))

        self.num_drafted = max(budget)
        return draw_chain(self.request, budget, verification, advance)

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        if self.num_drafted == 0:
            return
        for b, (accepted, new) in enumerate(zip(self.rows.accepted, self.rows.emitted, strict=True)):
            # The last drafted token was never an input, so its keys are not there even if it was accepted.
            self.valid[b] = self.rows.widths[b] - len(new) + min(accepted, self.num_drafted - 1)
        self.num_drafted = 0

    def _within_positions(self, budget: Sequence[int]) -> list[int]:
        """The budget as far as the draft model has positions: its last input is the last but one drafted token."""
        if self.max_positions is None:
            return list(budget)
        rooms = [self.max_positions + 1 - len(text) for text in self.rows.texts]
        return [max(0, min(k, room)) if room > 0 else 0 for k, room in zip(budget, rooms, strict=True)]

    def _catch_up(self) -> torch.Tensor:
        """Run what the draft model has not seen of the text; [B, 1, V'] logits of the next token."""
        rows = self.rows
        if not any(self.valid):
            logits = self._prefill()
        else:
            # Rows that miss less run some of their text again, which writes the same values.
            missing = max(w - v for w, v, done in zip(rows.widths, self.valid, rows.finished, strict=True) if not done)
            host_offsets = [max(width - missing, 0) for width in rows.widths]
            logits = self._forward(rows.last_tokens(missing), (rows.lengths - missing).clamp_min(0), host_offsets)
        self.valid = list(rows.widths)
        return logits[:, -1:]

    def _prefill(self) -> torch.Tensor:
        """Run the text so far in one forward. Nothing has been drafted yet, so the unfinished rows are in step."""
        request, device = self.request, self.device
        width = max(self.rows.widths)
        ids = self._known(self.rows.ids[:, :width])
        columns = torch.arange(width, device=device)
        mask = columns >= self.padding[:, None]
        prompt_mask = None if request.attention_mask is None else request.attention_mask.to(device)
        self.ragged = RaggedModel(self.model, prompt_mask, ids.shape[0], request.max_columns)
        return self.ragged.prefill(ids, mask.long(), (columns - self.padding[:, None]).clamp_min(0))

    def _forward(self, tokens: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int]) -> torch.Tensor:
        assert self.ragged is not None
        self.ragged.drop(self.rows.finished)
        offsets = offsets.to(self.device)
        columns = offsets[:, None] + torch.arange(tokens.shape[1], device=self.device)
        # Rows past the model's last position are drafted for nothing; they must not end the others' drafting.
        last = None if self.max_positions is None else self.max_positions - 1
        positions = (columns - self.padding[:, None]).clamp(0, last)
        return self.ragged.forward(self._known(tokens), offsets, host_offsets, positions).logits

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens on the draft model's device. An id beyond its vocabulary, which only the target's padding has,
        becomes its last one."""
        return tokens.to(self.device).clamp_max(self.model.config.get_text_config().vocab_size - 1)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, 1, V] fp32 logits on the target's device, over the target's vocabulary."""
        return over_target_vocabulary(logits, None, self.request.vocab_size, self.rows.ids.device)
