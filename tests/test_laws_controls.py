"""What must not look right: noise, laws and lengths that break a rule, and drafts drawn with the target's own noise."""

from dataclasses import replace

import pytest
import torch
from laws import (
    EnumeratedNoise,
    Language,
    Propose,
    Text,
    chain_drafter,
    chi_square_p_value,
    constant_language,
    emitted_law,
    emitted_texts,
    greedy_drafter,
    random_language,
    text_probabilities,
)
from test_laws import CPU, SAMPLING_RULES, SURELY_WRONG, has_the_targets_law, looks_like_the_targets_law, numbers

from hf_specdec.verification import BONUS, DRAFT, RESIDUAL, RULES, TARGET, Draft, Noise, RoundNoise, Verdict


class PositionKeyed(RoundNoise):
    """Every stream keyed by the absolute position: a token drafted again meets the noise it met before."""

    def _counters(self, stream: int | torch.Tensor, slots: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return super()._counters(TARGET, slots, like)


def test_control_block_with_position_keyed_noise_is_rejected():
    target, q = random_language(3, 5, 0.0, torch.float32), random_language(3, 6, 0.0, torch.float32)
    propose = chain_drafter(q, 2)
    assert looks_like_the_targets_law(target, propose, "block", num_tokens=3)
    assert not looks_like_the_targets_law(target, propose, "block", num_tokens=3, round_noise=PositionKeyed)


class _LengthFromDiscardedDraft:
    """Drafts two tokens, and in the next round stops at once if the slot that was discarded had held token 0.

    The length reads only history, so it is causal, as long as the discarded token says nothing about the next draft.
    """

    def __init__(self, q: Language):
        self.drafter = chain_drafter(q, 2)
        self.last: tuple[list[Text], torch.Tensor] | None = None

    def __call__(self, texts: list[Text], noise: RoundNoise) -> Draft:
        draft = self.drafter(texts, noise)
        lengths = draft.lengths
        if noise.verification > 0:
            before, tokens = self.last
            new = torch.tensor([len(text) - len(old) for text, old in zip(texts, before, strict=True)])
            discarded = (new == 1) & (tokens[:, 1] == 0)
            lengths = lengths.masked_fill(discarded, 0)
        self.last = texts, draft.tokens
        within = torch.arange(2) < lengths[:, None]
        return replace(draft, tokens=draft.tokens.masked_fill(~within, -1), lengths=lengths)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_position_keyed_noise_is_rejected_where_discarded_drafts_decide_the_length(rule):
    # `rejection` alone never looks past the token it rejects, so position-keyed noise shows only in what else did look.
    target = constant_language(0.7, 0.3, dtype=torch.float32)
    q = constant_language(0.3, 0.7, dtype=torch.float32)
    assert looks_like_the_targets_law(target, _LengthFromDiscardedDraft(q), rule)
    assert not looks_like_the_targets_law(target, _LengthFromDiscardedDraft(q), rule, round_noise=PositionKeyed)


def _declared_as_sampled(q: Language, num_slots: int) -> Propose:
    """The most probable tokens, declared as if they had been drawn."""
    drafter = chain_drafter(q, num_slots, one_hot=range(num_slots))

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        draft = drafter(texts, noise)
        return replace(draft, law=replace(draft.law, one_hot=None))

    return propose


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_a_law_that_the_token_was_not_drawn_from_is_rejected(rule):
    p, q = (0.5, 0.3, 0.2), (0.4, 0.35, 0.25)
    target, propose = constant_language(*p), _declared_as_sampled(constant_language(*q), 1)
    law = emitted_law(target, propose, rule, num_tokens=1)
    assert law == pytest.approx({(0,): 1.0})
    assert not has_the_targets_law(target, propose, rule, num_tokens=2)
    assert not looks_like_the_targets_law(target, propose, rule)
    assert has_the_targets_law(target, greedy_drafter(constant_language(*q), 1), rule, num_tokens=2)


def _peeks_at_the_first_token(q: Language) -> Propose:
    """Keeps two tokens if the first is 0 and none otherwise: the length looks at the token it decides on."""
    drafter = chain_drafter(q, 2)

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        draft = drafter(texts, noise)
        kept = draft.tokens[:, :1] == 0
        return replace(draft, tokens=draft.tokens.masked_fill(~kept, -1), lengths=2 * kept[:, 0].long())

    return propose


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_a_length_that_peeks_at_the_token_it_decides_on_is_rejected(rule):
    # The appendix of the DSpark paper: confidences (.8, .9 or 0 by the first token), throughputs (1, .5, .45) give
    # length 2 or 0, and the first token the law (.85, .15) instead of (.7, .3).
    target, q = constant_language(0.7, 0.3), constant_language(0.5, 0.5)
    propose = _peeks_at_the_first_token(q)
    law = emitted_law(target, propose, rule, num_tokens=1)
    if rule == "rejection":
        assert law == pytest.approx({(0,): 0.85, (1,): 0.15})
    assert not has_the_targets_law(target, propose, rule, num_tokens=2)
    assert not looks_like_the_targets_law(target, propose, rule)


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_a_length_that_peeks_is_harmless_under_match(rule):
    propose = _peeks_at_the_first_token(constant_language(0.5, 0.5))
    assert has_the_targets_law(constant_language(0.7, 0.3), propose, rule, num_tokens=4)


class _TailsFrom:
    """Passes everything on, but the coins from a slot on come up tails."""

    def __init__(self, noise: RoundNoise, lengths: torch.Tensor):
        self.choose = noise.choose
        self.lengths = lengths
        self.noise = noise

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        cut = torch.arange(p.shape[1]) >= self.lengths[:, None]
        return self.noise.accepts(p.masked_fill(cut, 0.0), q)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_a_residual_at_a_causal_cut_is_rejected(rule):
    target, q = random_language(3, 0, 0.0), random_language(3, 1, 0.0)

    def cut_by_tails(draft: Draft, scores: torch.Tensor, noise: RoundNoise) -> Verdict:
        return RULES[rule](draft, scores, _TailsFrom(noise, torch.ones_like(draft.lengths)))

    def cut(draft: Draft, scores: torch.Tensor, noise: RoundNoise) -> Verdict:
        kept = torch.arange(draft.num_slots) < 1
        shorter = replace(draft, tokens=draft.tokens.masked_fill(~kept, -1), lengths=torch.ones_like(draft.lengths))
        return RULES[rule](shorter, scores, noise)

    assert has_the_targets_law(target, chain_drafter(q, 2), cut, num_tokens=4)
    assert not has_the_targets_law(target, chain_drafter(q, 2), cut_by_tails, num_tokens=4)


class ResidualFromDraftNoise(RoundNoise):
    """Draws the residual with the noise that the first drafted token was drawn with."""

    def choose(self, stream: int | torch.Tensor, scores: torch.Tensor, slots: int | torch.Tensor = 0) -> torch.Tensor:
        if isinstance(stream, torch.Tensor):
            stream = torch.where(stream == RESIDUAL, DRAFT, stream)
        return super().choose(stream, scores, slots)


class BonusFromDraftNoise(RoundNoise):
    """Draws the bonus token with the noise that the first drafted token was drawn with."""

    def choose(self, stream: int | torch.Tensor, scores: torch.Tensor, slots: int | torch.Tensor = 0) -> torch.Tensor:
        if isinstance(stream, torch.Tensor):
            stream = torch.where(stream == BONUS, DRAFT, stream)
        return super().choose(stream, scores, slots)


@pytest.mark.parametrize("reuse", [ResidualFromDraftNoise, BonusFromDraftNoise])
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_draft_noise_in_the_last_draw_is_rejected(rule, reuse):
    target = constant_language(0.4, 0.4, 0.1, 0.1, dtype=torch.float32)  # the residual holds tokens 0 and 1
    q = constant_language(0.05, 0.3, 0.3, 0.35, dtype=torch.float32)
    propose = chain_drafter(q, 1)
    assert looks_like_the_targets_law(target, propose, rule)
    assert not looks_like_the_targets_law(target, propose, rule, round_noise=reuse)


def test_control_the_enumeration_refuses_noise_that_is_read_twice():
    def residual_from_the_draft_stream(draft: Draft, scores: torch.Tensor, noise: EnumeratedNoise) -> Verdict:
        noise.choose(DRAFT, scores[:, :1], 0)
        raise AssertionError("not reached")

    with pytest.raises(AssertionError, match="read twice"):
        emitted_law(random_language(2, 0), chain_drafter(random_language(2, 1), 1), residual_from_the_draft_stream, 2)


def _drawn_with_the_targets_noise(q: Language, num_slots: int, declared: bool) -> Propose:
    drafter = chain_drafter(q, num_slots, stream=TARGET)

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        draft = drafter(texts, noise)
        return replace(draft, law=replace(draft.law, shared_noise=declared))

    return propose


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_drafts_drawn_with_the_targets_noise_are_refused(rule):
    propose = _drawn_with_the_targets_noise(random_language(3, 1, dtype=torch.float32), 2, declared=True)
    with pytest.raises(ValueError, match="target's own noise"):
        emitted_texts(random_language(3, 0, dtype=torch.float32), propose, rule, Noise.from_seed(0, 4, CPU), 2)


def test_control_undeclared_drafts_from_the_targets_noise_are_rejected_under_block():
    target, q = random_language(3, 5, 0.0, torch.float32), random_language(3, 6, 0.0, torch.float32)
    propose = _drawn_with_the_targets_noise(q, 2, declared=False)
    assert not looks_like_the_targets_law(target, propose, "block", num_tokens=3)


@pytest.mark.parametrize("shares_noise", [True, False])
def test_plain_text_and_drafted_text_share_one_law_under_coupled(shares_noise):
    target, q = random_language(3, 5, dtype=torch.float32), random_language(3, 6, dtype=torch.float32)
    propose = _drawn_with_the_targets_noise(q, 2, declared=True) if shares_noise else greedy_drafter(q, 2)
    noise = Noise.from_seed(2024, 20_000, CPU)
    texts = emitted_texts(target, propose, "coupled", noise, 3)
    plain = emitted_texts(target, lambda texts, noise: Draft.empty(len(texts), CPU), "match", noise, 3)
    assert torch.equal(texts, plain)
    assert chi_square_p_value(numbers(texts, target), text_probabilities(target, 3)) > SURELY_WRONG
