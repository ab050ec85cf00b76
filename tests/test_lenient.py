"""The lenient rules: their formulas against values by hand, their guarantees on any laws, their strict ends, greedy."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import LENIENT_RULES
from test_rules import cases, random_case

from hf_specdec.lenient import Ensemble, Lenience, Margin, Mentored, TopK, Typical
from hf_specdec.verification import Draft, Noise, OneHot, RoundNoise, Sampled, verify
from hf_specdec.verification.lenient import as_rule, rule_from_dict
from hf_specdec.verification.lenient_rule import emitted_law

P, Q = (0.5, 0.3, 0.2), (0.1, 0.6, 0.3)
ROUNDING = 1e-9
CPU = torch.device("cpu")


def laws_of(rule, p, q):
    """(g, h) as lists."""
    kept, residual = rule.measures(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
    return kept.tolist(), emitted_law(kept, residual).tolist()


@pytest.mark.parametrize(
    ("rule", "p", "q", "kept", "h"),
    [
        (Lenience(0.5), P, Q, (0.1, 0.6, 0.3), Q),  # q <= 2 p everywhere: all is kept
        (Lenience(0.8), P, Q, (0.1, 0.375, 0.25), (0.375, 0.375, 0.25)),  # 0.275 is rejected and goes to token 0
        (Lenience(0.5), (0.3, 0.35, 0.35), (1.0, 0.0, 0.0), (0.6, 0.0, 0.0), (0.6, 0.2, 0.2)),  # a computed token
        (Lenience(0.5), (0.0, 0.4, 0.6), (0.5, 0.5, 0.0), (0.0, 0.5, 0.0), (0.0, 0.5, 0.5)),
        # w p + (1 - w) q = (.3, .45, .25); the missing 0.2 goes to token 0.
        (Ensemble(0.5), P, Q, (0.1, 0.45, 0.25), (0.3, 0.45, 0.25)),
        (Ensemble(0.25), (0.3, 0.35, 0.35), (1.0, 0.0, 0.0), (0.825, 0.0, 0.0), (0.825, 0.0875, 0.0875)),
        # Token 2 is forbidden: its half goes where p > q, 4 to 1, and nothing else was too probable.
        (Ensemble(0.5), (0.6, 0.4, 0.0), (0.2, 0.3, 0.5), (0.2, 0.3, 0.0), (0.6, 0.4, 0.0)),
        # H = 1.0297, exp(-H) = .3571: the threshold is .25, and 0.3 goes where p > g: (.4, 0, .2).
        (Typical(0.9, 0.7), P, Q, (0.1, 0.6, 0.0), (0.3, 0.6, 0.1)),
        (Typical(0.25, 1.0), P, Q, (0.1, 0.6, 0.0), (0.3, 0.6, 0.1)),
        (TopK(2), P, Q, (0.1, 0.6, 0.0), (0.3, 0.6, 0.1)),
        (TopK(1), P, Q, (0.1, 0.0, 0.0), P),
        (Margin(0.5), P, Q, (0.1, 0.6, 0.0), (0.3, 0.6, 0.1)),
        (Margin(0.7), P, Q, (0.1, 0.0, 0.0), P),
        (TopK(2), P, (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0)),
        (TopK(2), P, (0.0, 0.0, 1.0), (0.0, 0.0, 0.0), P),
        # A computed token of p = .5: KL = .8 ln 1.6 + .2 ln .4 at h = .8.
        (Mentored(0.8 * math.log(1.6) + 0.2 * math.log(0.4)), P, (1.0, 0.0, 0.0), (0.8, 0.0, 0.0), (0.8, 0.12, 0.08)),
        # a = 1.6 caps token 1 at .48 and leaves token 2 at q; b = .44 makes up the missing .12 at token 0.
        (
            Mentored(0.22 * math.log(0.44) + 0.48 * math.log(1.6) + 0.3 * math.log(1.5)),
            P,
            Q,
            (0.1, 0.48, 0.3),
            (0.22, 0.48, 0.3),
        ),
        (Mentored(0.0), P, Q, (0.1, 0.3, 0.2), P),
        (Mentored(10.0), P, Q, Q, Q),
    ],
    ids=str,
)
def test_a_rule_is_its_formula(rule, p, q, kept, h):
    found = laws_of(rule, p, q)
    assert found[0] == pytest.approx(kept, abs=ROUNDING)
    assert found[1] == pytest.approx(h, abs=ROUNDING)


# Guarantees


def random_laws(seed: int, vocab_size: int, computed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """40 pairs of laws p and q [40, V] with forbidden tokens on both sides; q is one-hot where it is computed."""
    generator = torch.Generator().manual_seed(seed)

    def law() -> torch.Tensor:
        scores = 2.0 * torch.randn(40, vocab_size, generator=generator, dtype=torch.float64)
        dropped = torch.rand(40, vocab_size, generator=generator) < 0.2
        dropped[torch.arange(40), torch.randint(vocab_size, (40,), generator=generator)] = False
        return scores.masked_fill(dropped, -torch.inf).softmax(dim=-1)

    p, q = law(), law()
    return p, torch.nn.functional.one_hot(q.argmax(dim=-1), vocab_size).double() if computed else q


def measured(rule, p, q):
    """(acceptance, h, TV(h, p), KL(h || p)); what every rule keeps to is checked on the way."""
    kept, residual = rule.measures(p, q)
    h = emitted_law(kept, residual)
    assert bool((kept >= 0.0).all()) and bool((kept <= q).all()) and bool((residual >= 0.0).all())
    assert bool((h[p == 0.0] == 0.0).all()), "a forbidden token is emitted"
    torch.testing.assert_close(h.sum(dim=-1), torch.ones_like(h[:, 0]))
    tv = (h - p).clamp_min(0.0).sum(dim=-1)
    kl = (torch.special.xlogy(h, h) - torch.special.xlogy(h, p)).sum(dim=-1)
    return kept.sum(dim=-1), h, tv, kl


pairs = st.tuples(st.integers(0, 2**31), st.integers(1, 12), st.booleans())
shares = st.floats(0.01, 1.0)


def at_most(values: torch.Tensor, limit) -> bool:
    return bool((values <= torch.as_tensor(limit, dtype=torch.float64) + ROUNDING).all())


def distance_of_drafts(p, q):
    return (p - q).clamp_min(0.0).sum(dim=-1)


@settings(deadline=None)
@given(pairs, shares)
def test_lenience_bounds_every_ratio_and_both_distances(pair, lenience):
    p, q = random_laws(*pair)
    accepted, h, tv, kl = measured(Lenience(lenience), p, q)
    assert at_most(h, p / lenience)
    assert at_most(kl, -math.log(lenience))
    assert at_most(tv, 1.0 - lenience)
    torch.testing.assert_close(tv, distance_of_drafts(p, q) - (1.0 - accepted))


@settings(deadline=None)
@given(pairs, st.floats(0.0, 4.0))
def test_mentored_keeps_to_its_kl(pair, max_kl):
    p, q = random_laws(*pair)
    accepted, _, tv, kl = measured(Mentored(max_kl), p, q)
    assert at_most(kl, max_kl)
    assert at_most(tv, math.sqrt((max_kl + ROUNDING) / 2.0))
    torch.testing.assert_close(tv, distance_of_drafts(p, q) - (1.0 - accepted))
    allowed = torch.where(p > 0.0, q, 0.0).sum(dim=-1)  # tight, unless all that may be accepted is
    assert bool(((kl > max_kl - 1e-6) | (accepted > allowed - 1e-6)).all())


@settings(deadline=None)
@given(pairs, st.sampled_from([Lenience(0.3), Lenience(0.8), Ensemble(0.5), Typical(), TopK(2), Margin(0.5)]))
def test_no_rule_accepts_more_than_mentored_at_its_kl(pair, rule):
    p, q = random_laws(*pair)
    accepted, _, _, kl = measured(rule, p, q)
    for row in range(0, 40, 8):
        one = slice(row, row + 1)
        best = measured(Mentored(max(0.0, float(kl[row]))), p[one], q[one])[0]
        assert float(best) >= float(accepted[row]) - 1e-6


@settings(deadline=None)
@given(pairs, shares)
def test_ensemble_is_the_mixture_but_for_what_the_target_forbids(pair, weight):
    p, q = random_laws(*pair)
    _, h, tv, _ = measured(Ensemble(weight), p, q)
    forbidden = torch.where(p > 0.0, 0.0, q).sum(dim=-1)
    assert at_most(tv, (1.0 - weight) * distance_of_drafts(p, q))
    torch.testing.assert_close(tv, (1.0 - weight) * (distance_of_drafts(p, q) - forbidden))
    clean = forbidden == 0.0
    torch.testing.assert_close(h[clean], (weight * p + (1.0 - weight) * q)[clean])


@settings(deadline=None)
@given(
    pairs,
    st.one_of(st.builds(Typical, shares, shares), st.builds(TopK, st.integers(1, 13)), st.builds(Margin, shares)),
)
def test_rules_with_a_set_raise_no_token_outside_it(pair, rule):
    p, q = random_laws(*pair)
    accepted, h, tv, _ = measured(rule, p, q)
    inside = rule.tolerated(p)
    assert at_most(h[~inside], p[~inside])
    assert at_most(tv, distance_of_drafts(p, q))
    torch.testing.assert_close(accepted, torch.where(inside, q, 0.0).sum(dim=-1))
    if isinstance(rule, TopK):
        assert at_most(inside.sum(dim=-1).double(), rule.k)
        assert bool((p.masked_fill(~inside, 2.0).amin(-1) >= p.masked_fill(inside, -1.0).amax(-1)).all())


@pytest.mark.parametrize(
    "rule", [Lenience(0.5), Mentored(0.1), Ensemble(0.5), Typical(), TopK(3), Margin(0.5)], ids=repr
)
def test_fp32_measures_are_those_of_fp64(rule):
    generator = torch.Generator().manual_seed(0)
    p, q = (3.0 * torch.randn(2, 20, 5000, generator=generator)).softmax(dim=-1)
    for single, double in zip(rule.measures(p, q), rule.measures(p.double(), q.double()), strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, atol=1e-6, rtol=1e-4)


# Strict ends


@settings(deadline=None, max_examples=300)
@given(cases, st.sampled_from([Lenience(1.0), Ensemble(1.0)]), st.sampled_from([torch.float32, torch.float64]))
def test_the_strict_end_is_rejection_bit_for_bit(case, rule, dtype):
    draft, scores, noise = random_case(*case, dtype=dtype)
    strict, lenient = verify(draft, scores, "rejection", noise), verify(draft, scores, rule, noise)
    assert torch.equal(lenient.tokens, strict.tokens)
    assert torch.equal(lenient.num_accepted, strict.num_accepted)
    reached = torch.arange(draft.num_slots + 1) <= strict.num_accepted[:, None]
    assert float(torch.where(reached, lenient.tv, 0.0).max()) < 1e-6
    assert float(torch.where(reached, lenient.kl, 0.0).max()) < 1e-6


def test_what_is_lossless_says_so():
    for rule in (Lenience(1), Ensemble(1.0), Mentored(0)):
        assert rule.is_lossless(greedy=False)
    for rule in (Lenience(1), TopK(1), Margin(1)):
        assert rule.is_lossless(greedy=True)
    for rule in (Lenience(0.99), Ensemble(0.99), Mentored(1e-9), Typical(), TopK(1), Margin(1.0)):
        assert not rule.is_lossless(greedy=False)
    for rule in (Lenience(0.99), Typical(), TopK(2), Margin(0.99)):
        assert not rule.is_lossless(greedy=True)


# Greedy decoding


def greedy_case(*drafted: int) -> tuple[Draft, torch.Tensor]:
    """Drafted tokens after which the target's law is always (.1, .2, .4, .25, .05)."""
    scores = torch.tensor([0.1, 0.2, 0.4, 0.25, 0.05]).log().expand(1, len(drafted) + 1, 5)
    return Draft(torch.tensor([drafted]), torch.tensor([len(drafted)]), OneHot()), scores


