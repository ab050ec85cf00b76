"""Every rule on any draft at all: padding, acceptance, ties, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import (
    LENIENT_RULES,
    chain_drafter,
    emitted_texts,
    greedy_drafter,
    random_language,
)

from hf_specdec.lenient import Ensemble, Lenience, Mentored
from hf_specdec.verification import (
    DRAFT,
    RULES,
    Draft,
    Noise,
    OneHot,
    RoundNoise,
    Sampled,
    verify,
)

CPU = torch.device("cpu")
MATCHING_RULES = ["match", "coupled"]
SAMPLING_RULES = ["rejection", "block"]
EVERY_RULE = [*RULES, *LENIENT_RULES]

# Any draft at all, with any scores


LAWS = ["one-hot", "sampled", "with lse", "some one-hot", "reduced", "candidates", "candidates, some one-hot"]


def random_case(
    seed: int,
    batch_size: int,
    num_slots: int,
    vocab_size: int,
    law: str,
    dtype: torch.dtype = torch.float32,
    filtered: float = 0.3,
) -> tuple[Draft, torch.Tensor, RoundNoise]:
    """A draft with ragged lengths, scores and noise; past a row's length, all that may hold garbage holds NaN or -1."""
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        values = 2.0 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        dropped = torch.rand(*shape, generator=generator) < filtered
        dropped[..., 0] = dropped[..., 0] & (torch.rand(shape[:-1], generator=generator) < 0.5)
        dropped[..., 0] &= ~dropped[..., 1:].all(dim=-1)
        return values.masked_fill(dropped, -torch.inf).to(dtype)

    noise = RoundNoise(
        Noise.from_seed(seed, batch_size, CPU), torch.randint(99, (batch_size,), generator=generator), seed % 50
    )
    lengths = torch.randint(num_slots + 1, (batch_size,), generator=generator)
    within = torch.arange(num_slots) < lengths[:, None]
    scores = weights(batch_size, num_slots + 1, vocab_size)
    num_candidates = max(1, vocab_size // 2) if law.startswith(("reduced", "candidates")) else vocab_size
    shape = (batch_size, num_slots, num_candidates)
    logits, ids = weights(*shape), None
    if law == "reduced":
        ids = torch.randperm(vocab_size, generator=generator)[:num_candidates]
    elif law.startswith("candidates"):
        ids = torch.rand(batch_size, num_slots, vocab_size, generator=generator).argsort(dim=-1)[..., :num_candidates]
    tokens = noise.choose(DRAFT, logits)
    tokens = tokens if ids is None else ids.expand(shape).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    one_hot = torch.rand(batch_size, num_slots, generator=generator) < 0.5
    sampled = Sampled(
        logits.masked_fill(~within.unsqueeze(-1), torch.nan),
        ids=ids,
        one_hot=one_hot if law.endswith("some one-hot") else None,
        lse=logits.logsumexp(dim=-1) if law == "with lse" else None,
    )
    draft = Draft(tokens.masked_fill(~within, -1), lengths, OneHot() if law == "one-hot" else sampled)
    reached = torch.arange(num_slots + 1) <= lengths[:, None]
    return draft, scores.masked_fill(~reached.unsqueeze(-1), torch.nan), noise


cases = st.tuples(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 4), st.integers(1, 9), st.sampled_from(LAWS))
rules = st.sampled_from(EVERY_RULE)
dtypes = st.sampled_from([torch.float32, torch.float64])


def row_of(draft: Draft, row: int) -> Draft:
    law = draft.law
    if isinstance(law, Sampled):
        here = slice(row, row + 1)
        law = Sampled(
            law.logits[here],
            ids=law.ids[here] if law.ids is not None and law.ids.dim() == 3 else law.ids,
            one_hot=None if law.one_hot is None else law.one_hot[here],
            lse=None if law.lse is None else law.lse[here],
        )
    return Draft(draft.tokens[row : row + 1], draft.lengths[row : row + 1], law)


