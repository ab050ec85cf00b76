"""The draft length of each round, from what past rounds accepted and cost.

With acceptance alpha per drafted token, a draft of k tokens emits 1 + alpha + ... + alpha^k tokens on average, in
a round that costs T(k) = verification(k) + drafting(k) seconds. The governor takes the k with the most tokens per
second; 0 turns drafting off where it does not pay, with a short draft now and then to see whether that has changed.

Decisions use past rounds only, never the tokens they decide about, so every rule stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

_FORGET = 0.9  # weight of everything before the newest round
_OUTLIER = 2.0  # a round that took more than this many times what was expected counts as this many times
_SEEN_ENOUGH = 4  # drafted rounds before drafting may be turned off
_PROBE_EVERY = 12  # plain steps before the first probe; each one that shows nothing doubles them, up to
_PROBE_AT_MOST = 48
_PROBE_LENGTH = 2
_LEAST_SPREAD = 0.01  # variance of the lengths of past rounds below which their cost for each token is not known


@dataclass
class _Line:
    """A least-squares line y = a + b x over points that fade."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        expected = self.at(x)
        if expected > 0.0:  # one hiccup of the machine must not decide the next dozen rounds
            y = min(y, _OUTLIER * expected)
        for name, value in (("w", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, _FORGET * getattr(self, name) + value)

    def at(self, x: float) -> float:
        """The line's y at x, 0 where nothing is known."""
        a, b = self.fit()
        return a + b * x

    @property
    def mean(self) -> float:
        """Of y, 0 where nothing is known."""
        return self.y / self.w if self.w else 0.0

    @property
    def variance(self) -> float:
        """Of x."""
        return (self.xx - self.x * self.x / self.w) / self.w if self.w else 0.0

    def fit(self) -> tuple[float, float]:
        """(a, b); costs never fall with length, and without spread in x the slope is taken as 0."""
        if self.w == 0.0:
            return 0.0, 0.0
        spread = self.xx - self.x * self.x / self.w
        slope = max(0.0, (self.xy - self.x * self.y / self.w) / spread) if spread > 1e-6 * self.w else 0.0
        return max(0.0, (self.y - slope * self.x) / self.w), slope


class Governor:
    """Chooses draft lengths.

    Args:
        num_tokens: the length to start with.
        max_tokens: the longest length.
        adaptive: False keeps `num_tokens`; costs are measured all the same.
    """

    def __init__(self, num_tokens: int, max_tokens: int, adaptive: bool) -> None:
        self.num_tokens, self.max_tokens, self.adaptive = num_tokens, max_tokens, adaptive and max_tokens > 0
        self._accepted, self._tried = 0.0, 0.0
        self._verification, self._drafting = _Line(), _Line()
        self._plain_steps, self._probe_every, self._drafted_rounds = 0, _PROBE_EVERY, 0

    def observe(self, drafted: list[int], accepted: list[int], draft_time: float, verify_time: float) -> None:
        """Learn from a round.

        Args:
            drafted, accepted: drafted and accepted tokens of each unfinished row.
            draft_time, verify_time: seconds.
        """
        longest = max(drafted, default=0)
        self._verification.add(longest, verify_time)
        if longest > 0:
            self._drafting.add(longest, draft_time)
        if not self.adaptive:
            return
        if longest == 0:
            self._plain_steps += 1
            return
        self._plain_steps = 0
        self._drafted_rounds += 1
        self._accepted = _FORGET * self._accepted + sum(accepted)
        self._tried = _FORGET * self._tried + sum(min(a + 1, d) for a, d in zip(accepted, drafted, strict=True))
        was_probe = self.num_tokens == 0
        self.num_tokens = self._best_length()
        if self.num_tokens > 0:
            self._probe_every = _PROBE_EVERY
        elif was_probe:
            self._probe_every = min(2 * self._probe_every, _PROBE_AT_MOST)

    def next_length(self) -> int:
        """Tokens to draft in the next round."""
        if self.adaptive and self.num_tokens == 0 and self._plain_steps >= self._probe_every:
            return min(_PROBE_LENGTH, self.max_tokens)
        return self.num_tokens

    def seconds(self, num_tokens: int) -> float:
        """What a round would take that verifies `num_tokens` drafted tokens a row, its drafting included."""
        return max(self._drafting.mean + self._verification.at(num_tokens), 1e-9)

    @property
    def knows_slope(self) -> bool:
        """Whether verifications of different lengths have been timed lately."""
        return self._verification.variance > _LEAST_SPREAD

    @property
    def acceptance(self) -> float:
        """Estimate of alpha, from a prior of one success in two."""
        return (self._accepted + 0.5) / (self._tried + 1.0)

    def _best_length(self) -> int:
        step, per_verified = self._verification.fit()
        draft, per_drafted = self._drafting.fit()
        if per_drafted == 0.0 and self._drafting.x > 0.0:  # one length so far: charge it by the token
            draft, per_drafted = 0.0, self._drafting.y / self._drafting.x
        best, best_rate, tokens = 0, 1.0 / max(step, 1e-9), 1.0
        if self._drafted_rounds < _SEEN_ENOUGH:
            best_rate = 0.0
        for k in range(1, self.max_tokens + 1):
            tokens += self.acceptance**k
            rate = tokens / max(step + draft + k * (per_verified + per_drafted), 1e-9)
            if rate > best_rate:
                best, best_rate = k, rate
        return best
