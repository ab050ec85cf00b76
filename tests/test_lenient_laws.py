"""The lenient rules emit the law that their formulas say: by exact enumeration over two rounds, and by counting."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from laws import (
    EXACT,
    LENIENT_RULES,
    Language,
    Text,
    chain_drafter,
    chi_square_p_value,
    constant_language,
    emitted_law,
    emitted_texts,
    enumerate_worlds,
    greedy_drafter,
    random_language,
    verification,
)

from hf_specdec.lenient import Ensemble, Lenience, Margin, Mentored, TopK, Typical
from hf_specdec.verification import Noise

CPU = torch.device("cpu")
Law = tuple[float, ...]


# The formulas once more, in plain numbers


@functools.cache
def by_hand(rule, p: Law, q: Law) -> tuple[list[float], list[float]]:
    """The probability that a token is drafted and accepted, and the law after a rejection."""
    tokens = range(len(p))
    if isinstance(rule, Lenience):
        kept = [min(q[x], p[x] / rule.l) for x in tokens]
        return kept, normalised([max(p[x] - q[x], 0.0) for x in tokens])
    if isinstance(rule, Ensemble):
        ratios = [1.0 - rule.weight + rule.weight * p[x] / q[x] if q[x] > 0.0 and p[x] > 0.0 else 0.0 for x in tokens]
        kept = [q[x] * min(1.0, ratios[x]) for x in tokens]
        return kept, normalised([max(p[x] - q[x], 0.0) for x in tokens])
    if isinstance(rule, Mentored):
        h, cap = clipped_by_bisection(p, q, rule.max_kl)
        kept = [min(q[x], cap * p[x]) for x in tokens]
        return kept, normalised([h[x] - kept[x] for x in tokens])
    if isinstance(rule, Typical):
        entropy = -sum(x * math.log(x) for x in p if x > 0.0)
        inside = [p[x] > min(rule.epsilon, rule.delta * math.exp(-entropy)) for x in tokens]
    elif isinstance(rule, TopK):
        ranks = sorted(tokens, key=lambda x: (-p[x], x))
        inside = [x in ranks[: rule.k] and p[x] > 0.0 for x in tokens]
    else:
        assert isinstance(rule, Margin)
        inside = [p[x] == max(p) or p[x] > rule.ratio * max(p) for x in tokens]
    kept = [q[x] if inside[x] else 0.0 for x in tokens]
    return kept, normalised([p[x] - min(p[x], kept[x]) for x in tokens])


def normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0.0 else weights


def clipped_by_bisection(p: Law, q: Law, max_kl: float) -> tuple[list[float], float]:
    """(h, a): h = clip(q, b p, a p) with the largest a that max_kl allows, b such that h sums to 1."""

    def clipped(a: float) -> list[float]:
        low, high = 0.0, 1.0
        for _ in range(100):
            b = 0.5 * (low + high)
            total = sum(min(max(y, b * x), a * x) for x, y in zip(p, q, strict=True))
            low, high = (b, high) if total < 1.0 else (low, b)
        return [min(max(y, low * x), a * x) for x, y in zip(p, q, strict=True)]

    def kl(h: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(h, p, strict=True) if x > 0.0)

    low, high = 1.0, max(y / x for x, y in zip(p, q, strict=True) if x > 0.0)
    if high <= 1.0 or kl(clipped(high)) <= max_kl:
        return clipped(max(low, high)), max(low, high)
    for _ in range(100):
        a = 0.5 * (low + high)
        low, high = (a, high) if kl(clipped(a)) <= max_kl else (low, a)
    return clipped(low), low


# Drafters, each with its law over the whole vocabulary in plain numbers


def softmax(scores: torch.Tensor) -> Law:
    return tuple(scores.double().softmax(dim=-1).tolist())


def over_candidates(q: Language, ids: Callable[[Text], list[int]]) -> Callable[[Text], Law]:
    def law(text: Text) -> Law:
        scores = q(text)
        kept = torch.full_like(scores, -torch.inf)
        kept[ids(text)] = scores[ids(text)]
        return softmax(kept)

    return law


def point(law: Law) -> Law:
    return tuple(float(x == law.index(max(law))) for x in range(len(law)))


def some_candidates(text: Text) -> list[int]:
    return [(x + sum(text) + len(text)) % 3 for x in range(2)]


def goes_on(text: Text) -> bool:
    return (3 * sum(text) + len(text)) % 4 != 1


def drafter_of(kind: str, q: Language, num_slots: int):
    """(propose, (text, slot) -> the law of the token that is drafted there, None where none is)."""
    whole = lambda text: softmax(q(text))  # noqa: E731
    if kind == "sampled":
        return chain_drafter(q, num_slots), lambda text, slot: whole(text)
    if kind == "computed":
        return greedy_drafter(q, num_slots), lambda text, slot: point(whole(text))
    if kind == "some computed":
        propose = chain_drafter(q, num_slots, one_hot=range(0, num_slots, 2))
        return propose, lambda text, slot: whole(text) if slot % 2 else point(whole(text))
    never_filtered = lambda text: q(text).nan_to_num(neginf=-3.0)  # noqa: E731
    if kind == "reduced":
        law = over_candidates(never_filtered, lambda text: [2, 1])
        return chain_drafter(never_filtered, num_slots, ids=torch.tensor([2, 1])), lambda text, slot: law(text)
    if kind == "candidates, some computed":
        law = over_candidates(never_filtered, some_candidates)
        propose = chain_drafter(
            never_filtered, num_slots, ids=lambda text: torch.tensor(some_candidates(text)), one_hot=[1]
        )
        return propose, lambda text, slot: point(law(text)) if slot == 1 else law(text)
    assert kind == "ragged"
    propose = chain_drafter(q, num_slots, goes_on=goes_on)
    return propose, lambda text, slot: whole(text) if goes_on(text) else None


KINDS = ["sampled", "computed", "some computed", "reduced", "candidates, some computed", "ragged"]


def expected_law(rule, target: Language, law_of, num_slots: int, num_tokens: int, rounds: int) -> dict[Text, float]:
    """The probability of each text after some rounds, as `emitted_law` gives it."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(rounds):
        after: dict[Text, float] = defaultdict(float)
        for start, weight in law.items():
            if len(start) >= num_tokens:
                after[start] += weight
            else:
                for text, probability in one_round(rule, target, law_of, num_slots, start):
                    after[text[:num_tokens]] += weight * probability
        law = after
    return law


