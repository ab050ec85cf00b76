"""How many of the drafted tokens to verify, from how sure the drafter is of each.

Cheng et al. 2026 (arXiv:2607.05147), algorithm 1 and appendix A. c_k is the chance that slot k is accepted if all slots
before it are, a_k = c_1 ... c_k. A verification of lengths l emits sum over rows of 1 + a_1 + ... + a_l tokens on
average, and takes seconds(l).

Under `rejection` and `block` a length may look only at what was known before the token that it decides on was drawn.
c_k is (it is made of the tokens before x_k), so these rules are causal as long as nothing is weighed against what comes
after it: algorithm 1 stops at the first step that does not pay, and never asks whether a later one would. The best
length of all, which would ask, emits another law (0.85 for 0.7 in the paper's own example). Under `match` and `coupled`
any rule is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..verification import Draft
from .governor import Governor

Seconds = Callable[[Sequence[int]], float]  # duration of a verification of these lengths


def admissions(confidence: Sequence[Sequence[float]], seconds: Seconds) -> Iterator[tuple[list[int], float]]:
    """(lengths, tokens per second) of no drafts, then after each step of algorithm 1 up to everything.

    A step takes the next slot of the row whose next slot is the likeliest to be accepted (of equal ones the earliest
    slot, then row), and the next slot of any other row to which it adds no cost: the rows of a padded batch share a
    forward, so that their slots come column by column.

    Args:
        confidence: c of each row's slots.
        seconds: known before the drafts were drawn, never falling with a length.
    """
    lengths = [0] * len(confidence)
    reach = [row[0] if row else 0.0 for row in confidence]  # a of each row's next slot
    tokens = float(len(confidence))
    yield list(lengths), tokens / seconds(lengths)
    while rows := [r for r, row in enumerate(confidence) if lengths[r] < len(row)]:
        likeliest = min(rows, key=lambda r: (-reach[r], lengths[r], r))
        lengths[likeliest] += 1
        cost, step = seconds(lengths), [likeliest]
        for r in rows:
            if r != likeliest:
                lengths[r] += 1
                if seconds(lengths) > cost:
                    lengths[r] -= 1
                else:
                    step.append(r)
        for r in step:
            tokens += reach[r]
            reach[r] *= confidence[r][lengths[r]] if lengths[r] < len(confidence[r]) else 0.0
        yield list(lengths), tokens / cost


def prefix_lengths(confidence: Sequence[Sequence[float]], seconds: Seconds) -> list[int]:
    """Algorithm 1: the lengths before the first step that does not raise the tokens per second."""
    best, best_rate = [0] * len(confidence), 0.0
    for lengths, rate in admissions(confidence, seconds):
        if not rate > best_rate:
            break
        best, best_rate = lengths, rate
    return best


def best_lengths(confidence: Sequence[Sequence[float]], seconds: Seconds) -> list[int]:
    """The lengths of the most tokens per second, which no draft may be cut to whose own confidence this is."""
    return max(admissions(confidence, seconds), key=lambda step: step[1])[0]


def threshold_lengths(confidence: Sequence[Sequence[float]], threshold: float) -> list[int]:
    """The slots of each row before the first one whose c is below `threshold`."""
    return [next((k for k, c in enumerate(row) if not c >= threshold), len(row)) for row in confidence]


class Schedule:
    """Cuts drafts before they are verified.

    Reading the confidence costs one device-to-host copy of [B, n + 1] numbers a round, before the verification;
    "lagged" reads that of the round before, when it has been there for long.

    Args:
        kind: "confidence", algorithm 1; "lagged", for all rows the length that would have been best in the round
            before; or a threshold of c.
    """

    def __init__(self, kind: str | float) -> None:
        self.kind = kind
        self.before: torch.Tensor | None = None  # [B, 1 + n] lengths and confidence of the round before
        self.longest = 0  # of the last cut

    def cut(self, draft: Draft, costs: Governor) -> Draft:
        """The draft with the lengths that pay.

        Args:
            draft: a chain with its confidence.
            costs: what rounds have cost so far.
        """
        assert draft.confidence is not None
        packed = torch.cat([draft.lengths[:, None].float(), draft.confidence.to(draft.lengths.device)], dim=1)
        before, self.before = self.before, packed
        if isinstance(self.kind, str) and (before is None or not costs.knows_slope):
            # A cost for each token needs lengths that differ.
            longest = min(1 if self.longest > 1 else draft.num_slots, draft.num_slots)
            cut = draft.cut(draft.lengths.clamp_max(longest), longest)
        else:
            told = before if self.kind == "lagged" and before is not None else packed
            cut = self._cut(draft, told.tolist(), lambda lengths: costs.seconds(max(lengths)))
        self.longest = cut.num_slots
        return cut

    def _cut(self, draft: Draft, packed: list[list[float]], seconds: Seconds) -> Draft:
        known = [[min(max(c, 0.0), 1.0) for c in row[: int(length)]] for length, *row in packed]
        drafting = [b for b, row in enumerate(known) if row]  # finished rows have none
        confidence = [known[b] for b in drafting]
        if not drafting:
            return draft.cut(draft.lengths.clamp_max(0), 0)
        if self.kind == "lagged":
            longest = min(max(best_lengths(confidence, seconds)), draft.num_slots)
            return draft.cut(draft.lengths.clamp_max(longest), longest)
        if isinstance(self.kind, str):
            found = prefix_lengths(confidence, seconds)
        else:
            found = threshold_lengths(confidence, self.kind)
        lengths = [0] * len(known)
        for b, length in zip(drafting, found, strict=True):
            lengths[b] = length
        return draft.cut(torch.tensor(lengths, device=draft.lengths.device), max(lengths))
