"""Lengths by confidence keep the target's law under `rejection` and `block`: exact enumeration, one row and two.

The controls weigh a token against what comes after it, or look at the token itself; their error is known exactly.
"""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from laws import (
    EXACT,
    EnumeratedNoise,
    Language,
    Propose,
    Text,
    chain_drafter,
    constant_language,
    emitted_law,
    enumerate_worlds,
    random_language,
    tabulate,
)
from test_laws import SAMPLING_RULES, has_the_targets_law

from hf_specdec.scheduling.confidence import admissions, best_lengths, prefix_lengths, threshold_lengths
from hf_specdec.verification import Draft, verify

Lengths = Callable[[Sequence[Sequence[float]]], list[int]]  # confidence of each row's slots -> lengths
Confidence = Callable[[Text], float]  # of the token after a text
SMOOTH, JAGGED = (1.0, 1.3, 1.62, 1.96, 2.3, 2.7, 3.1), (1.0, 1.05, 1.6, 1.62, 1.63, 2.4, 2.42)


def in_total(table: Sequence[float]) -> Callable[[Sequence[int]], float]:
    return lambda lengths: table[sum(lengths)]


def padded(table: Sequence[float]) -> Callable[[Sequence[int]], float]:
    return lambda lengths: table[max(lengths)]


def overlap(target: Language, q: Language) -> Confidence:
    """The true chance that the token after a text is accepted."""
    return lambda text: float(torch.minimum(target(text).softmax(-1), q(text).softmax(-1)).sum())