def one_round(rule, target, law_of, num_slots, text, slot=0):
    """Each text that a round may end with, and its probability; `rule` may be a function of the text before a token."""
    p = softmax(target(text))
    q = law_of(text, slot) if slot < num_slots else None
    if q is None:
        yield from ((((*text, x), p[x])) for x in range(len(p)) if p[x] > 0.0)
        return
    kept, residual = by_hand(rule(text) if callable(rule) else rule, p, q)
    for x in range(len(p)):
        if kept[x] > 0.0:
            for ended, probability in one_round(rule, target, law_of, num_slots, (*text, x), slot + 1):
                yield ended, kept[x] * probability
        if residual[x] > 0.0:
            yield (*text, x), (1.0 - sum(kept)) * residual[x]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", LENIENT_RULES, ids=repr)
def test_two_rounds_emit_exactly_the_law_of_the_formula(rule, kind, num_slots):
    target, q = random_language(3, 10 * num_slots), random_language(3, 10 * num_slots + 1)
    propose, law_of = drafter_of(kind, q, num_slots)
    num_tokens = min(2 * num_slots + 2, 6)
    found = emitted_law(target, propose, rule, num_tokens)
    expected = expected_law(rule, target, law_of, num_slots, num_tokens, rounds=2)
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert max(abs(found.get(text, 0.0) - expected.get(text, 0.0)) for text in {*found, *expected}) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", LENIENT_RULES, ids=repr)
def test_the_measured_distances_are_those_of_the_emitted_law(rule, kind):
    """The first token's law, enumerated without looking at the measurement, against the target's."""
    for seed in range(4):
        target, q = random_language(3, seed), random_language(3, 50 + seed)
        propose, _ = drafter_of(kind, q, 2)
        h = emitted_law(target, propose, rule, num_tokens=1)
        p = dict(enumerate(softmax(target(()))))
        tv = 0.5 * sum(abs(h.get((x,), 0.0) - p[x]) for x in p)
        kl = sum(h[(x,)] * math.log(h[(x,)] / p[x]) for x in p if h.get((x,), 0.0) > 0.0)
        verdict, _, _ = enumerate_worlds(
            lambda rows, noise, t=target, d=propose: verification(t, d, rule, [()] * len(rows), noise), 1
        )
        assert verdict.tv[:, 0].tolist() == pytest.approx([tv] * len(verdict.tv), abs=EXACT)
        assert verdict.kl[:, 0].tolist() == pytest.approx([kl] * len(verdict.kl), abs=EXACT)


