"""The sampling rules emit the target's law: by exact enumeration over two rounds, and by counting with real noise.

Every check also meets controls that it must reject (test_laws_controls.py), so that a blind one is found out.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from laws import (
    EXACT,
    EnumeratedNoise,
    Language,
    Propose,
    Rule,
    Text,
    chain_drafter,
    chi_square_p_value,
    constant_language,
    emitted_law,
    emitted_texts,
    enumerate_worlds,
    expected_accepted,
    greedy_drafter,
    law_error,
    random_language,
    tabulate,
    text_probabilities,
)

from hf_specdec.verification import (
    DRAFT,
    TARGET,
    Draft,
    Noise,
    RoundNoise,
    Sampled,
    verify,
)

CPU = torch.device("cpu")
SAMPLING_RULES = ["rejection", "block"]
SURELY_WRONG = 1e-6
"""A p-value below which a law is rejected; all seeds are fixed, so a check that passes once passes always."""


def has_the_targets_law(target: Language, propose: Propose, rule: Rule, num_tokens: int) -> bool:
    law = emitted_law(target, propose, rule, num_tokens)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return law_error(target, law, num_tokens) < EXACT


def looks_like_the_targets_law(
    target: Language,
    propose: Propose,
    rule: Rule,
    num_tokens: int = 2,
    round_noise: Callable[..., RoundNoise] = RoundNoise,
    num_rows: int = 20_000,
) -> bool:
    noise = Noise.from_seed(2024, num_rows, CPU)
    texts = emitted_texts(target, propose, rule, noise, num_tokens, round_noise)
    return chi_square_p_value(numbers(texts, target), text_probabilities(target, num_tokens)) > SURELY_WRONG


def numbers(texts: torch.Tensor, target: Language) -> torch.Tensor:
    place_values = target(()).numel() ** torch.arange(texts.shape[1] - 1, -1, -1)
    return (texts * place_values).sum(dim=1)


# Drafters of every kind of law


def _full_law(q: Language, vocab_size: int, num_slots: int) -> Propose:
    return chain_drafter(q, num_slots)


def _law_with_its_normaliser(q: Language, vocab_size: int, num_slots: int) -> Propose:
    drafter = chain_drafter(q, num_slots)

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        draft = drafter(texts, noise)
        return replace(draft, law=replace(draft.law, lse=draft.law.logits.logsumexp(dim=-1)))

    return propose


def _reduced_vocabulary(q: Language, vocab_size: int, num_slots: int) -> Propose:
    ids = torch.arange(vocab_size - 1, 0, -1)  # without token 0, in another order than the target's
    return chain_drafter(_never_filtered(q), num_slots, ids=ids)


def _candidates_that_differ_by_slot(q: Language, vocab_size: int, num_slots: int) -> Propose:
    def candidates(text: Text) -> torch.Tensor:
        return (torch.arange(max(1, vocab_size - 1)) + sum(text) + len(text)) % vocab_size

    return chain_drafter(_never_filtered(q), num_slots, ids=candidates)


def _some_slots_computed(q: Language, vocab_size: int, num_slots: int) -> Propose:
    return chain_drafter(q, num_slots, one_hot=range(0, num_slots, 2))


def _some_candidates_computed(q: Language, vocab_size: int, num_slots: int) -> Propose:
    ids = torch.arange(vocab_size - 1, 0, -1)
    return chain_drafter(_never_filtered(q), num_slots, ids=ids, one_hot=range(1, num_slots, 2))


def _all_computed(q: Language, vocab_size: int, num_slots: int) -> Propose:
    return greedy_drafter(q, num_slots)


def _length_decided_by_the_text(q: Language, vocab_size: int, num_slots: int) -> Propose:
    return chain_drafter(q, num_slots, goes_on=_goes_on)


def _computed_to_a_length_decided_by_the_text(q: Language, vocab_size: int, num_slots: int) -> Propose:
    return greedy_drafter(q, num_slots, goes_on=_goes_on)


def _goes_on(text: Text) -> bool:
    return (3 * sum(text) + len(text)) % 4 != 1  # goes on from the empty text, stops at length 1 after token 0


def _never_filtered(q: Language) -> Language:
    return lambda text: q(text).nan_to_num(neginf=-3.0)


DRAFTERS = [
    _full_law,
    _law_with_its_normaliser,
    _reduced_vocabulary,
    _candidates_that_differ_by_slot,
    _some_slots_computed,
    _some_candidates_computed,
    _all_computed,
    _length_decided_by_the_text,
    _computed_to_a_length_decided_by_the_text,
]


# Exact enumeration


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [2, 3, 4])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.__name__.strip("_"))
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_two_rounds_emit_exactly_the_targets_law(rule, drafter, vocab_size, num_slots):
    # Two rounds emit up to 2 (num_slots + 1) tokens; 4 tokens x 3 slots are cut earlier, to be affordable.
    num_tokens = 4 if vocab_size**num_slots == 64 else 2 * num_slots + 2
    for seed in range(2):
        target = random_language(vocab_size, seed)
        propose = drafter(random_language(vocab_size, 100 + seed), vocab_size, num_slots)
        assert has_the_targets_law(target, propose, rule, num_tokens)


def test_lengths_of_every_kind_occur_in_the_enumeration():
    found = set()
    propose = _length_decided_by_the_text(random_language(3, 100), 3, 3)
    for text in [(), (0,), (1,), (2,), (0, 1), (2, 2)]:

        def run(rows: torch.Tensor, noise: EnumeratedNoise, text: Text = text) -> Draft:
            return propose([text] * len(rows), noise)

        found |= set(enumerate_worlds(run, 1)[0].lengths.tolist())
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_plain_step_emits_exactly_the_targets_law(rule):
    target = random_language(3, 0)
    assert has_the_targets_law(target, lambda texts, noise: Draft.empty(len(texts), CPU), rule, num_tokens=2)
    assert has_the_targets_law(target, chain_drafter(target, 2, goes_on=lambda text: False), rule, num_tokens=2)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_three_rounds_emit_exactly_the_targets_law(rule):
    target, q = random_language(2, 3), random_language(2, 4)
    law = emitted_law(target, chain_drafter(q, 2, goes_on=_goes_on), rule, num_tokens=9, rounds=3)
    assert law_error(target, law, num_tokens=9) < EXACT


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_drafter_that_is_the_target_has_every_token_accepted(rule):
    target = random_language(4, 5)
    assert expected_accepted(target, chain_drafter(target, 3), rule) == pytest.approx(3.0, abs=EXACT)
    assert has_the_targets_law(target, chain_drafter(target, 3), rule, num_tokens=6)


def _right_to_left(q_last: Language, q_first: Language) -> Propose:
    """Draws slot 1 before slot 0, as diffusion drafters may: then slot 1 is fixed when slot 0 is judged."""

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        last = noise.choose(DRAFT, tabulate(q_last, texts, torch.empty(len(texts), 0)).unsqueeze(1), 1)
        logits = tabulate(q_first, texts, last).unsqueeze(1)
        first = noise.choose(DRAFT, logits, 0)
        one_hot = torch.tensor([False, True]).expand(len(texts), 2)
        law = Sampled(torch.cat([logits, torch.full_like(logits, torch.nan)], dim=1), one_hot=one_hot)
        return Draft(torch.cat([first, last], dim=1), torch.full((len(texts),), 2), law)

    return propose


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_token_drawn_before_its_left_neighbour_counts_as_computed(rule):
    target = random_language(3, 0)
    propose = _right_to_left(random_language(3, 1), random_language(3, 2))
    assert has_the_targets_law(target, propose, rule, num_tokens=6)


@pytest.mark.parametrize("propose", [_all_computed, _full_law, _length_decided_by_the_text])
def test_match_emits_exactly_the_targets_law(propose):
    target = random_language(3, 0)
    assert has_the_targets_law(target, propose(random_language(3, 1), 3, 2), "match", num_tokens=6)


# Acceptance


@pytest.mark.parametrize("seed", range(20))
def test_block_expects_at_least_as_many_accepted_tokens_as_rejection(seed):
    vocab_size, num_slots = 2 + seed % 3, 2 + seed % 2
    target, q = random_language(vocab_size, seed), random_language(vocab_size, 100 + seed)
    for propose in (chain_drafter(q, num_slots), chain_drafter(q, num_slots, goes_on=_goes_on)):
        by_block = expected_accepted(target, propose, "block")
        assert by_block >= expected_accepted(target, propose, "rejection") - EXACT


def test_block_accepts_more_in_the_papers_example():
    # Sun et al. 2024, section 2: two drafted tokens, p = (1/3, 2/3), q = (2/3, 1/3).
    target, propose = constant_language(1 / 3, 2 / 3), chain_drafter(constant_language(2 / 3, 1 / 3), 2)
    assert expected_accepted(target, propose, "rejection") == pytest.approx(10 / 9, abs=EXACT)
    assert expected_accepted(target, propose, "block") == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_one_slot_is_accepted_with_the_overlap_of_the_two_laws(rule):
    target, q = constant_language(0.5, 0.3, 0.2), constant_language(0.1, 0.2, 0.7)
    assert expected_accepted(target, chain_drafter(q, 1), rule) == pytest.approx(0.1 + 0.2 + 0.2, abs=EXACT)
    assert expected_accepted(target, greedy_drafter(q, 1), rule) == pytest.approx(0.2, abs=EXACT)


def test_coupled_drafts_are_accepted_as_often_as_the_coupling_bound_says():
    generator = torch.Generator().manual_seed(0)
    num_rows, num_draws, vocab_size = 64, 4000, 6
    scores = (2.0 * torch.randn(2, num_rows, 1, vocab_size, generator=generator)).expand(-1, -1, num_draws, -1)
    noise = RoundNoise(Noise.from_seed(1, num_rows, CPU), torch.zeros(num_rows, dtype=torch.long), 0)
    agree = (noise.choose(TARGET, scores[0]) == noise.choose(TARGET, scores[1])).double().mean(dim=1)
    p, q = scores[:, :, 0].double().softmax(dim=-1)
    distance = 0.5 * (p - q).abs().sum(dim=-1)
    deviation = (0.25 / num_draws) ** 0.5
    assert bool((agree >= (1.0 - distance) / (1.0 + distance) - 4.5 * deviation).all())
    assert float(agree.mean()) > float((p * q).sum(dim=-1).mean()) + 0.1  # independent draws agree far less


def test_match_accepts_a_computed_token_with_the_targets_probability():
    target, q = constant_language(0.5, 0.3, 0.2), constant_language(0.2, 0.7, 0.1)
    assert expected_accepted(target, greedy_drafter(q, 1), "match") == pytest.approx(0.3, abs=EXACT)


# Real noise


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.__name__.strip("_"))
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_redrafting_with_real_noise_emits_the_targets_law(rule, drafter):
    target = random_language(3, 5, dtype=torch.float32)
    propose = drafter(random_language(3, 6, dtype=torch.float32), 3, 2)
    assert looks_like_the_targets_law(target, propose, rule, num_tokens=3)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_coins_come_up_as_often_as_the_overlap_of_the_two_laws(rule):
    # Not a hard-coded coin: far from p, the rate of acceptance must be the sum of min(p, q).
    target = constant_language(0.9, 0.05, 0.05, dtype=torch.float32)
    q = constant_language(0.1, 0.2, 0.7, dtype=torch.float32)
    num_rows = 20_000
    noise = RoundNoise(Noise.from_seed(3, num_rows, CPU), torch.zeros(num_rows, dtype=torch.long), 0)
    draft = chain_drafter(q, 1)([()] * num_rows, noise)
    scores = target(()).expand(num_rows, 2, 3)
    accepted = verify(draft, scores, rule, noise).num_accepted.double().mean()
    assert abs(float(accepted) - 0.2) < 4.0 * (0.2 * 0.8 / num_rows) ** 0.5