@settings(deadline=None, max_examples=300)
@given(cases, rules, dtypes)
def test_a_verdict_holds_the_accepted_tokens_and_one_more(case, rule, dtype):
    draft, scores, noise = random_case(*case, dtype=dtype)
    verdict = verify(draft, scores, rule, noise)
    batch_size, num_slots, vocab_size = len(draft.tokens), draft.num_slots, scores.shape[-1]
    assert verdict.path is None
    assert verdict.tokens.shape == (batch_size, num_slots + 1)
    assert verdict.tokens.dtype == draft.tokens.dtype == verdict.num_accepted.dtype == torch.long
    for row, (num_accepted, tokens) in enumerate(
        zip(verdict.num_accepted.tolist(), verdict.tokens.tolist(), strict=True)
    ):
        assert 0 <= num_accepted <= int(draft.lengths[row])
        assert tokens[:num_accepted] == draft.tokens[row, :num_accepted].tolist()
        assert 0 <= tokens[num_accepted] < vocab_size
        assert tokens[num_accepted + 1 :] == [-1] * (num_slots - num_accepted)
        for i in range(num_accepted + 1):  # a filtered token is neither accepted nor drawn
            assert scores[row, i, tokens[i]] > -torch.inf


@settings(deadline=None, max_examples=150)
@given(cases, rules)
def test_rows_do_not_see_each_other(case, rule):
    draft, scores, noise = random_case(*case)
    together = verify(draft, scores, rule, noise)
    for row in range(len(draft.tokens)):
        here = slice(row, row + 1)
        alone_noise = RoundNoise(Noise(noise.noise.keys[here]), noise.positions[here], noise.verification)
        alone = verify(row_of(draft, row), scores[here], rule, alone_noise)
        assert alone.num_accepted.tolist() == together.num_accepted[here].tolist()
        assert alone.tokens.tolist() == together.tokens[here].tolist()


@settings(deadline=None, max_examples=100)
@given(cases, rules)
def test_a_rule_is_a_pure_function(case, rule):
    draft, scores, noise = random_case(*case)
    tensors = [draft.tokens, draft.lengths, scores, noise.positions, noise.noise.keys]
    if isinstance(draft.law, Sampled):
        tensors += [x for x in (draft.law.logits, draft.law.ids, draft.law.one_hot, draft.law.lse) if x is not None]
    before = [tensor.clone() for tensor in tensors]
    first, second = (verify(draft, scores, rule, noise) for _ in range(2))
    assert bool((first.tokens == second.tokens).all())
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


@settings(deadline=None, max_examples=100)
@given(cases, rules)
def test_what_lies_past_a_rows_length_changes_nothing(case, rule):
    draft, scores, noise = random_case(*case)
    with_garbage = verify(draft, scores, rule, noise)
    law = draft.law
    if isinstance(law, Sampled):
        law = replace(law, logits=law.logits.nan_to_num(nan=1.0, neginf=-torch.inf))
        if law.ids is not None and law.ids.dim() == 3:
            past = torch.arange(draft.num_slots) >= draft.lengths[:, None]
            law = replace(law, ids=torch.where(past.unsqueeze(-1), law.ids.flip(-1), law.ids))
    finite = scores.nan_to_num(nan=0.5, neginf=-torch.inf)
    for tokens in (draft.tokens, draft.tokens.clamp_min(0)):
        clean = verify(Draft(tokens, draft.lengths, law), finite, rule, noise)
        assert torch.equal(clean.tokens, with_garbage.tokens)
        assert torch.equal(clean.num_accepted, with_garbage.num_accepted)


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
@pytest.mark.parametrize("law", LAWS)
def test_rows_without_drafts_take_a_plain_step(rule, law):
    draft, scores, noise = random_case(3, 5, 3, 6, law)
    nothing = Draft(torch.full_like(draft.tokens, -1), torch.zeros_like(draft.lengths), draft.law)
    verdict = verify(nothing, scores, rule, noise)
    assert verdict.num_accepted.tolist() == [0] * 5
    plain = verify(Draft.empty(5, CPU), scores[:, :1], rule, noise)
    assert plain.num_accepted.tolist() == [0] * 5
    assert plain.tokens.shape == (5, 1)
    assert verdict.tokens[:, :1].tolist() == plain.tokens.tolist()
    assert bool((verdict.tokens[:, 1:] == -1).all())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_judged_in_fp32(rule, law, dtype):
    draft, scores, noise = random_case(5, 2000, 3, 8, law)
    scores = scores.to(dtype)
    half, single = verify(draft, scores, rule, noise), verify(draft, scores.float(), rule, noise)
    assert torch.equal(half.tokens, single.tokens)


