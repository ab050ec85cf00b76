"""Which row of a block guesses first: files say it in several ways, and a wrong one gives no error.

Such a drafter drafts a token too far or too near and is accepted less, but far above any floor: neighbouring rows know
much of each other's tokens. The row that was trained to guess the next token gives it the higher probability, and over
a hundred tokens the difference is many times its error (tests/test_first_row.py, on the drafters in model_cards/).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

_NUM_TOKENS = 128
_SURE = 3.0  # standard errors
_KNOWS = 1.0  # nats that a row which has learned something is better than a guess among all tokens


class FirstRowCheck:
    """Compares the two rows over a drafter's first tokens, of whatever calls, and warns once.

    Args:
        first_slot: the row that is read.
        remedy: what to do if the other one is right.
    """

    def __init__(self, first_slot: int, remedy: str) -> None:
        self.first_slot, self.remedy = first_slot, remedy
        self.num_seen = 0
        self.found: list[torch.Tensor] = []  # [2, live rows] log-probabilities of the next tokens, of each round

    @property
    def is_open(self) -> bool:
        """Whether tokens are still to be looked at."""
        return self.num_seen < _NUM_TOKENS

    def observe(self, logits: torch.Tensor, tokens: torch.Tensor, is_live: Sequence[bool]) -> None:
        """Take a round of a call.

        Args:
            logits: [B, 2, V] fp32, what rows 0 and 1 say of the next token.
            tokens: [B] what the target chose.
            is_live: of each row of the batch, whether it goes on.
        """
        live = [row for row, lives in enumerate(is_live) if lives]
        if not live or not self.is_open:
            return
        self.found.append(logits.log_softmax(dim=-1)[live, :, tokens[live]].T)
        self.num_seen += len(live)
        if not self.is_open and self.found:  # another thread may have concluded in the meantime
            found, self.found = self.found, []
            self._conclude(torch.cat(found, dim=1).double().cpu(), math.log(logits.shape[-1]))

    def _conclude(self, found: torch.Tensor, uniform: float) -> None:
        found = found[:, found.isfinite().all(dim=0)]  # without tokens that the drafter cannot draft
        used, other = found[self.first_slot], found[1 - self.first_slot]
        gain = other - used
        if len(gain) < _NUM_TOKENS // 4 or float(other.mean()) < _KNOWS - uniform:
            return
        if float(gain.mean()) > _SURE * float(gain.std()) / math.sqrt(len(gain)):
            warnings.warn(
                f"this drafter looks mismatched: row {self.first_slot} of its blocks guesses the next token, and row "
                f"{1 - self.first_slot} gave it a probability {math.exp(float(gain.mean())):.1f} times as high over "
                f"{len(gain)} tokens. {self.remedy}.",
                stacklevel=2,
            )
