"""The law h(x) = min(max(q(x), b p(x)), a p(x)), b <= 1 <= a, of `Mentored`: how far it may go from p towards q."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_BISECTIONS = 50  # of ln a, whose range is some hundred at most


def clip_levels(p: torch.Tensor, q: torch.Tensor, max_kl: float) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b [...]: the largest a with KL(h || p) <= max_kl, and the b that makes h sum to 1.

    Args:
        p, q: [..., V] fp64 laws.
        max_kl: nats.

    The tokens are sorted by q / p once. Then for any level the sums over those below and above it are differences of
    prefix sums, the b that belongs to an a is read off a piecewise linear function, and a is found by bisection.
    """
    allowed = p > 0.0
    ratio = torch.where(allowed, q / p, torch.where(q > 0.0, torch.inf, 0.0))
    ratio, order = ratio.sort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    allowed = allowed.gather(-1, order)
    log_ratio = torch.where(allowed & (q > 0.0), ratio, 1.0).log()
    below_p, below_q, below_kl = (pad(x.cumsum(dim=-1), (1, 0)) for x in (p, q, q * log_ratio))
    # What max(b p - q, 0) sums to at b = each ratio.
    filled = torch.where(ratio.isinf(), torch.inf, ratio * below_p[..., :-1] - below_q[..., :-1])
    filled = filled.cummax(dim=-1).values  # ascending but for rounding

    def at(sums: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return sums.gather(-1, count)

    def evaluate(log_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """b and KL [..., 1] that belong to a."""
        a = log_a.exp()
        capped = torch.searchsorted(ratio, a, right=True)  # tokens before this one are not capped at a p
        capped_p = (below_p[..., -1:] - at(below_p, capped)).clamp_min(0.0)
        missing = (below_q[..., -1:] - at(below_q, capped) - a * capped_p).clamp_min(0.0)
        raised = torch.searchsorted(filled, missing, right=True)  # tokens before this one are raised to b p
        raised_p = at(below_p, raised)
        b = ((missing + at(below_q, raised)) / raised_p.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1.0)
        between = at(below_kl, capped) - at(below_kl, raised)
        return b, a * log_a * capped_p + between + torch.special.xlogy(b, b) * raised_p

    low = torch.zeros_like(ratio[..., :1])
    high = torch.where(allowed, ratio, 0.0).amax(dim=-1, keepdim=True).clamp_min(1.0).log()
    fits = evaluate(high)[1] <= max_kl
    low = torch.where(fits, high, low)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        fits = evaluate(middle)[1] <= max_kl
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return low.exp()[..., 0], evaluate(low)[0][..., 0]
