"""Drafting with a masked diffusion model: masks are put behind the text and filled in a few passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...verification import DRAFT, TARGET, Draft, OneHot, RoundNoise, Sampled
from ..base import DraftSession
from ..common.chain import drawn_law
from ..request import DraftRequest
from .canvas import Canvases
from .gemma import GemmaCanvases
from .reveal import Order, own_law_holds, reveal


class DiffusionSession(DraftSession):
    """A call's drafts.

    Args:
        canvases: of the call's rows.
        request: the call.
        order: what a pass reveals.
        resample: whether the last pass draws every token.
    """

    def __init__(self, canvases: Canvases | GemmaCanvases, request: DraftRequest, order: Order, resample: bool) -> None:
        self.canvases, self.request, self.rows = canvases, request, request.rows
        self.order, self.resample, self.effort = order, resample, request.config.effort

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        request, rows, num_slots = self.request, self.rows, max(budget)
        if num_slots == 0:
            return Draft.empty(len(budget), rows.ids.device)
        config = request.config
        draws = config.draft_sampling == "sample" and request.noise is not None
        shared = config.rule == "coupled"
        lengths = torch.tensor(list(budget), device=rows.ids.device)
        noise = RoundNoise(request.noise, rows.positions, verification) if request.noise else None

        def process(logits: torch.Tensor, slot: int, tokens: torch.Tensor) -> torch.Tensor:
            if slot and request.processors_read_ids:
                rows.place_draft(tokens)
            return request.process(logits, slot)

        def draw(scores: torch.Tensor, slot: int) -> torch.Tensor:
            if not draws or noise is None:
                return scores.argmax(dim=-1)
            # Each slot is drawn once a round, so its noise is read once. A coupled draft reads the very noise that the
            # target will read at this position, which may be read as often as one likes.
            return noise.choose(TARGET if shared else DRAFT, scores, slot)

        stages, num_stages = self.canvases.begin(num_slots)
        found = reveal(stages, num_stages, self.effort, self.order, self.canvases.run, process, draw, self.resample)
        tokens = found.tokens.masked_fill(torch.arange(num_slots, device=lengths.device) >= lengths[:, None], -1)
        if not draws:
            return Draft(tokens, lengths, OneHot())
        logits, no_draw = drawn_law(found.scores)
        law = Sampled(logits, one_hot=no_draw | ~own_law_holds(found.drawn_in), shared_noise=shared)
        return Draft(tokens, lengths, law)
