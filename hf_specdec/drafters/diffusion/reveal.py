"""Which slots of a draft get their token in which pass, and which law each token may be declared with.

A pass gives logits for all slots that are still masked; an order picks some of them, and their tokens are drawn. Every
slot is drawn once. An order looks at logits only, and never at a token drawn in the same pass, so what it picks is
known before the tokens are.

The verifier judges slot i knowing the tokens before it, so q_i must be the law of token i given everything that is
fixed by then. A slot drawn in pass t saw the canvas of that pass: its own softmax is the law if no slot on its left was
drawn later. Otherwise the drawing of that slot already looked at token i, which is then a fact and no draw: one-hot.
Slots of one pass are drawn side by side, which is why equality is enough. tests/test_diffusion_laws.py enumerates it
for rejection and block verification, with every slot's own softmax as the control that fails.

Confidence order: Chang et al. 2022 (MaskGIT), Nie et al. 2025 (LLaDA). Entropy bound: Ben-Hamu et al. 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_ENTROPY_BOUND = 0.1  # nats that slots revealed together may share beyond the largest of their entropies

# (logits [B, n, V], masked [B, n], count [B, 1]) -> [B, n] the slots to reveal, `count` of the masked ones at least
Order = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (tokens [B, n], masked [B, n]) -> [B, n, V] fp32 logits of one pass over the canvas, masks where `masked`
Pass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# (logits [B, 1, V], slot, tokens [B, n]) -> scores [B, 1, V] of a slot, given tokens for the slots before it
Process = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
# (scores [B, 1, V], slot) -> tokens [B, 1]
Draw = Callable[[torch.Tensor, int], torch.Tensor]


def left_to_right(logits: torch.Tensor, masked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The first masked slots. Every token keeps its own law."""
    return masked & (masked.long().cumsum(dim=1) <= count)


def by_confidence(logits: torch.Tensor, masked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The slots whose likeliest token is likeliest."""
    return _first(-logits.softmax(dim=-1).amax(dim=-1), masked, count)


def by_entropy(logits: torch.Tensor, masked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The slots of least entropy, and more of them as long as together they stay within the bound: what drawing k
    tokens side by side can get wrong is at most the sum of their entropies without the largest."""
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs.clamp_min(torch.finfo(logits.dtype).min)).sum(dim=-1)
    ordered = entropy.masked_fill(~masked, torch.inf).sort(dim=1, stable=True).values
    within = ordered.isfinite() & (ordered.cumsum(dim=1) - ordered <= _ENTROPY_BOUND)
    return _first(entropy, masked, torch.maximum(count, within.sum(dim=1, keepdim=True)))


ORDERS: dict[str, Order] = {"left_to_right": left_to_right, "confidence": by_confidence, "entropy": by_entropy}


def own_law_holds(drawn_in: torch.Tensor) -> torch.Tensor:
    """[B, n] whether the law that a token was drawn from may be declared.

    Args:
        drawn_in: [B, n] the pass in which each slot was drawn.
    """
    return drawn_in >= drawn_in.cummax(dim=1).values


class Revealed(NamedTuple):
    """A draft.

    Attributes:
        tokens: [B, n].
        scores: [B, n, V] what each token was drawn from; -inf all over where processors left nothing.
        drawn_in: [B, n] the pass that drew it.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    drawn_in: torch.Tensor


def reveal(
    stages: torch.Tensor,
    num_stages: int,
    effort: int,
    order: Order,
    run: Pass,
    process: Process,
    draw: Draw,
    resample: bool = False,
) -> Revealed:
    """Fill a draft, in `effort` passes for each stage or fewer where an order is done before.

    Args:
        stages: [B, n] when each slot has its turn, from 0: blocks that see only what is before them go one after
            another.
        num_stages: how many there are.
        effort: passes. Each reveals an equal share of what is left, or more where the order says so.
        order: what a pass reveals.
        run, process, draw: a pass of the drafter, the call's processors, and how a token is chosen.
        resample: all passes but the last put the likeliest tokens on the canvas, and the last draws every slot, given
            that canvas. So every token keeps its law.
    """
    tokens, masked = torch.zeros_like(stages), torch.ones_like(stages, dtype=torch.bool)
    drawn_in, scores = torch.zeros_like(stages), None
    finished = -1
    for number in range(num_stages * effort):
        stage, passes = number // effort, effort - number % effort
        if stage == finished:
            continue
        turn = stages == stage
        logits = run(tokens, masked)
        redraws = resample and passes == 1
        chosen = turn if redraws else masked & turn
        if passes - resample > 1:
            chosen = order(logits, chosen, _share(chosen, passes - resample))
        # Masked slots hold a guess too: processors may read the tokens before a slot, drawn or not.
        tokens, masked = torch.where(masked, logits.argmax(dim=-1), tokens), masked & ~chosen
        if resample and not redraws:
            continue
        scores = torch.zeros_like(logits) if scores is None else scores
        drawn_in = drawn_in.masked_fill(chosen, number)
        drawn = [True] * chosen.shape[1]
        if num_stages * effort > 1:
            *drawn, goes_on = torch.cat([chosen.any(dim=0), (masked & turn).any()[None]]).tolist()
            finished = finished if goes_on else stage
        for slot in (slot for slot, is_drawn in enumerate(drawn) if is_drawn):
            here, now = slice(slot, slot + 1), chosen[:, slot : slot + 1]
            processed = process(logits[:, here], slot, tokens)
            tokens[:, here] = torch.where(now, draw(processed, slot), tokens[:, here])
            scores[:, here] = torch.where(now[..., None], processed, scores[:, here])
    assert scores is not None
    return Revealed(tokens, scores, drawn_in)


def _share(masked: torch.Tensor, passes: int) -> torch.Tensor:
    """[B, 1] an equal share of the masked slots for each pass, rounded up."""
    return (masked.sum(dim=1, keepdim=True) + passes - 1) // passes


def _first(keys: torch.Tensor, masked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[B, n] the `count` masked slots of smallest key; the leftmost of equals."""
    ranks = keys.masked_fill(~masked, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return masked & (ranks < count)