@pytest.mark.parametrize(
    ("rule", "accepted"),
    [
        (Lenience(0.6), 2),  # .25 > .24 = .6 * .4, then .2 is not
        (Margin(0.6), 2),
        (Margin(0.4), 3),
        (Margin(0.2), 4),
        (Margin(0.1), 5),
        (Margin(1.0), 1),
        (TopK(1), 1),
        (TopK(2), 2),
        (TopK(4), 4),
        (TopK(9), 5),
        (Typical(0.22, 1.0), 2),
        (Typical(1.0, 0.4), 4),  # H = 1.4150, .4 exp(-H) = .0972
        (Typical(0.5, 1.0), 2),  # exp(-H) = .243
    ],
    ids=repr,
)
def test_greedy_decoding_accepts_tokens_near_the_best(rule, accepted):
    draft, scores = greedy_case(2, 3, 1, 0, 4)
    verdict = verify(draft, scores, rule, None)
    assert verdict.num_accepted.tolist() == [accepted]
    assert verdict.tokens.tolist() == [[*[2, 3, 1, 0, 4][:accepted], 2] + [-1] * (5 - accepted)]
    assert verdict.tv[0].tolist() == [0.0, *[1.0] * (accepted - 1), *[0.0] * (6 - accepted)]
    lost = [math.log(0.4 / p) for p in (0.4, 0.25, 0.2, 0.1, 0.05)[:accepted]]
    assert verdict.kl[0].tolist() == pytest.approx([*lost, *[0.0] * (6 - accepted)], abs=1e-6)


