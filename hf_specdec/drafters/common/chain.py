"""Drafting one token after another, and telling the truth about how each was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...verification import DRAFT, TARGET, Draft, OneHot, RoundNoise, Sampled
from ..request import DraftRequest

Advance = Callable[[torch.Tensor | None, int], torch.Tensor]


def draw_chain(request: DraftRequest, budget: Sequence[int], verification: int, advance: Advance) -> Draft:
    """A chain of at most `max(budget)` tokens, drawn or computed as the options say.

    Args:
        request: the call.
        budget: tokens that each row may draft.
        verification: the number of the round.
        advance: (token [B, 1], slot) -> logits [B, 1, V] of that slot, where the token is the one drafted before it,
            None at slot 0. fp32, on the device of the rows, -inf where the drafter has no such token.

    Returns:
        The draft; its law is what the tokens were drawn from after the processors, or one-hot.
    """
    rows, num_tokens = request.rows, max(budget)
    if num_tokens == 0:
        return Draft.empty(len(budget), rows.ids.device)
    draws = request.config.draft_sampling == "sample" and request.noise is not None
    shared = request.config.rule == "coupled"
    # Everything that comes from the host is made here: later it would wait for the forwards in flight.
    lengths = torch.tensor(list(budget), device=rows.ids.device)
    noise = RoundNoise(request.noise, rows.positions, verification) if request.noise else None
    tokens: list[torch.Tensor] = []
    law_logits: list[torch.Tensor] = []
    one_hot: list[torch.Tensor] = []
    for slot in range(num_tokens):
        if tokens and request.processors_read_ids:
            rows.place_draft(torch.cat(tokens, dim=1))
        scores = request.process(advance(tokens[-1] if tokens else None, slot), slot)
        if draws and noise is not None:
            # A coupled draft reads the very noise that the target will read at this position.
            tokens.append(noise.choose(TARGET if shared else DRAFT, scores, slot))
            drawn_from, no_draw = drawn_law(scores)
            law_logits.append(drawn_from)
            one_hot.append(no_draw)
        else:
            tokens.append(scores.argmax(dim=-1))
    drafted = torch.cat(tokens, dim=1)
    drafted = drafted.masked_fill(torch.arange(num_tokens, device=drafted.device) >= lengths[:, None], -1)
    if not law_logits:
        return Draft(drafted, lengths, OneHot())
    law = Sampled(torch.cat(law_logits, dim=1), one_hot=torch.cat(one_hot, dim=1), shared_noise=shared)
    return Draft(drafted, lengths, law)


def drawn_law(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [B, n, V], one_hot [B, n]) of the law of tokens drawn from `scores`. Processors may leave none of the
    drafter's tokens; the token is then no draw, and will not pass."""
    empty = scores.amax(dim=-1).isneginf()
    return scores.masked_fill(empty[..., None], 0.0), empty