@pytest.mark.parametrize("rule", [*SAMPLING_RULES, *LENIENT_RULES], ids=str)
def test_a_token_that_the_target_filtered_is_never_accepted(rule):
    num_rows = 500
    scores = torch.tensor([-torch.inf, 0.0, 1.0]).expand(num_rows, 3, 3)
    draft = Draft(torch.zeros(num_rows, 2, dtype=torch.long), torch.full((num_rows,), 2), OneHot())
    noise = RoundNoise(Noise.from_seed(0, num_rows, CPU), torch.zeros(num_rows, dtype=torch.long), 0)
    for law in (OneHot(), Sampled(torch.tensor([5.0, 0.0, 0.0]).expand(num_rows, 2, 3))):
        verdict = verify(replace(draft, law=law), scores, rule, noise)
        assert verdict.num_accepted.tolist() == [0] * num_rows
        assert set(verdict.tokens[:, 0].tolist()) == {1, 2}


@pytest.mark.parametrize("rule", [*SAMPLING_RULES, Lenience(0.5), Mentored(0.1), Ensemble(0.5)], ids=str)
@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_a_drafter_that_is_the_target_has_every_fp32_draft_accepted(rule, vocab_size):
    scores = 3.0 * torch.randn(64, 5, vocab_size, generator=torch.Generator().manual_seed(0))
    noise = RoundNoise(Noise.from_seed(0, 64, CPU), torch.zeros(64, dtype=torch.long), 0)
    tokens = noise.choose(DRAFT, scores[:, :-1])
    draft = Draft(tokens, torch.full((64,), 4), Sampled(scores[:, :-1]))
    assert verify(draft, scores, rule, noise).num_accepted.tolist() == [4] * 64


# Greedy, and what is refused


def test_greedy_decoding_takes_the_lowest_id_of_a_tie():
    scores = torch.zeros(2, 3, 2000)
    scores[:, :, [700, 900]] = 1.0
    draft = Draft(torch.tensor([[700, 900], [900, -1]]), torch.tensor([2, 1]), OneHot())
    verdict = verify(draft, scores, "match", None)
    assert verdict.num_accepted.tolist() == [1, 0]
    assert verdict.tokens.tolist() == [[700, 700, -1], [700, -1, -1]]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_rules_that_cannot_be_exact_are_refused(rule):
    draft, scores, noise = random_case(0, 2, 2, 4, "sampled")
    with pytest.raises(ValueError, match="needs noise"):
        verify(draft, scores, rule, None)
    with pytest.raises(ValueError, match="verifies chains"):
        verify(replace(draft, parents=torch.tensor([-1, -1])), scores, rule, noise)
    with pytest.raises(ValueError, match="biased"):
        verify(replace(draft, law=replace(draft.law, shared_noise=True)), scores, rule, noise)


@pytest.mark.parametrize("rule", [*SAMPLING_RULES, Lenience(0.5)], ids=str)
def test_drafts_longer_than_their_noise_are_refused(rule):
    noise = RoundNoise(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0)
    tokens = torch.zeros(1, 1025, dtype=torch.long)
    scores = torch.zeros(1, 1026, 2)
    with pytest.raises(ValueError, match="1024 drafted tokens"):
        verify(Draft(tokens, torch.tensor([1025]), OneHot()), scores, rule, noise)
    longest = verify(Draft(tokens[:, 1:], torch.tensor([1024]), OneHot()), scores[:, 1:], rule, noise)
    assert int(longest.num_accepted) >= 0


def test_an_unknown_rule_is_refused_by_name():
    draft, scores, noise = random_case(0, 2, 2, 4, "sampled")
    with pytest.raises(ValueError, match="'typical'; it must be one of 'match', 'coupled', 'rejection', 'block'"):
        verify(draft, scores, "typical", noise)


@pytest.mark.parametrize("rule", MATCHING_RULES)
def test_shared_noise_is_welcome_under_match(rule):
    draft, scores, noise = random_case(0, 2, 2, 4, "sampled")
    shared = replace(draft, law=replace(draft.law, shared_noise=True))
    assert torch.equal(verify(shared, scores, rule, noise).tokens, verify(draft, scores, rule, noise).tokens)


def test_greedy_drafts_and_their_one_hot_slots_are_judged_alike():
    target, q = random_language(4, 1, dtype=torch.float32), random_language(4, 2, dtype=torch.float32)
    noise = Noise.from_seed(5, 300, CPU)
    for rule in SAMPLING_RULES:
        declared = emitted_texts(target, greedy_drafter(q, 3), rule, noise, 4)
        marked = emitted_texts(target, chain_drafter(q, 3, one_hot=range(3)), rule, noise, 4)
        assert torch.equal(declared, marked)