def coarse(seed: int) -> Confidence:
    """Confidences of few values, so that ties are common."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[Text, float] = {}

    def confidence(text: Text) -> float:
        if text not in drawn:
            drawn[text] = (0.0, 0.5, 0.7, 0.7, 0.9)[int(torch.randint(5, (), generator=generator))]
        return drawn[text]

    return confidence


def confidences(confidence: Confidence, texts: list[Text], tokens: torch.Tensor) -> torch.Tensor:
    """[R, n] of each slot, from the text before it."""
    value = lambda text: torch.tensor(confidence(text), dtype=torch.float64)  # noqa: E731
    return torch.stack([tabulate(value, texts, tokens[:, :k]) for k in range(tokens.shape[1])], dim=1)


def scheduled(q: Language, confidence: Confidence, lengths: Lengths, num_slots: int = 3) -> Propose:
    """Draws all slots and keeps those that the rule keeps."""
    drafter = chain_drafter(q, num_slots)

    def propose(texts, noise) -> Draft:
        draft = drafter(texts, noise)
        rows = confidences(confidence, texts, draft.tokens).tolist()
        found = torch.tensor([lengths([row])[0] for row in rows])
        return draft.cut(found, int(found.max()))

    return propose


RULES: dict[str, Lengths] = {
    "full block": lambda rows: [len(row) for row in rows],
    "no draft": lambda rows: [0 for row in rows],
    "two tokens": lambda rows: [2 for row in rows],
    "threshold": lambda rows: threshold_lengths(rows, 0.6),
    "high threshold": lambda rows: threshold_lengths(rows, 0.8),
    "algorithm 1, smooth costs": lambda rows: prefix_lengths(rows, in_total(SMOOTH)),
    "algorithm 1, jagged costs": lambda rows: prefix_lengths(rows, in_total(JAGGED)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_one_row_has_exactly_the_targets_law(rule, name):
    for seed in range(2):
        target, q = random_language(3, seed), random_language(3, 100 + seed)
        for confidence in (overlap(target, q), coarse(seed)):
            assert has_the_targets_law(target, scheduled(q, confidence, RULES[name]), rule, num_tokens=4)


def test_every_rule_takes_lengths_that_differ():
    for name in ("threshold", "high threshold", "algorithm 1, smooth costs", "algorithm 1, jagged costs"):
        rows = [[confidence((0,) * k) for k in range(3)] for confidence in map(coarse, range(12))]
        assert len({RULES[name]([row])[0] for row in rows}) > 1, name


# Controls, over the paper's instance: p = (.7, .3), q = (.5, .5), c_1 = .8, c_2 = .9 after token 0 and 0 after token 1

P, Q = constant_language(0.7, 0.3), constant_language(0.5, 0.5)
APPENDIX = (1.0, 1 / 0.5, 1 / 0.45)


def appendix(text: Text) -> float:
    return 0.8 if len(text) % 2 == 0 else 0.9 * (text[-1] == 0)


def first_token(propose: Propose, rule: str = "rejection") -> float:
    """Probability that the first token is 0."""
    law = emitted_law(P, propose, rule, num_tokens=1, rounds=1)
    return law[(0,)]


def test_algorithm_1_keeps_the_law_of_the_papers_instance():
    stops = scheduled(Q, appendix, lambda rows: prefix_lengths(rows, in_total(APPENDIX)), 2)
    assert first_token(stops) == pytest.approx(0.7, abs=EXACT)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_the_best_length_of_all_gives_17_in_20_for_14_in_20(rule):
    best = scheduled(Q, appendix, lambda rows: best_lengths(rows, in_total(APPENDIX)), 2)
    if rule == "rejection":
        assert first_token(best) == pytest.approx(17 / 20, abs=EXACT)
    assert not has_the_targets_law(P, best, rule, num_tokens=2)


def test_control_a_confidence_that_reads_its_own_token_is_off_by_15_in_100():
    drafter = chain_drafter(Q, 1)

    def propose(texts, noise) -> Draft:
        draft = drafter(texts, noise)
        rows = [[0.9 * (token == 0)] for token in draft.tokens[:, 0].tolist()]
        lengths = torch.tensor(threshold_lengths(rows, 0.5))
        return draft.cut(lengths, int(lengths.max()))

    assert first_token(propose) == pytest.approx(0.7 + 0.15, abs=EXACT)


def test_control_the_residual_at_a_cut_is_not_the_targets_law():
    """The token after the cut must come from p; the residual of the dropped slot, (p - q)+, holds token 0 only."""

    def residual_at_the_cut(draft, scores, noise):
        p, q = scores[:, 0].softmax(-1), draft.law.probs(scores.dtype)[:, 0]
        cut = draft.cut(draft.lengths.clamp_max(0), 0)
        return verify(cut, (p - q).clamp_min(0.0).log()[:, None], "rejection", noise)

    law = emitted_law(P, chain_drafter(Q, 1), residual_at_the_cut, num_tokens=1, rounds=1)
    assert law == pytest.approx({(0,): 1.0})


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_under_match_the_best_length_of_all_is_exact(rule):
    best = scheduled(Q, appendix, lambda rows: best_lengths(rows, in_total(APPENDIX)), 2)
    assert has_the_targets_law(P, best, rule, num_tokens=3)


# Two rows that compete


class OfAnotherRow:
    """The noise of a second row of one world: what the first row reads is not read again."""

    def __init__(self, noise: EnumeratedNoise) -> None:
        self.noise, self.accepts = noise, noise.accepts

    def choose(self, stream, scores, slots=0):
        return self.noise.choose(stream, scores, slots + 100)


def joint_error(targets: list[Language], qs: list[Language], sure: list[Confidence], lengths: Lengths, rule: str):
    """Largest error of the joint law of the first three tokens of two rows after one round with common lengths."""
    vocab_size, num_slots, num_tokens = targets[0](()).numel(), 2, 3

    def run(worlds, noise):
        noises, start = (noise, OfAnotherRow(noise)), [()] * len(worlds)
        drafts = [chain_drafter(q, num_slots)(start, n) for q, n in zip(qs, noises, strict=True)]
        found = [confidences(c, start, d.tokens).tolist() for c, d in zip(sure, drafts, strict=True)]
        both = torch.tensor([lengths(rows) for rows in zip(*found, strict=True)]).view(-1, 2)
        verdicts = []
        for i, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
            cut = draft.cut(both[:, i], num_slots)
            scores = [tabulate(target, start, cut.tokens[:, :k]) for k in range(num_slots + 1)]
            verdicts.append(verify(cut, torch.stack(scores, dim=1), rule, noises[i]))
        return torch.stack([verdict.tokens for verdict in verdicts], dim=1)

    tokens, _, weights = enumerate_worlds(run, 1)
    continued: list[dict[Text, torch.Tensor]] = [{}, {}]
    joint = torch.zeros(vocab_size**num_tokens, vocab_size**num_tokens, dtype=torch.float64)
    for pair, weight in zip(tokens.tolist(), weights.tolist(), strict=True):
        texts = [tuple(token for token in row if token >= 0) for row in pair]
        laws = [
            continued[i].setdefault(text, continuation(targets[i], text, num_tokens)) for i, text in enumerate(texts)
        ]
        joint += weight * laws[0][:, None] * laws[1]
    expected = continuation(targets[0], (), num_tokens)[:, None] * continuation(targets[1], (), num_tokens)
    return float((joint - expected).abs().max())


def continuation(target: Language, text: Text, num_tokens: int) -> torch.Tensor:
    """[V ** num_tokens] law of the texts that begin with `text`."""
    probabilities = torch.ones(1, dtype=torch.float64)
    for length in range(num_tokens):
        contexts = list(itertools.product(range(target(()).numel()), repeat=length))
        p = torch.stack([target(context) for context in contexts]).softmax(dim=-1)
        if length < len(text):
            p = torch.zeros_like(p)
            p[:, text[length]] = 1.0
        probabilities = (probabilities[:, None] * p).flatten()
    return probabilities


def first_slots(num_slots: int) -> Lengths:
    """The likeliest slots, as many as past rounds have decided."""

    def lengths(rows):
        steps = admissions(rows, lambda lengths: 1.0 + sum(lengths))
        return list(itertools.islice(steps, num_slots + 1))[-1][0]

    return lengths


BATCH_RULES: dict[str, Lengths] = {
    "algorithm 1, smooth costs": lambda rows: prefix_lengths(rows, in_total(SMOOTH)),
    "algorithm 1, jagged costs": lambda rows: prefix_lengths(rows, in_total(JAGGED)),
    "algorithm 1, columns": lambda rows: prefix_lengths(rows, padded(SMOOTH)),
    "algorithm 1, jagged columns": lambda rows: prefix_lengths(rows, padded((1.0, 1.5, 1.51))),
    "the likeliest slot": first_slots(1),
    "the two likeliest slots": first_slots(2),
    "the three likeliest slots": first_slots(3),
    "threshold": lambda rows: threshold_lengths(rows, 0.6),
}


@pytest.mark.parametrize("name", BATCH_RULES)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_two_rows_have_exactly_the_product_of_their_laws(rule, name):
    for seed in range(6):
        targets = [random_language(2, seed, 0.0), random_language(2, 50 + seed, 0.0)]
        qs = [random_language(2, 100 + seed, 0.0), random_language(2, 150 + seed, 0.0)]
        for sure in (list(map(overlap, targets, qs)), [coarse(seed), coarse(50 + seed)]):
            assert joint_error(targets, qs, sure, BATCH_RULES[name], rule) < EXACT


def test_control_the_best_lengths_of_all_bias_a_batch():
    seconds = in_total((1.0, 1.5, 1.7, 9.0, 9.0))  # one token does not pay, and two may
    best, stops = (lambda rows, rule=rule: rule(rows, seconds) for rule in (best_lengths, prefix_lengths))
    hopeless = lambda text: 0.0  # noqa: E731
    assert joint_error([P, P], [Q, Q], [appendix, hopeless], best, "rejection") > 0.01
    assert joint_error([P, P], [Q, Q], [appendix, hopeless], stops, "rejection") < EXACT
