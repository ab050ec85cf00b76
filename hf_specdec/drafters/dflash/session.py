"""Drafting with DFlash (Chen et al. 2026, arXiv:2602.06036): the tokens of a block are guessed side by side.

DFlash 2 picks each token among the likeliest ones of its row, given the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...verification import Draft
from ..base import DraftSession
from ..common.block_drafter import BlockDrafter
from ..common.block_session import BlockSession
from ..common.chain import Advance, draw_chain
from ..request import DraftRequest
from .modeling import DFlash2Model

_CAUSES = (
    "another revision of the target, the layer ids (aux_layers=...), a thinking template where the drafter was trained "
    "without one, which row of a block guesses first, a quantised target"
)


class DFlashDrafter(BlockDrafter):
    """A DFlash or DFlash 2 drafter; the arguments are those of BlockDrafter."""

    method = "dflash"
    option_names = ("aux_layers", "own_embedding")
    first_row_remedy = "sample_from_anchor in its config.json says which row guesses first"

    def start(self, request: DraftRequest) -> DraftSession:
        is_second = isinstance(self.model, DFlash2Model)
        return DFlash2Session(self, request) if is_second else DFlashSession(self, request)


class DFlashSession(BlockSession):
    """A call's blocks, guessed each token by itself."""

    def __init__(self, drafter: DFlashDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request, _CAUSES)

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        if max(budget) == 0:
            return Draft.empty(len(budget), self.rows.ids.device)
        # The block is always whole: a shorter one is another input to a network that sees all of it.
        states = self.run_block()[:, : max(budget)]
        logits = self.drafter.scatter(self.drafter.logits(states, self.request), self.request)
        return draw_chain(self.request, budget, verification, self.guesses(states, logits))

    def guesses(self, states: torch.Tensor, logits: torch.Tensor) -> Advance:
        """The logits of each slot, for `draw_chain`.

        Args:
            states: [B, n, H] of the slots, after the last norm.
            logits: [B, n, V] fp32 of each slot by itself.
        """

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            return logits[:, slot : slot + 1]

        return advance


class DFlash2Session(DFlashSession):
    """A call's blocks, each token chosen among its row's candidates. The draft's law knows no token beside them."""

    def guesses(self, states: torch.Tensor, logits: torch.Tensor) -> Advance:
        assert isinstance(self.model, DFlash2Model)
        selector, device = self.model.candidate_selector, states.device
        likeliest, candidates = logits.topk(min(selector.num_candidates, logits.shape[-1]), dim=-1)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            here = slice(slot, slot + 1)
            previous = self.rows.last_tokens() if token is None else token
            ids = candidates[:, here]
            scores = selector(states[:, here], previous.to(device), ids.to(device)).to(logits.device)
            return torch.full_like(logits[:, here], -torch.inf).scatter_(-1, ids, likeliest[:, here] + scores)

        return advance
