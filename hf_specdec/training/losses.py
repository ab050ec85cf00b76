"""How far a drafter's law is from the target's, with its gradient, in few passes over a vocabulary or a part of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

_ROWS_AT_ONCE = 64  # so that what is made on the way stays in the processor's cache


class Divergence(NamedTuple):
    """[M] of each row.

    Attributes:
        loss: cross_entropy * (-sum p log q) + distance * sum |q - p|, differentiable in the drafter's logits.
        acceptance: sum min(p, q), the chance that a token drawn from q is accepted.
        log_normaliser: log of the sum of the drafter's weights.
        best: the drafter's most probable token.
    """

    loss: torch.Tensor
    acceptance: torch.Tensor
    log_normaliser: torch.Tensor
    best: torch.Tensor


def divergence(logits: torch.Tensor, target_logits: torch.Tensor, cross_entropy: float, distance: float) -> Divergence:
    """Compare q = softmax(logits) with p = softmax(target_logits), both [M, V]; only `logits` gets a gradient."""
    return Divergence(*_Divergence.apply(logits, target_logits, cross_entropy, distance))


class _Divergence(torch.autograd.Function):
    """The gradient of sum |q - p| in the logits is q (s - sum q s), s = sign(q - p); that of -sum p log q is q - p."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target_logits: torch.Tensor, cross_entropy: float, distance: float
    ) -> tuple[torch.Tensor, ...]:
        gradient = torch.empty_like(logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss, acceptance, normaliser = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(3))
        best = torch.empty_like(loss, dtype=torch.long)
        for first in range(0, logits.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            weights, p = logits[rows].to(wide), target_logits[rows].to(wide).softmax(dim=-1)
            best[rows] = weights.argmax(dim=-1)
            log_sum = weights.logsumexp(dim=-1)
            crossed = log_sum - torch.einsum("mv,mv->m", p, weights)
            q = weights.sub(log_sum[:, None]).exp_()
            difference = q - p
            apart = torch.linalg.vector_norm(difference, ord=1, dim=-1)
            normaliser[rows], acceptance[rows] = log_sum, 1 - 0.5 * apart
            loss[rows] = cross_entropy * crossed + distance * apart
            if distance:
                sign = difference.sign()
                sign.sub_(torch.einsum("mv,mv->m", q, sign)[:, None]).mul_(q).mul_(distance)
                difference = difference.mul_(cross_entropy).add_(sign)
            elif cross_entropy != 1.0:
                difference.mul_(cross_entropy)
            gradient[rows] = difference
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(acceptance, normaliser, best)
        return loss, acceptance, normaliser, best

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None


def part_of_head(
    head: torch.Tensor, frequent: torch.Tensor, answers: torch.Tensor, num_negatives: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some tokens for a loss that would take too long over all: the frequent ones, the answers, and others at random.

    A token that stands for n has the logarithm of n added: sums over these tokens are then, on average, sums over all.

    Args:
        head: [V, H] the target's output head.
        frequent: [F] ids of tokens that are always among them.
        answers: [N] ids.
        num_negatives: others.

    Returns:
        ([C, H] their rows of the head, [C] what is added to their logits, [N] the answers' places among them).
    """
    chosen = torch.zeros(len(head), dtype=torch.bool, device=answers.device)
    chosen[frequent] = chosen[answers] = True
    rest = (~chosen).nonzero().flatten()
    count = min(num_negatives, len(rest))
    drawn = rest[torch.randperm(len(rest), device=rest.device)[:count]]
    places = chosen.cumsum(dim=0) - 1
    own = chosen.nonzero().flatten()
    bias = head.new_zeros(len(own) + count)
    bias[len(own) :] = math.log(len(rest) / max(count, 1))
    return head[torch.cat([own, drawn])], bias, places[answers]
