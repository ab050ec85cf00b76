"""Drafting with DSpark (Cheng et al. 2026, arXiv:2607.05147): one forward for a block, then token after token.

The network guesses all tokens of a block side by side; a small head adds to each what the token before it says. The
confidence of a slot is read from what is known before its token is drawn, so that lengths may be decided with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...verification import Draft
from ..base import DraftSession
from ..common.block_drafter import BlockDrafter
from ..common.block_session import BlockSession
from ..common.chain import draw_chain
from ..request import DraftRequest
from .modeling import DSparkModel

_CAUSES = (
    "which row of a block guesses first (first_slot=...), the layer ids (aux_layers=...), another revision of the "
    "target, a thinking template where the drafter was trained without one, a quantised target"
)


class DSparkDrafter(BlockDrafter):
    """A DSpark drafter; the arguments are those of BlockDrafter.

    Attributes:
        model: the network with its heads.
    """

    method = "dspark"
    option_names = ("aux_layers", "own_embedding", "first_slot")
    first_row_remedy = "Load it with first_slot={other}"
    model: DSparkModel

    @property
    def gives_confidence(self) -> bool:
        return self.model.confidence_head is not None

    def start(self, request: DraftRequest) -> DraftSession:
        return DSparkSession(self, request)


class DSparkSession(BlockSession):
    """A call's blocks, and what the token before each slot adds."""

    def __init__(self, drafter: DSparkDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request, _CAUSES)
        self.heads = drafter.model
        self.wants_confidence = request.config.schedule is not None
        temperatures = drafter.model.heads.confidence_temperatures or (1.0,) * self.config.num_drafts
        self.temperatures = torch.tensor(temperatures, device=self.device)

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        block, first, markov = self.run_rows(), self.config.first_slot, self.heads.markov_head
        states = block[:, first : first + max(budget)]
        logits = self.drafter.logits(states, self.request)
        memory: torch.Tensor | None = None
        if markov is not None and first:  # a head with a memory was trained over the anchor's row as well
            _, memory = markov(self.rows.last_tokens().to(self.device), block[:, :1], None)
        confidence: list[torch.Tensor] = []

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            nonlocal memory
            previous = (self.rows.last_tokens() if token is None else token).to(self.device)
            here = states[:, slot : slot + 1]
            if self.wants_confidence:
                confidence.append(self.acceptance_logits(here, previous))
            scores = logits[:, slot : slot + 1]
            if markov is not None:
                bias, memory = markov(previous, here, memory)
                scores = scores + bias.to(scores.device, scores.dtype)
            return self.drafter.scatter(scores, self.request)

        draft = draw_chain(self.request, budget, verification, advance)
        if not confidence:
            return draft
        return replace(draft, confidence=self.confidence(torch.cat(confidence, dim=1)))

    def next_token_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits, markov = super().next_token_logits(states), self.heads.markov_head
        if markov is None:
            return logits
        anchor, memory, biases = self.rows.last_tokens().to(self.device), None, []
        for slot in range(2):
            bias, memory = markov(anchor, states[:, slot : slot + 1], memory)
            biases.append(bias)
        return logits + torch.cat(biases, dim=1).to(logits.device, logits.dtype)

    def acceptance_logits(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[B, m] fp32 logits of the confidence head.

        Args:
            states: [B, m, H] of the slots.
            previous: [B, m] tokens before them.
        """
        head: Any = self.heads.confidence_head
        markov = self.heads.markov_head
        return head(states, None if markov is None else markov.markov_w1(previous)).float()

    def confidence(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, m] probabilities, calibrated where the drafter's folder says how."""
        return torch.sigmoid(logits / self.temperatures[: logits.shape[1]])
