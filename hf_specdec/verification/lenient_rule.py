"""What a lenient rule does: it keeps more drafted tokens than the target's law allows, and measures how many.

At one slot let p be the target's law after all processors and q the draft's, over the vocabulary. A rule keeps the part
g <= q of the draft: d is accepted with probability g(d) / q(d). Otherwise a token is drawn from a residual r, so that
the slot's token has the law

    h = g + (1 - sum g) r / sum r

Where a rule says nothing else r = max(p - g, 0). Since 1 - sum g <= sum r, h <= max(p, g) then, and
TV(h, p) = sum max(g - p, 0), the least that any residual leaves. After the last drafted token the bonus token is drawn
from p. g(x) = r(x) = 0 where p(x) = 0: what a processor forbids (a grammar, top-k) is never emitted.

Greedy decoding has no law to keep. There some rules accept a drafted token that is nearly as probable as the best one,
and emit the best one after a rejection.

A round may confine a rule to some of its slots. At the others g = min(p, q) and r = p - g, which is `rejection`, and
greedy decoding takes the best token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn.functional import pad

from .laws import Draft, Verdict, law_over_vocabulary
from .noise import RoundNoise
from .rules import check_draws, decided_laws, emit, padded_verdict, within

GREEDY_RULES = "a number, Margin, TopK or Typical"


@dataclass(frozen=True)
class LenientRule(ABC):
    """A lenient rule; its parameters are its fields.

    Attributes:
        name: of the rule in a file of options.
        serves_greedy: whether it means anything in greedy decoding.
    """

    name: str = field(init=False, repr=False)
    serves_greedy: ClassVar[bool] = True

    @abstractmethod
    def bound(self, greedy: bool) -> str:
        """What is guaranteed for each token, given the text before it; nats, h the emitted law and p the target's."""

    def is_lossless(self, greedy: bool) -> bool:
        """Whether the parameters are at their strict end, where `rejection` (or `match`) does the same."""
        return False

    def measures(self, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(g, r) for laws p and q [..., V]; r need not sum to 1."""
        kept = self.kept(p, q)
        return kept, (p - kept).clamp_min(0.0)

    @abstractmethod
    def kept(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """[..., V] g."""

    def tolerated(self, p: torch.Tensor) -> torch.Tensor:
        """[..., V] bool, the tokens that greedy decoding may take instead of the best one.

        Raises:
            ValueError: the rule is for sampling only.
        """
        raise ValueError(f"{self!r} is a rule for sampling; greedy decoding takes {GREEDY_RULES}.")

    def verify(
        self, draft: Draft, scores: torch.Tensor, noise: RoundNoise | None, slots: torch.Tensor | None = None
    ) -> Verdict:
        """Decide a draft; the arguments are those of `verification.verify`."""
        if noise is None:
            return self._verify_greedily(draft, scores, slots)
        scores = check_draws(draft, scores, self, noise)
        tokens, vocab_size = draft.tokens.clamp_min(0).unsqueeze(-1), scores.shape[-1]
        p = scores[:, :-1].softmax(dim=-1)
        q = law_over_vocabulary(draft.law, draft.tokens, vocab_size, p.dtype)
        kept, residual = self._measures_at(slots, p, q)
        g_drafted, q_drafted = (measure.gather(-1, tokens).squeeze(-1) for measure in (kept, q))
        accepted = within(draft) & noise.accepts(g_drafted, q_drafted)
        num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
        decided, here = None, slots
        if draft.num_slots > 0:
            if slots is not None:
                here = slots.gather(1, num_accepted.clamp_max(draft.num_slots - 1)[:, None])[:, 0]
            decided = self._measures_at(here, *decided_laws(draft, scores, num_accepted))[1]
        verdict = emit(draft, scores, num_accepted, decided, noise)
        may_lose = within(draft) if slots is None else within(draft) & slots
        measured = tv_and_kl(emitted_law(kept, residual), p)
        return _with_distances(verdict, [distance.masked_fill(~may_lose, 0.0) for distance in measured])

    def _measures_at(
        self, slots: torch.Tensor | None, p: torch.Tensor, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`measures` where `slots` [...] is True, and everywhere where it is None; elsewhere those of `rejection`."""
        kept, residual = self.measures(p, q)
        if slots is None:
            return kept, residual
        slots, strict = slots.unsqueeze(-1), torch.minimum(p, q)
        return torch.where(slots, kept, strict), torch.where(slots, residual, p - strict)

    def _verify_greedily(self, draft: Draft, scores: torch.Tensor, slots: torch.Tensor | None) -> Verdict:
        """TV counts the tokens other than the best one; KL, infinite for those, is ln(p(best) / p(token)) here."""
        if draft.parents is not None:
            raise ValueError(f"{self!r} verifies chains; a tree needs `rule='match'`.")
        best, tokens = scores.argmax(dim=-1), draft.tokens.clamp_min(0)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        p = scores[:, :-1].softmax(dim=-1)
        other = tokens != best[:, :-1]
        tolerated = self.tolerated(p).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        accepted = within(draft) & (~other | (tolerated if slots is None else tolerated & slots))
        num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
        is_drafted = pad(torch.arange(draft.num_slots, device=tokens.device) < num_accepted[:, None], (0, 1))
        emitted = torch.where(is_drafted, pad(tokens, (0, 1)), best)
        weights = scores.gather(-1, emitted.unsqueeze(-1)).squeeze(-1)
        verdict = padded_verdict(num_accepted, emitted, weights, greedy=True)
        other = other & is_drafted[:, :-1]
        best_score, score = (scores.gather(-1, t.unsqueeze(-1)).squeeze(-1) for t in (best, pad(tokens, (0, 1))))
        lost = torch.where(other, (best_score - score)[:, :-1], 0.0)
        return _with_distances(verdict, [other.to(lost.dtype), lost])


def emitted_law(kept: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """[..., V] h of g and r."""
    total = residual.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(residual.dtype).tiny)
    return kept + (1.0 - kept.sum(dim=-1, keepdim=True)).clamp_min(0.0) * (residual / total)


def tv_and_kl(h: torch.Tensor, p: torch.Tensor) -> list[torch.Tensor]:
    """TV(h, p) and KL(h || p) [...] of laws [..., V]."""
    tv = 0.5 * (h - p).abs().sum(dim=-1)
    kl = (h * torch.where(h > 0.0, h / p, 1.0).log()).sum(dim=-1).clamp_min(0.0)
    return [tv, kl]


def _with_distances(verdict: Verdict, distances: list[torch.Tensor]) -> Verdict:
    tv, kl = (pad(distance, (0, 1)) for distance in distances)  # the bonus token is the target's own
    return Verdict(verdict.num_accepted, verdict.tokens, tv=tv, kl=kl)
