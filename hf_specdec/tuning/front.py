"""From points to the front, and from the front to one setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .points import Point


@dataclass(frozen=True)
class Limits:
    """What a setting must keep to. Where neither `min_quality` nor `max_kl` is given, only lossless ones may be chosen.

    Args:
        min_quality: of the metric, in the mean.
        max_kl: nats a token, in the mean; the upper end of the interval counts.
        max_itl_ms: 95% of the tokens come at most so many milliseconds after the one before.
    """

    min_quality: float | None = None
    max_kl: float | None = None
    max_itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_quality", "max_kl", "max_itl_ms"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"`{name}` is {value!r}; give a number or None.")

    @property
    def allow_loss(self) -> bool:
        return self.min_quality is not None or self.max_kl is not None

    def excess(self, point: Point) -> float:
        """How far a point is beyond the limits, as a sum of shares of them; 0 where it keeps to all."""
        excess = 0.0
        if self.min_quality is not None and point.quality is not None:
            excess += max(0.0, self.min_quality - point.quality.mean) / max(abs(self.min_quality), 1e-9)
        if self.max_kl is not None:
            excess += max(0.0, point.kl.high - self.max_kl) / max(self.max_kl, 1e-9)
        if self.max_itl_ms is not None:
            excess += max(0.0, point.itl_ms[1] - self.max_itl_ms) / max(self.max_itl_ms, 1e-9)
        return excess


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is nowhere worse than `b` and surely better somewhere."""
    if a.speed.mean < b.speed.mean or a.merit.mean < b.merit.mean:
        return False
    return a.speed.is_surely_above(b.speed) or a.merit.is_surely_above(b.merit)


def front_of(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, and the fastest lossless one in any case; the fastest first."""
    best = fastest_lossless(points)
    kept = [point for point in points if point is best or not any(dominates(other, point) for other in points)]
    return sorted(kept, key=lambda point: -point.speed.mean)


def fastest_lossless(points: Sequence[Point]) -> Point:
    """Decoding without drafts is lossless, so there is one."""
    return max((point for point in points if point.lossless), key=lambda point: point.speed.mean)


def choose(points: Sequence[Point], limits: Limits) -> tuple[Point, bool]:
    """The fastest point within the limits and True; where there is none the nearest to them, and False."""
    allowed = [point for point in points if point.lossless or limits.allow_loss]
    chosen = min(allowed, key=lambda point: (limits.excess(point), -point.speed.mean))
    return chosen, limits.excess(chosen) == 0.0