@pytest.mark.parametrize("rule", LENIENT_RULES, ids=repr)
def test_the_measured_kl_of_a_text_is_the_sum_over_its_tokens(rule):
    """The chain rule: KL(law of a round's text || target's) = E[sum of the KL of the emitted tokens]."""
    target, q = random_language(3, 7), random_language(3, 8)
    verdict, _, weights = enumerate_worlds(
        lambda rows, noise: verification(target, chain_drafter(q, 2), rule, [()] * len(rows), noise), 1
    )
    reached = torch.arange(3) <= verdict.num_accepted[:, None]
    measured = float((torch.where(reached, verdict.kl, 0.0).sum(dim=1) * weights).sum())
    law = emitted_law(target, chain_drafter(q, 2), rule, num_tokens=3, rounds=1)
    # Shorter texts go on as the target would.
    total = defaultdict(float)
    for text, probability in law.items():
        for whole, rest in continuations(target, text, 3):
            total[whole] += probability * rest
    kl = sum(x * math.log(x / probability_of(target, text)) for text, x in total.items() if x > 1e-300)
    assert kl == pytest.approx(measured, abs=1e-10)


def continuations(target: Language, text: Text, num_tokens: int):
    if len(text) == num_tokens:
        yield text, 1.0
        return
    for x, p in enumerate(softmax(target(text))):
        if p > 0.0:
            for whole, rest in continuations(target, (*text, x), num_tokens):
                yield whole, p * rest


def probability_of(target: Language, text: Text) -> float:
    return math.prod(softmax(target(text[:i]))[text[i]] for i in range(len(text)))


def test_control_another_residual_is_found_out():
    target, q = constant_language(0.5, 0.3, 0.2), constant_language(0.1, 0.2, 0.7)
    rule = Lenience(0.8)

    class PapersResidual(Lenience):
        def measures(self, p, q):
            return self.kept(p, q), (p - self.l * q).clamp_min(0.0)

    propose, law_of = drafter_of("sampled", q, 1)
    expected = expected_law(rule, target, law_of, 1, 1, rounds=1)
    wrong = emitted_law(target, propose, PapersResidual(0.8), 1)
    assert max(abs(wrong[text] - expected[text]) for text in expected) > 1e-3


def test_control_a_lenient_law_is_not_the_targets():
    target, q = random_language(3, 0), random_language(3, 1)
    for rule in LENIENT_RULES:
        law = emitted_law(target, chain_drafter(q, 2), rule, num_tokens=3, rounds=3)
        assert max(abs(x - probability_of(target, text)) for text, x in law.items()) > 1e-4


@pytest.mark.parametrize("rule", LENIENT_RULES, ids=repr)
def test_redrafting_with_real_noise_emits_that_law(rule):
    target, q = random_language(3, 5, dtype=torch.float32), random_language(3, 6, dtype=torch.float32)
    propose, law_of = drafter_of("sampled", q, 2)
    expected = expected_law(rule, target, law_of, 2, 3, rounds=3)
    probabilities = torch.zeros(27, dtype=torch.float64)
    for text, probability in expected.items():
        probabilities[9 * text[0] + 3 * text[1] + text[2]] = probability
    texts = emitted_texts(target, propose, rule, Noise.from_seed(2024, 20_000, CPU), 3)
    numbers = (texts * torch.tensor([9, 3, 1])).sum(dim=1)
    assert chi_square_p_value(numbers, probabilities) > 1e-6
