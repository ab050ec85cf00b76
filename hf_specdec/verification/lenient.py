"""The lenient rules: what each keeps, what it guarantees, where it comes from. lenient_rule.py says how they verify.

As there, p is the target's law, q the draft's, g the kept part of it, r the residual and h the emitted law. Bounds hold
for each token given the text before it; KL in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

import torch

from .clipped_law import clip_levels
from .lenient_rule import LenientRule


@dataclass(frozen=True)
class Lenience(LenientRule):
    """Accept d with probability min(1, p(d) / (l q(d))): Leviathan et al. 2023, appendix.

    g = min(q, p / l) and r = max(p - q, 0), where the paper draws from max(p - l q, 0); this one loses less at the same
    acceptance. Guarantee: h(x) <= p(x) / l for every token, so KL(h || p) <= ln(1 / l) a token, and
    TV(h, p) = TV(p, q) - P(rejection) <= 1 - l.

    Greedy decoding takes d where p(d) > l max p, as Margin(l) does: each token costs at most ln(1 / l) of
    log-probability against the best one.

    Args:
        l: above 0, up to 1, which is lossless.
    """

    name: str = field(default="lenience", init=False, repr=False)
    l: float  # noqa: E741 - the paper's letter

    def __post_init__(self) -> None:
        _check_share("l", self.l)

    def bound(self, greedy: bool) -> str:
        if greedy:
            return f"p(token) >= {self.l:g} max p"
        return f"h <= p / {self.l:g}, KL <= {_rounded_up(-math.log(self.l))}, TV <= {_rounded_up(1.0 - self.l)}"

    def is_lossless(self, greedy: bool) -> bool:
        return self.l == 1.0

    def kept(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.minimum(q, p / self.l)

    def tolerated(self, p: torch.Tensor) -> torch.Tensor:
        return _near_the_best(p, self.l)


@dataclass(frozen=True)
class Mentored(LenientRule):
    """Accept as often as KL(h || p) <= max_kl allows: mentored decoding (V. Tran-Thien, blog).

    h(x) = min(max(q(x), b p(x)), a p(x)) with b <= 1 <= a, what maximises sum min(q, h) under the bound (by its
    Lagrangian): g = min(q, a p) and r = max(b p - q, 0). a is the largest that keeps to the bound, and b makes h sum
    to 1. Guarantee: KL(h || p) <= max_kl a token, so TV(h, p) <= sqrt(max_kl / 2) (Pinsker), and the KL of a text is at
    most its number of tokens times max_kl. Sorts the vocabulary at every slot.

    Args:
        max_kl: nats, at least 0, which is lossless.
    """

    name: str = field(default="mentored", init=False, repr=False)
    max_kl: float
    serves_greedy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not _is_number(self.max_kl) or not 0.0 <= self.max_kl < math.inf:
            raise ValueError(f"`max_kl` is {self.max_kl!r}; give a number of nats, at least 0.")

    def bound(self, greedy: bool) -> str:
        return f"KL <= {self.max_kl:g}, TV <= {_rounded_up(min(1.0, math.sqrt(self.max_kl / 2.0)))}"

    def is_lossless(self, greedy: bool) -> bool:
        return self.max_kl == 0.0

    def kept(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return self.measures(p, q)[0]

    def measures(self, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (level.unsqueeze(-1).to(p.dtype) for level in clip_levels(p.double(), q.double(), self.max_kl))
        return torch.minimum(q, a * p), (b * p - q).clamp_min(0.0)


@dataclass(frozen=True)
class Ensemble(LenientRule):
    """Emit the mixture of both models, h = w p + (1 - w) q: DIVERSED (arXiv:2604.07622) with a fixed weight, and
    `assistant_ensemble_weight` of transformers.

    g = w p + (1 - w) q where p < q and q elsewhere, r = max(p - q, 0). Where the target forbids a token g is 0, unlike
    there, and what the draft gave to such tokens is drawn from r. Guarantee: TV(h, p) <= (1 - w) TV(p, q) <= 1 - w. No
    token's probability and no KL is bounded: p(x) may be small and q(x) large.

    Args:
        weight: w of the target, above 0, up to 1, which is lossless.
    """

    name: str = field(default="ensemble", init=False, repr=False)
    weight: float
    serves_greedy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_share("weight", self.weight)

    def bound(self, greedy: bool) -> str:
        return f"TV <= {_rounded_up(1.0 - self.weight)} TV(p, q)"

    def is_lossless(self, greedy: bool) -> bool:
        return self.weight == 1.0

    def kept(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.where(p > 0.0, torch.minimum(q, self.weight * p + (1.0 - self.weight) * q), p)


class _Tolerance(LenientRule):
    """A rule that accepts the tokens of a set, whatever the draft's law: g = q there and 0 elsewhere."""

    def kept(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.where(self.tolerated(p), q, 0.0)


@dataclass(frozen=True)
class Typical(_Tolerance):
    """Accept d where p(d) > min(epsilon, delta exp(-H(p))): typical acceptance (Medusa, arXiv:2401.10774).

    H is the entropy in nats: the surer the target, the more probable a token has to be. Guarantee: h(x) <= p(x) for
    every token below that threshold; TV(h, p) <= TV(p, q), and no more. Greedy decoding may take any token above it.

    Args:
        epsilon, delta: above 0, up to 1; Medusa's defaults.
    """

    name: str = field(default="typical", init=False, repr=False)
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        _check_share("epsilon", self.epsilon)
        _check_share("delta", self.delta)

    def bound(self, greedy: bool) -> str:
        threshold = f"min({self.epsilon:g}, {self.delta:g} exp(-H(p)))"
        return f"p(token) = max p or > {threshold}" if greedy else f"h <= p where p <= {threshold}"

    def tolerated(self, p: torch.Tensor) -> torch.Tensor:
        entropy = -torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)
        return p > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)


