"""The edges of every rule: padding, broken rows, zero residuals, ties, and what is refused."""

from dataclasses import replace
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import (
    LENIENT_RULES,
    chain_drafter,
    chi_square_p_value,
    emitted_texts,
    greedy_drafter,
    random_language,
)

from hf_specdec.lenient import Ensemble, Lenience, Mentored, TopK
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


# Broken rows


def break_row(scores: torch.Tensor, how: str) -> torch.Tensor:
    """[..., V] scores that no token can be chosen from."""
    broken = scores.clone()
    if how == "all nan":
        broken[...] = torch.nan
    elif how == "all -inf":
        broken[...] = -torch.inf
    else:
        value, where = how.split(" at ")
        broken[..., {"first": 0, "middle": broken.shape[-1] // 2, "last": -1}[where]] = float(value)
    return broken


BROKEN = ["all nan", "all -inf", *(f"{v} at {w}" for v in ("nan", "inf") for w in ("first", "middle", "last"))]


def often_accepted_case(law: str, vocab_size: int) -> tuple[Draft, torch.Tensor, RoundNoise]:
    """Four tokens are left of the vocabulary; the drafted one has p = .6 and q = .8."""
    batch_size, num_slots = 160, 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([0, 1, 2, 3]) if vocab_size == 4 else torch.tensor([3, 700, 701, vocab_size - 1])
    candidates = torch.randint(4, (batch_size, num_slots + 1, 1), generator=generator)
    lengths = torch.randint(num_slots + 1, (batch_size,), generator=generator)
    within = torch.arange(num_slots) < lengths[:, None]

    def weights(drafted: float) -> torch.Tensor:
        other = (1.0 - drafted) / 3.0
        return torch.full((batch_size, num_slots + 1, 4), other).scatter(-1, candidates, drafted).log()

    def over_vocabulary(values: torch.Tensor) -> torch.Tensor:
        return values.new_full((*values.shape[:-1], vocab_size), -torch.inf).index_copy(-1, ids, values)

    logits = weights(0.8)[:, :-1]
    laws = {
        "one-hot": OneHot(),
        "sampled": Sampled(over_vocabulary(logits)),
        "some one-hot": Sampled(
            over_vocabulary(logits), one_hot=torch.tensor([True, False, True]).expand(batch_size, 3)
        ),
        "reduced": Sampled(logits, ids=ids),
    }
    draft = Draft(ids[candidates[:, :-1, 0]].masked_fill(~within, -1), lengths, laws[law])
    noise = RoundNoise(Noise.from_seed(1, batch_size, CPU), torch.arange(batch_size), 2)
    return draft, over_vocabulary(weights(0.6)), noise


@pytest.mark.parametrize("vocab_size", [4, 1500])
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("rule", [*RULES, Lenience(0.9), Mentored(0.01), Ensemble(0.6), TopK(1)], ids=str)
def test_a_broken_row_is_marked_where_it_is_reached_and_nowhere_else(rule, how, vocab_size):
    laws = ["one-hot"] if rule in MATCHING_RULES else ["one-hot", "sampled", "some one-hot", "reduced"]
    for law in laws:
        draft, scores, noise = often_accepted_case(law, vocab_size)
        healthy = verify(draft, scores, rule, noise)
        assert int(healthy.num_accepted.min()) >= 0
        rows = torch.arange(len(scores)) % 2 == 0  # the others must not notice
        for place in range(draft.num_slots + 1):
            broken = scores.clone()
            broken[rows, place] = break_row(scores[rows, place], how)
            verdict = verify(draft, broken, rule, noise)
            # The broken row is reached where a draft that ends before it is accepted to its end.
            lengths = draft.lengths.clamp_max(place)
            kept = torch.arange(draft.num_slots) < lengths[:, None]
            cut = verify(Draft(draft.tokens.masked_fill(~kept, -1), lengths, draft.law), scores, rule, noise)
            reached = rows & (cut.num_accepted == place)
            assert bool(reached.any())
            assert bool((verdict.num_accepted[reached] == -1).all())
            assert bool((verdict.tokens[reached] == -1).all())
            passed_over = rows & ~reached
            for here, wanted in ((passed_over, cut), (~rows, healthy)):
                assert torch.equal(verdict.tokens[here], wanted.tokens[here])
                assert torch.equal(verdict.num_accepted[here], wanted.num_accepted[here])
            everything = rule == TopK(1)  # is accepted
            assert place == 0 or everything or bool((passed_over & (draft.lengths >= place)).any())


UNCHOOSABLE = [how for how in BROKEN if not how.startswith("inf")]  # greedy decoding takes an infinite score


def test_greedy_decoding_takes_a_token_that_is_forced_by_an_infinite_score():
    scores = torch.zeros(1, 2, 5)
    scores[0, 0, 3] = scores[0, 1, 1] = torch.inf
    draft = Draft(torch.tensor([[3]]), torch.tensor([1]), OneHot())
    assert verify(draft, scores, "match", None).tokens.tolist() == [[3, 1]]
    tree = Draft(torch.tensor([[3]]), torch.tensor([1]), OneHot(), parents=torch.tensor([-1]))
    assert verify(tree, scores, "match", None).tokens.tolist() == [[3, 1]]


@pytest.mark.parametrize("how", UNCHOOSABLE)
def test_a_greedy_row_that_is_broken_is_marked_where_it_is_reached(how):
    scores = torch.zeros(3, 3, 5)
    scores[..., 2] = 1.0
    draft = Draft(torch.tensor([[2, 2], [2, 0], [0, 2]]), torch.tensor([2, 2, 2]), OneHot())
    broken = scores.clone()
    broken[:, 2] = break_row(scores[:, 2], how)
    verdict = verify(draft, broken, "match", None)
    assert verdict.num_accepted.tolist() == [-1, 1, 0]
    assert verdict.tokens.tolist() == [[-1, -1, -1], [2, 2, -1], [2, -1, -1]]


@pytest.mark.parametrize(("how", "noisy"), [(h, True) for h in BROKEN] + [(h, False) for h in UNCHOOSABLE])
def test_a_broken_node_of_a_tree_is_marked_where_it_is_reached(how, noisy):
    # Nodes: 0 = token 1, 1 = token 2, 2 = token 2 after node 0, 3 = token 2 after node 1.
    scores = torch.full((2, 5, 4), -30.0)
    scores[0, :, 2] = scores[1, :, 2] = 0.0
    scores[1, 0] = torch.tensor([-30.0, 0.0, -30.0, -30.0])
    parents = torch.tensor([-1, -1, 0, 1])
    draft = Draft(torch.tensor([[1, 2, 2, 2]] * 2), torch.tensor([4, 4]), OneHot(), parents=parents)
    noise = RoundNoise(Noise.from_seed(0, 2, CPU), torch.tensor([0, 0]), 0) if noisy else None
    broken = scores.clone()
    broken[:, 3] = break_row(scores[:, 3], how)  # the row after node 2
    verdict = verify(draft, broken, "match", noise)
    assert verdict.num_accepted.tolist() == [2, -1]
    assert verdict.tokens.tolist() == [[2, 2, 2, -1, -1], [-1] * 5]
    assert verdict.path.tolist() == [[1, 3, -1, -1], [-1] * 4]


# Residuals


class _Tails:
    """Every coin comes up tails; records what the last token is drawn from."""

    def __init__(self, noise: RoundNoise):
        self.noise = noise

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.zeros(p.shape, dtype=torch.bool)

    def choose(self, stream: int | torch.Tensor, scores: torch.Tensor, slots: int | torch.Tensor = 0) -> torch.Tensor:
        self.scores = scores
        return self.noise.choose(stream, scores, slots)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("law", ["one-hot", "sampled", "reduced"])
def test_a_rejection_without_a_residual_draws_from_the_target(rule, law):
    # p = q, yet rejected: rounding may do that. Token 0 is filtered, so index 0 is not an answer.
    num_rows = 20_000
    row = torch.tensor([-torch.inf, 0.3, -1.0, 0.7, -torch.inf])
    if law == "one-hot":
        row = torch.tensor([-torch.inf, -torch.inf, 0.4, -torch.inf, -torch.inf])
    scores = row.expand(num_rows, 2, 5)
    tokens = torch.full((num_rows, 1), 2)
    ids = torch.tensor([3, 2, 1]) if law == "reduced" else None
    logits = scores[:, :1] if ids is None else scores[:, :1, ids]
    draft = Draft(
        tokens, torch.ones(num_rows, dtype=torch.long), OneHot() if law == "one-hot" else Sampled(logits, ids)
    )
    noise = RoundNoise(Noise.from_seed(2, num_rows, CPU), torch.zeros(num_rows, dtype=torch.long), 0)
    verdict = verify(draft, scores, rule, _Tails(noise))
    assert verdict.num_accepted.tolist() == [0] * num_rows
    if law == "one-hot":
        assert bool((verdict.tokens[:, 0] == 2).all())
    elif law == "sampled":
        assert chi_square_p_value(verdict.tokens[:, 0], row.softmax(dim=-1)) > 1e-6
    # Where the two softmaxes differ by rounding, what is left of the residual is drawn from: never a filtered token.
    assert bool((row[verdict.tokens[:, 0]] > -torch.inf).all())


def exact_log_residual(p_logits: torch.Tensor, q_logits: torch.Tensor) -> tuple[list[float], list[float]]:
    """log max(p - q, 0) of each token, and q / p, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        p, q = ([Decimal(x).exp() for x in row.double().tolist()] for row in (p_logits, q_logits))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        residual = [float((a - b).ln()) if a > b else float("-inf") for a, b in zip(p, q, strict=True)]
        return residual, [float(b / a) for a, b in zip(p, q, strict=True)]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
def test_the_residual_of_fp32_logits_is_right_to_fp32(rule, near):
    if near:  # logits so small that fp32 can tell p from q where q / p = 1 - 1e-7
        p_logits = 1e-7 * torch.arange(-8, 8, dtype=torch.float32)
        q_logits = 3e-7 * torch.tensor([1.0, -1.0]).repeat(8) + 0.8 * p_logits
    else:  # q / p from 1e-12 to 1e12 around q = p
        p_logits = torch.linspace(-3.0, 3.0, 16)
        q_logits = p_logits - torch.linspace(-27.8, 27.8, 16)
    residual, ratios = exact_log_residual(p_logits, q_logits)
    assert min(abs(1.0 - ratio) for ratio in ratios) < 1e-6 if near else min(ratios) < 1e-12
    noise = _Tails(RoundNoise(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0))
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), Sampled(q_logits.view(1, 1, 16)))
    verify(draft, p_logits.expand(1, 2, 16), rule, noise)
    assert noise.scores.dtype == torch.float32
    for found, wanted in zip(noise.scores[0, 0].tolist(), residual, strict=True):
        assert found == pytest.approx(wanted, rel=2.0**-23)


def test_the_residual_of_fp64_logits_is_right_to_fp64():
    generator = torch.Generator().manual_seed(0)
    p_logits, q_logits = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    noise = _Tails(RoundNoise(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0))
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), Sampled(q_logits.view(1, 1, 12)))
    verify(draft, p_logits.expand(1, 2, 12), "rejection", noise)
    assert noise.scores.dtype == torch.float64
    assert noise.scores[0, 0].tolist() == pytest.approx(exact_log_residual(p_logits, q_logits)[0], rel=1e-12)


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