@pytest.mark.parametrize("rule", [Lenience(1.0), Margin(1.0), TopK(1)], ids=repr)
def test_greedy_strict_ends_are_match_in_ties_too(rule):
    scores = torch.zeros(2, 3, 2000)
    scores[:, :, [700, 900]] = 1.0
    draft = Draft(torch.tensor([[700, 900], [900, -1]]), torch.tensor([2, 1]), OneHot())
    strict, lenient = verify(draft, scores, "match", None), verify(draft, scores, rule, None)
    assert torch.equal(lenient.tokens, strict.tokens) and lenient.num_accepted.tolist() == [1, 0]


@pytest.mark.parametrize("rule", [Lenience(0.1), Margin(0.1), TopK(5), Typical()], ids=repr)
def test_greedy_rules_never_take_a_forbidden_token(rule):
    draft, scores = greedy_case(3, 3)
    forbidden = scores.clone()
    forbidden[0, 1, 3] = -torch.inf
    assert verify(draft, forbidden, rule, None).tokens.tolist() == [[3, 2, -1]]


@pytest.mark.parametrize("rule", [Lenience(0.5), Margin(0.5), TopK(2), Typical()], ids=repr)
@pytest.mark.parametrize("how", [torch.nan, -torch.inf])
def test_a_broken_greedy_row_is_marked_where_it_is_reached(rule, how):
    draft, scores = greedy_case(2, 2)
    both = Draft(draft.tokens.expand(2, -1), torch.tensor([2, 1]), OneHot())
    broken = scores.expand(2, -1, -1).clone()
    broken[:, 2] = how
    assert verify(both, broken, rule, None).num_accepted.tolist() == [-1, 1]


