"""Drafting with DFlash (Chen et al. 2026, arXiv:2602.06036): the tokens of a block are guessed side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...verification import Draft
from ..base import DraftRequest, DraftSession
from ..common.block_drafter import BlockDrafter
from ..common.block_session import BlockSession
from ..common.chain import draw_chain

_CAUSES = (
    "another revision of the target, the layer ids (aux_layers=...), a thinking template where the drafter was trained "
    "without one, which row of a block guesses first, a quantised target"
)


class DFlashDrafter(BlockDrafter):
    """A DFlash drafter; the arguments are those of BlockDrafter."""

    method = "dflash"
    option_names = ("aux_layers",)

    def start(self, request: DraftRequest) -> DraftSession:
        return DFlashSession(self, request)


class DFlashSession(BlockSession):
    """A call's blocks, guessed each token by itself."""

    def __init__(self, drafter: DFlashDrafter, request: DraftRequest) -> None:
        super().__init__(drafter.model, request, _CAUSES)
        self.drafter = drafter

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        states = self.run_block()[:, : max(budget)]
        logits = self.drafter.scatter(self.drafter.logits(states, self.request), self.request)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            return logits[:, slot : slot + 1]

        return draw_chain(self.request, budget, verification, advance)