@dataclass(frozen=True)
class TopK(_Tolerance):
    """Accept d where it is one of the k most probable tokens (Stern et al. 2018), lower ids first in a tie.

    Guarantee: h(x) <= p(x) for every other token; TV(h, p) <= TV(p, q), and no more. Greedy decoding may take any of
    the k; k = 1 is lossless there.

    Args:
        k: at least 1.
    """

    name: str = field(default="top_k", init=False, repr=False)
    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise ValueError(f"`k` is {self.k!r}; give an integer of at least 1.")

    def bound(self, greedy: bool) -> str:
        return f"token among the {self.k} best" if greedy else f"h <= p but for the {self.k} best"

    def is_lossless(self, greedy: bool) -> bool:
        return greedy and self.k == 1

    def tolerated(self, p: torch.Tensor) -> torch.Tensor:
        last = p.topk(min(self.k, p.shape[-1]), dim=-1).values[..., -1:]
        above, level = p > last, p == last
        room = self.k - above.sum(dim=-1, keepdim=True)
        return (above | (level & (level.cumsum(dim=-1) <= room))) & (p > 0.0)


@dataclass(frozen=True)
class Margin(_Tolerance):
    """Accept d where it is nearly as probable as the best token, p(d) > ratio max p: relaxed acceptance (TensorRT-LLM
    and vLLM have kin of it, by a difference or beside a top-k).

    Guarantee in greedy decoding: each token costs at most ln(1 / ratio) of log-probability against the best one.
    Sampling: h(x) <= p(x) for every token that is not that near; TV(h, p) <= TV(p, q), and no more.

    Args:
        ratio: above 0, up to 1, where only the best token is near enough: lossless in greedy decoding.
    """

    name: str = field(default="margin", init=False, repr=False)
    ratio: float

    def __post_init__(self) -> None:
        _check_share("ratio", self.ratio)

    def bound(self, greedy: bool) -> str:
        return f"p(token) >= {self.ratio:g} max p" if greedy else f"h <= p where p <= {self.ratio:g} max p"

    def is_lossless(self, greedy: bool) -> bool:
        return greedy and self.ratio == 1.0

    def tolerated(self, p: torch.Tensor) -> torch.Tensor:
        return _near_the_best(p, self.ratio)


RULES_BY_NAME: dict[str, type[LenientRule]] = {
    "lenience": Lenience,
    "mentored": Mentored,
    "typical": Typical,
    "top_k": TopK,
    "margin": Margin,
    "ensemble": Ensemble,
}


def as_rule(value: Any) -> LenientRule | None:
    """The rule that an option `lenience` stands for; a number l is Lenience(l)."""
    if value is None or isinstance(value, LenientRule):
        return value
    if _is_number(value) and 0.0 < value <= 1.0:
        return Lenience(float(value))
    raise ValueError(
        f"`lenience` is {value!r}; give a number above 0, at most 1, which is lossless, a rule of hf_specdec.lenient, "
        "or None."
    )


def rule_from_dict(options: Mapping[str, Any]) -> LenientRule:
    """A rule from its `name` and its parameters, as `dataclasses.asdict` gives them."""
    parameters = dict(options)
    rule = RULES_BY_NAME.get(parameters.pop("name", ""))
    if rule is None:
        raise ValueError(f"`lenience` is {dict(options)!r}; its 'name' must be one of {', '.join(RULES_BY_NAME)}.")
    known = {parameter.name: parameter.default is MISSING for parameter in fields(rule) if parameter.init}
    wrong = [f"has {name!r}" for name in parameters if name not in known]
    wrong += [f"lacks {name!r}" for name, needed in known.items() if needed and name not in parameters]
    if wrong:
        raise ValueError(f"`lenience` {wrong[0]}; the parameters of {rule.__name__} are {', '.join(known)}.")
    return rule(**parameters)


def _near_the_best(p: torch.Tensor, ratio: float) -> torch.Tensor:
    """[..., V] tokens with more than `ratio` of the largest probability, and the first that has it."""
    best = p.argmax(dim=-1, keepdim=True)
    return (p > ratio * p.gather(-1, best)).scatter(-1, best, True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_share(name: str, value: Any) -> None:
    if not _is_number(value) or not 0.0 < value <= 1.0:
        raise ValueError(f"`{name}` is {value!r}; give a number above 0, at most 1.")


def _rounded_up(bound: float) -> str:
    return f"{math.ceil(round(1e4 * bound, 6)) / 1e4:g}"
