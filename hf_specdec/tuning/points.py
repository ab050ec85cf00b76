"""From the answers of a setting to one point: sums over its prompts, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from .settings import WITHOUT_DRAFTS, Setting

_RESAMPLES = 1000
_SUMMED = (
    *("num_verifications", "num_drafted", "num_accepted", "num_emitted", "tv", "kl"),
    *("draft_time", "verify_time", "host_time"),
)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        mean: of the prompts as they are.
        resampled: of prompts drawn anew, with replacement; the same draws in every estimate of a sweep, so that what
            makes a prompt slow for all settings drops out of their differences.
    """

    mean: float
    resampled: tuple[float, ...] = field(repr=False)

    @property
    def low(self) -> float:
        """The lower end of the 95% interval (percentile bootstrap)."""
        return _quantile(self.resampled, 0.025)

    @property
    def high(self) -> float:
        return _quantile(self.resampled, 0.975)

    def __neg__(self) -> Estimate:
        return Estimate(-self.mean, tuple(-value for value in self.resampled))

    def is_surely_above(self, other: Estimate) -> bool:
        """Whether the 95% interval of the difference lies above 0."""
        return _quantile([a - b for a, b in zip(self.resampled, other.resampled, strict=True)], 0.025) > 0.0


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


@dataclass(frozen=True)
class Point:
    """What one setting was measured to do.

    Attributes:
        setting: which.
        lossless, bound: as SpecStats says.
        speed: tokens a second after the first one.
        speed_up: over decoding without drafts.
        kl, tv: of a token's law to the target's.
        quality: the metric's mean, None without a metric.
        match: share of the lossless answer up to the first difference, None where sampling.
        log_likelihood: nats a token, under the target's own law.
        ttft_ms, itl_ms: milliseconds to the first token, and percentiles 50, 95 and 99 of those between tokens.
        tau, acceptance, draft_share: tokens a verification, accepted of drafted tokens, and the drafter's share of the
            time; the prefill is left out of tau.
        accepted_per_position: share of the verifications that accepted drafted token i.
        predicted_speed: from screening.
    """

    setting: Setting
    lossless: bool
    bound: str
    speed: Estimate
    kl: Estimate
    tv: float = 0.0
    speed_up: float = math.nan
    quality: Estimate | None = None
    match: float | None = None
    log_likelihood: float = math.nan
    ttft_ms: float = math.nan
    itl_ms: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    tau: float = math.nan
    acceptance: float = math.nan
    draft_share: float = math.nan
    accepted_per_position: list[float] = field(default_factory=list)
    predicted_speed: float = math.nan

    @property
    def merit(self) -> Estimate:
        """What is traded for speed, higher is better: the metric, without one the negative KL."""
        return self.quality if self.quality is not None else -self.kl


def estimate(amounts: Sequence[float], weights: Sequence[float]) -> Estimate:
    """sum(amounts) / sum(weights), one of each a prompt."""
    pairs = torch.tensor([list(amounts), list(weights)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(pairs.shape[1], (_RESAMPLES, pairs.shape[1]), generator=generator)
    means, resampled = (sums[0] / sums[1] for sums in (pairs.sum(dim=1), pairs[:, drawn].sum(dim=-1)))
    return Estimate(float(means), tuple(resampled.tolist()))


def point_of(
    setting: Setting,
    answers: Sequence[Sequence[dict[str, Any]]],
    plain: Sequence[Sequence[dict[str, Any]]],
    score: Callable[[int, list[int]], float] | None,
    predicted_speed: float,
    greedy: bool,
) -> Point:
    """Sum up what a setting did.

    Args:
        setting: which.
        answers: [prompts][repeats] records of `measure.answer` with `log_likelihood` and `match`.
        plain: those of decoding without drafts.
        score: (index of a prompt, answer) -> the metric.
        predicted_speed: from screening.
        greedy: whether texts can be compared token for token.
    """
    every = [record for repeats in answers for record in repeats]
    arrivals = [record["arrivals"] for record in every]
    stats = [record["stats"] for record in every]
    total = {name: sum(one[name] for one in stats) for name in _SUMMED}
    rounds = max(total["num_verifications"] - len(every), 1)
    seconds = sum(total[name] for name in ("draft_time", "verify_time", "host_time"))
    gaps = torch.tensor([1e3 * (b - a) for times in arrivals for a, b in pairwise(times)] or [0.0])
    speed = speed_of(answers)
    qualities = None
    if score is not None:
        qualities = [sum(score(i, record["tokens"]) for record in repeats) for i, repeats in enumerate(answers)]
    weights = [sum(record["stats"]["num_emitted"] for record in repeats) for repeats in answers]
    deepest = max(len(one["accepted_per_position"]) for one in stats)
    p50, p95, p99 = gaps.quantile(torch.tensor([0.5, 0.95, 0.99])).tolist()
    return Point(
        setting=setting,
        lossless=all(one["lossless"] for one in stats),
        bound=stats[0]["bound"],
        speed=speed,
        speed_up=1.0 if setting == WITHOUT_DRAFTS else speed.mean / max(speed_of(plain).mean, 1e-9),
        kl=estimate([sum(record["stats"]["kl"] for record in repeats) for repeats in answers], weights),
        tv=total["tv"] / total["num_emitted"],
        quality=None if qualities is None else estimate(qualities, [float(len(repeats)) for repeats in answers]),
        match=sum(record["match"] for record in every) / len(every) if greedy else None,
        log_likelihood=sum(record["log_likelihood"] for record in every) / total["num_emitted"],
        ttft_ms=1e3 * sum(times[0] for times in arrivals) / len(every),
        itl_ms=(p50, p95, p99),
        tau=(total["num_emitted"] - len(every)) / rounds,
        acceptance=total["num_accepted"] / max(total["num_drafted"], 1),
        draft_share=total["draft_time"] / seconds,
        accepted_per_position=[
            sum(one["accepted_per_position"][i] for one in stats if i < len(one["accepted_per_position"])) / rounds
            for i in range(deepest)
        ],
        predicted_speed=predicted_speed,
    )


def speed_of(answers: Sequence[Sequence[dict[str, Any]]]) -> Estimate:
    """Tokens a second after the first one."""
    tokens = [float(sum(len(record["tokens"]) - 1 for record in repeats)) for repeats in answers]
    seconds = [sum(record["arrivals"][-1] - record["arrivals"][0] for record in repeats) for repeats in answers]
    return estimate(tokens, [max(time, 1e-9) for time in seconds])