def test_greedy_decoding_takes_a_token_that_is_forced_by_an_infinite_score():
    draft, scores = greedy_case(3)
    forced = scores.clone()
    forced[0, :, 3] = torch.inf
    for rule in (Lenience(0.5), TopK(2), Typical()):
        verdict = verify(draft, forced, rule, None)
        assert verdict.tokens.tolist() == [[3, 3]] and verdict.kl.tolist() == [[0.0, 0.0]]


# What is refused


def test_rules_for_sampling_are_refused_in_greedy_decoding():
    draft, scores = greedy_case(2)
    for rule in (Mentored(0.1), Ensemble(0.5)):
        with pytest.raises(ValueError, match=r"a rule for sampling; greedy decoding takes a number, Margin, TopK"):
            verify(draft, scores, rule, None)


def test_trees_and_shared_noise_are_refused():
    noise = RoundNoise(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0)
    draft, scores = greedy_case(2)
    tree = Draft(draft.tokens, draft.lengths, OneHot(), parents=torch.tensor([-1]))
    shared = Draft(draft.tokens, draft.lengths, Sampled(scores[:, :1], shared_noise=True))
    for rule in LENIENT_RULES:
        with pytest.raises(ValueError, match="verifies chains"):
            verify(tree, scores, rule, noise)
        with pytest.raises(ValueError, match="biased"):
            verify(shared, scores, rule, noise)
    with pytest.raises(ValueError, match="verifies chains"):
        verify(tree, scores, Margin(0.5), None)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Lenience(0.0), "`l` is 0.0; give a number above 0"),
        (lambda: Lenience("0.5"), "`l` is '0.5'"),
        (lambda: Lenience(float("nan")), "`l` is nan"),
        (lambda: Mentored(-0.1), "`max_kl` is -0.1"),
        (lambda: Mentored(math.inf), "`max_kl` is inf"),
        (lambda: Ensemble(1.1), "`weight` is 1.1"),
        (lambda: Typical(delta=True), "`delta` is True"),
        (lambda: TopK(0), "`k` is 0"),
        (lambda: TopK(1.5), "`k` is 1.5"),
        (lambda: Margin(2), "`ratio` is 2"),
        (lambda: as_rule(0), "`lenience` is 0; give a number above 0, at most 1"),
        (lambda: as_rule(True), "`lenience` is True"),
        (lambda: as_rule("typical"), "`lenience` is 'typical'"),
        (lambda: rule_from_dict({"name": "best"}), "its 'name' must be one of lenience, mentored, typical"),
        (lambda: rule_from_dict({"k": 2}), "its 'name' must be one of"),
        (lambda: rule_from_dict({"name": "top_k", "n": 2}), "`lenience` has 'n'; the parameters of TopK are k"),
        (lambda: rule_from_dict({"name": "top_k"}), "`lenience` lacks 'k'"),
    ],
)
def test_bad_parameters_are_refused_by_name(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("rule", [*LENIENT_RULES, Typical()], ids=repr)
def test_a_rule_survives_a_dictionary(rule):
    assert rule_from_dict(asdict(rule)) == rule
    assert as_rule(rule) is rule and as_rule(1) == Lenience(1.0) and as_rule(None) is None
