"""Whatever the effort, the order and the mode of a diffusion draft, the emitted text has the target's law.

By exact enumeration over two rounds on toy drafters; the controls declare every token's own softmax, or let the order
look at what was drawn, and must fail.
"""

import itertools

import pytest
import torch
from diffusion_toys import diffusion_drafter, random_canvas, repeats_less
from laws import EXACT, emitted_law, expected_accepted, law_error, random_language

from hf_specdec.drafters.diffusion.reveal import ORDERS, by_confidence, by_entropy, left_to_right, own_law_holds

RULES = ["rejection", "block"]
SLOTS, VOCAB, TOKENS = 3, 3, 4
CASES = [
    *itertools.product(ORDERS, (1, 2, 3), (False,)),
    *itertools.product(("confidence", "left_to_right"), (1, 2, 3), (True,)),
]


def error(rule: str, *args, seed: int = 0, rounds: int = 1, num_tokens: int = TOKENS, **kwargs) -> float:
    target = random_language(VOCAB, seed=100 + seed)
    propose = diffusion_drafter(random_canvas(VOCAB, SLOTS, seed), SLOTS, *args, **kwargs)
    law = emitted_law(target, propose, rule, num_tokens, rounds)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return law_error(target, law, num_tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("order", "effort", "resample"), CASES)
def test_every_schedule_is_exact(order, effort, resample, rule):
    for seed in range(4):
        assert error(rule, effort, order, resample=resample, seed=seed) < EXACT
    assert error(rule, effort, order, resample=resample, sampled=False) < EXACT
    assert error(rule, effort, order, resample=resample, declared="one-hot") < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ORDERS)
def test_two_rounds_are_exact(order, rule):
    assert error(rule, 2, order, rounds=2) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("resample", [False, True])
def test_processors_that_read_the_draft_keep_it_exact(order, rule, resample):
    for effort in (1, 2, 3):
        assert error(rule, effort, order, process=repeats_less, resample=resample, seed=5) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_one_after_another_are_exact(order, rule):
    for stages in ((0, 1, 1), (0, 0, 1)):
        assert error(rule, 2, order, stages=stages, seed=3) < EXACT
        assert error(rule, 2, order, stages=stages, seed=3, resample=True) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ["confidence", "entropy"])
@pytest.mark.parametrize("effort", [2, 3])
def test_each_slots_own_softmax_is_a_false_law(order, effort, rule):
    """Negative control: the naive q."""
    assert max(error(rule, effort, order, declared="own laws", seed=seed) for seed in range(3)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_slot_drawn_before_one_on_its_left_is_a_fact(rule):
    """Negative control: right to left, the order that the rule has to catch everywhere."""

    def right_to_left(logits, masked, count):
        return left_to_right(logits.flip(1), masked.flip(1), count).flip(1)

    assert error(rule, 3, right_to_left) < EXACT
    assert error(rule, 3, right_to_left, declared="own laws") > 1e-3


def test_left_to_right_keeps_every_law():
    assert error("rejection", 3, "left_to_right", declared="own laws") < EXACT
    assert error("rejection", 2, "confidence", resample=True, declared="own laws") < EXACT


def test_the_rule_keeps_acceptance_that_one_hot_laws_throw_away():
    target, found = random_language(VOCAB, seed=1, filtered=0.0), {}
    for declared in ("the truth", "one-hot"):
        propose = diffusion_drafter(random_canvas(VOCAB, SLOTS, 2), SLOTS, 2, "confidence", declared=declared)
        found[declared] = expected_accepted(target, propose, "rejection")
    assert found["the truth"] > found["one-hot"] + 0.05


# The orders


def counts(number: int) -> torch.Tensor:
    return torch.tensor([[number]])


def test_own_laws_hold_where_nothing_on_the_left_was_drawn_later():
    drawn_in = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 2], [2, 1, 0, 2]])
    expected = [[True] * 4, [True, False, True, True], [True, False, False, True]]
    assert own_law_holds(drawn_in).tolist() == expected


def test_confidence_takes_the_surest_masked_slots():
    probabilities = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.99, 0.01], [0.2, 0.8]]])
    masked = torch.tensor([[True, True, False, True]])
    assert by_confidence(probabilities.log(), masked, counts(2)).tolist() == [[False, True, False, True]]


def test_entropy_takes_more_where_the_drafter_is_sure():
    sure, torn = [0.9999, 0.0001], [0.5, 0.5]
    masked = torch.ones(1, 4, dtype=torch.bool)
    logits = torch.tensor([[torn, sure, sure, sure]]).log()
    # Three sure slots share next to nothing, and the largest entropy is not counted, so the torn one comes along.
    assert by_entropy(logits, masked, counts(1)).tolist() == [[True] * 4]
    logits = torch.tensor([[torn, sure, torn, torn]]).log()
    assert by_entropy(logits, masked, counts(1)).tolist() == [[True, True, False, False]]
    certain = torch.tensor([[[0.0, -torch.inf]] * 2 + [[0.0, 0.0]] * 2])  # barred ids leave -inf
    assert by_entropy(certain, masked, counts(1)).tolist() == [[True, True, True, False]]


def test_left_to_right_takes_the_first_masked_slots():
    masked = torch.tensor([[False, True, True, True]])
    assert left_to_right(torch.zeros(1, 4, 2), masked, counts(2)).tolist() == [[False, True, True, False]]
