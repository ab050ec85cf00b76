"""What each lenience would accept, told from one strict run.

A draft d_1 ... d_n is drawn from q whatever is accepted of it, so the target's laws at all of its slots say what every
rule would have kept. With g <= q the part that a rule keeps (verification/lenient_rule.py), slots 1 to i pass with

    s_i = prod_{j < i} g_j(d_j) / q_j(d_j)  *  sum_x g_i(x)

in expectation over the last token and all coins. A draft of k tokens then emits 1 + s_1 + ... + s_k tokens, and slot i
emits one from the rule's law h_i with probability prod_{j < i} g_j(d_j) / q_j(d_j). This is unbiased for the contexts
that the strict run met; a lenient run meets others. The first k tokens of a longer draft stand for a draft of k: exact
where a token depends on those before it only, near for drafters that guess whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..verification import Draft, LenientRule, RoundNoise, Verdict, verify
from ..verification.laws import law_over_vocabulary
from ..verification.lenient_rule import emitted_law, tv_and_kl
from ..verification.rules import within


@dataclass(frozen=True)
class Screen(LenientRule):
    """Verifies without loss and notes what lenient rules would have accepted.

    Args:
        rules: those.
        length: the longest draft.

    Attributes:
        sums: [3, rules, length] over the rounds: acceptance of slots 1 to i, the divergence that slot i would add to
            the text, and rounds that had drafted slot i.
    """

    name: str = field(default="screen", init=False, repr=False)
    rules: tuple[LenientRule, ...] = field(repr=False)
    length: int
    sums: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", torch.zeros(3, len(self.rules), self.length, dtype=torch.float64))

    def bound(self, greedy: bool) -> str:
        return "lossless"

    def kept(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.minimum(p, q)

    def verify(
        self, draft: Draft, scores: torch.Tensor, noise: RoundNoise | None, slots: torch.Tensor | None = None
    ) -> Verdict:
        """The verdict of the lossless rule; a rule that is confined to some slots is screened as if it were not."""
        if draft.num_slots > 0:
            for sums, rule in zip(self.sums.unbind(dim=1), self.rules, strict=True):
                if noise is None:
                    passed, divergence = _greedy(rule, draft, scores)
                else:
                    passed, divergence = _sampling(rule, draft, scores)
                judged = within(draft)
                of_slots = torch.stack([passed.masked_fill(~judged, 0.0), divergence.masked_fill(~judged, 0.0), judged])
                sums[:, : draft.num_slots] += of_slots.sum(dim=1).to(sums)
        return verify(draft, scores, "match" if noise is None else "rejection", noise)

    def predictions(self) -> dict[str, Any]:
        """For JSON: `passed` and `divergence` [rules][length], averages over the rounds that had the slot."""
        passed, divergence, rounds = self.sums
        seen = rounds.clamp_min(1.0)
        return {"passed": (passed / seen).tolist(), "divergence": (divergence / seen).tolist()}


def predicted_round(passed: list[float], divergence: list[float], length: int) -> tuple[float, float]:
    """(tokens that a round with a draft of `length` tokens emits, mean KL of a token), one rule's predictions given."""
    tokens = 1.0 + sum(passed[:length])
    return tokens, sum(divergence[:length]) / tokens


def _sampling(rule: LenientRule, draft: Draft, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, n] expected acceptance of slots 1 to i, and the KL that slot i adds, weighed by being reached."""
    p = scores[:, :-1].double().softmax(dim=-1)
    q = law_over_vocabulary(draft.law, draft.tokens, p.shape[-1], p.dtype)
    kept, residual = rule.measures(p, q)
    tokens = draft.tokens.clamp_min(0).unsqueeze(-1)
    accepted = (kept.gather(-1, tokens) / q.gather(-1, tokens)).squeeze(-1).nan_to_num(0.0).clamp(0.0, 1.0)
    reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1].cumprod(dim=1)], dim=1)
    return reached * kept.sum(dim=-1), reached * tv_and_kl(emitted_law(kept, residual), p)[1]


def _greedy(rule: LenientRule, draft: Draft, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, n] whether slots 1 to i pass, and the log-probability that an accepted slot i loses."""
    verdict = rule.verify(draft, scores, None)
    passed = torch.arange(draft.num_slots, device=scores.device) < verdict.num_accepted[:, None]
    assert verdict.kl is not None
    return passed.double(), torch.where(passed, verdict.kl[:, :-1].double(), 0.0)
