"""The governor drafts where it pays, as much as pays, and by what is past only."""

import random
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from test_greedy import coin, plain, speculative
from tiny import perturbed, prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.decoding import loop
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.integration.options import num_draft_tokens
from hf_specdec.scheduling import Governor

VERIFICATION = 1.0  # seconds of a plain step; other costs are in its units


class World:
    """Costs of a target and a drafter.

    Args:
        alpha: chance that a drafted token is accepted, given that the ones before it are.
        per_draft: seconds of a draft, whatever its length.
        per_drafted: seconds of each drafted token.
        per_verified: seconds that each drafted token adds to a verification.
    """

    def __init__(self, alpha, per_draft=0.0, per_drafted=0.0, per_verified=0.0, rows=1, seed=0):
        self.alpha, self.per_draft, self.per_drafted, self.per_verified = alpha, per_draft, per_drafted, per_verified
        self.rows, self.random = rows, random.Random(seed)

    def cost(self, k: int) -> tuple[float, float]:
        """(seconds of drafting, seconds of verification)."""
        return (self.per_draft + k * self.per_drafted if k else 0.0), VERIFICATION + k * self.per_verified

    def accepted(self, k: int) -> int:
        return next((i for i in range(k) if self.random.random() >= self.alpha), k)

    def rate(self, k: int) -> float:
        """Expected tokens per second at a fixed length."""
        return sum(self.alpha**i for i in range(k + 1)) / sum(self.cost(k))

    def run(self, governor: Governor, rounds: int) -> tuple[list[int], float]:
        """(lengths, tokens per second) of the rounds."""
        lengths, tokens, seconds = [], 0, 0.0
        for _ in range(rounds):
            k = governor.next_length()
            accepted = [self.accepted(k) for _ in range(self.rows)]
            draft_time, verify_time = self.cost(k)
            governor.observe([k] * self.rows, accepted, draft_time, verify_time)
            lengths.append(k)
            tokens += sum(a + 1 for a in accepted) / self.rows
            seconds += draft_time + verify_time
        return lengths, tokens / seconds


def governor(start=5, longest=10, adaptive=True):
    return Governor(start, longest, adaptive)


@pytest.mark.parametrize(
    "world",
    [
        World(alpha=0.1, per_drafted=0.5),
        World(alpha=0.0, per_verified=0.2),
        World(alpha=0.5, per_draft=3.0),
        World(alpha=0.8, per_drafted=1.5),
        World(alpha=0.2, per_verified=0.5, rows=8),
    ],
)
def test_drafting_is_turned_off_where_it_does_not_pay(world):
    lengths, rate = world.run(governor(), 400)
    assert lengths[-300:].count(0) > 0.9 * 300
    assert rate > 0.8  # tokens per second, probes included; plain decoding has 1


def test_it_is_turned_off_within_a_few_rounds():
    lengths, _ = World(alpha=0.0, per_drafted=0.5).run(governor(), 20)
    assert 0 in lengths[:6]


def test_what_is_long_past_is_forgotten():
    world, ours = World(alpha=0.97, per_drafted=0.2), governor()
    lengths, _ = world.run(ours, 500)
    assert lengths[-1] == 10
    world.alpha = 0.0
    lengths, _ = world.run(ours, 60)
    assert 0 in lengths[:40]


def test_a_probe_is_no_longer_than_the_longest_draft():
    lengths, _ = World(alpha=0.0, per_drafted=0.5).run(governor(start=1, longest=1), 200)
    assert set(lengths) == {0, 1} and 0 < lengths[-100:].count(1) < 5


def test_a_probe_now_and_then_sees_when_drafting_has_come_to_pay():
    world, ours = World(alpha=0.05, per_drafted=0.2), governor()
    lengths, _ = world.run(ours, 200)
    probes = [i for i, k in enumerate(lengths[50:]) if k > 0]
    assert 2 <= len(probes) <= 5  # 48 plain steps apart, once several have shown nothing
    assert all(lengths[50 + i] <= 2 for i in probes)
    world.alpha = 0.95
    lengths, _ = world.run(ours, 400)
    assert lengths[-50:].count(0) == 0
    assert sum(lengths[-50:]) / 50 > 4


def test_without_probes_it_would_never_come_back(monkeypatch):
    """Negative control for the test above."""
    monkeypatch.setattr("hf_specdec.scheduling.governor._PROBE_EVERY", 10**9)
    world, ours = World(alpha=0.05, per_drafted=0.2), governor()
    world.run(ours, 200)
    world.alpha = 0.95
    lengths, _ = world.run(ours, 400)
    assert set(lengths) == {0}


def test_drafts_are_longer_where_more_is_accepted():
    means = []
    for alpha in (0.3, 0.6, 0.8, 0.97):
        lengths, _ = World(alpha, per_drafted=0.08, per_verified=0.02, seed=1).run(governor(), 400)
        means.append(sum(lengths[100:]) / 300)
    assert means == sorted(means)
    assert means[0] < 3.0 and means[-1] > 8.0


def test_drafts_are_shorter_where_they_cost_more():
    means = []
    for per_drafted in (0.0, 0.1, 0.3, 0.6):
        lengths, _ = World(0.8, per_drafted=per_drafted, seed=1).run(governor(), 400)
        means.append(sum(lengths[100:]) / 300)
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("per_draft", [0.0, 0.3])
@pytest.mark.parametrize("per_drafted", [0.02, 0.2])
@pytest.mark.parametrize("per_verified", [0.01, 0.1])
def test_it_is_almost_as_fast_as_the_best_fixed_length(alpha, per_draft, per_drafted, per_verified):
    world = World(alpha, per_draft, per_drafted, per_verified, seed=3)
    best = max(world.rate(k) for k in range(11))
    _, rate = world.run(governor(), 1500)
    assert rate > 0.9 * best


ROUNDS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3),
        st.floats(0.0, 1e3),
        st.floats(0.0, 1e3),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), ROUNDS)
def test_lengths_stay_between_nothing_and_the_longest(start, longest, rounds):
    ours = Governor(min(start, longest), longest, adaptive=True)
    for rows, draft_time, verify_time in rounds:
        assert 0 <= ours.next_length() <= longest
        assert 0.0 < ours.acceptance < 1.0
        drafted = [k for k, _ in rows]
        ours.observe(drafted, [min(k, a) for k, a in rows], draft_time, verify_time)
    assert 0 <= ours.next_length() <= longest


@settings(max_examples=50, deadline=None)
@given(ROUNDS)
def test_a_length_that_is_given_is_kept(rounds):
    ours = governor(start=3, longest=3, adaptive=False)
    for rows, draft_time, verify_time in rounds:
        ours.observe([k for k, _ in rows], [min(k, a) for k, a in rows], draft_time, verify_time)
        assert ours.next_length() == 3


# In a generate call


@pytest.fixture
def clock(monkeypatch):
    """A loop whose every look at the clock is one second after the last."""
    seconds = count()
    monkeypatch.setattr(loop, "perf_counter", lambda: float(next(seconds)))


def budgets(drafter, model, inputs, new_tokens=60, **options):
    speculative(model, inputs, drafter, max_new_tokens=new_tokens, eos_token_id=None, **options)
    return [max(budget) for budget in drafter.budgets]


def scripted(model, inputs, right, **options):
    texts = plain(model, inputs, max_new_tokens=60, eos_token_id=None)[:, inputs["input_ids"].shape[1] :]
    return ScriptedDrafter(texts.tolist(), right=right, **options).bind(model)


def nothing(row, round):
    return 0


def everything(row, round):
    return 1_000


@pytest.mark.parametrize("right", [nothing, everything, coin])
@pytest.mark.parametrize(
    ("options", "call", "length"),
    [
        ({"num_draft_tokens": 3}, {}, 3),
        ({"governor": "off"}, {}, 4),  # the drafter's own length
        ({}, {"num_assistant_tokens": 2}, 2),
        ({"num_draft_tokens": 3}, {"num_assistant_tokens": 2}, 2),
        ({"num_draft_tokens": 1, "governor": "auto"}, {}, 1),
    ],
)
def test_a_length_that_the_user_gave_is_used_in_every_round(options, call, length, right):
    model, inputs = tiny_target("llama"), prompts([9])
    found = budgets(scripted(model, inputs, right, **options), model, inputs, **call)
    room_left = found[-3:]  # the last rounds draft what fits
    assert set(found[:-3]) == {length}
    assert all(0 < k <= length for k in room_left)


def test_lengths_that_are_left_open_follow_what_is_accepted(clock):
    model, inputs = tiny_target("llama"), prompts([9])
    down = budgets(scripted(model, inputs, nothing), model, inputs)
    assert down[0] == 4 and len(down) < 15  # 4 to begin with; rounds without a draft do not ask the drafter
    up = budgets(scripted(model, inputs, everything), model, inputs)
    assert up[0] == 4 and max(up) == 8


def test_turning_drafts_off_and_on_leaves_the_text(clock):
    model, inputs = tiny_target("llama"), prompts([9, 4])
    expected = plain(model, inputs, max_new_tokens=60)
    for right in (nothing, everything, coin, lambda row, round: 8 * (round % 3 == 0)):
        drafter = scripted(model, inputs, right)
        assert torch.equal(speculative(model, inputs, drafter, max_new_tokens=60), expected)


def test_a_round_is_decided_before_its_draft_is_drawn(monkeypatch):
    """`rejection` and `block` are exact only if no length depends on the tokens that it cuts."""
    log = []

    def logged(cls, name, entry):
        original = getattr(cls, name)

        def method(self, *args, **kwargs):
            log.append(entry)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, method)

    from hf_specdec.decoding.rows import Rows
    from hf_specdec.drafters.draft_model.session import DraftModelSession

    logged(Governor, "next_length", "length")
    logged(Governor, "observe", "learn")
    logged(DraftModelSession, "propose", "draft")
    logged(Rows, "commit", "verdict")
    model, inputs = tiny_target("llama"), prompts([9, 5])
    for rule in ("rejection", "block", "coupled"):
        log.clear()
        drafter = DraftModelDrafter(perturbed(model, 0.05), rule=rule, seed=1).bind(model)
        speculative(model, inputs, drafter, do_sample=True, eos_token_id=None)
        rounds = " ".join(log).replace("length draft", "length").replace("verdict learn", "verdict").split(" verdict ")
        assert rounds[0] == "verdict length"
        assert set(rounds[1:-1]) == {"length"} and rounds[-1] == "length verdict"


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_lengths_do_not_depend_on_drafted_tokens_that_were_not_judged(rule, clock):
    """Two drafters that draft the same tokens up to the first wrong one, and others after it."""
    model, inputs = tiny_target("llama"), prompts([9])
    lengths = []
    for shift in (1, 2):

        class Shifted(ScriptedDrafter):
            shift_by = shift

            def start(self, request):
                session = super().start(request)
                propose = session.propose

                def shifted(budget, verification):
                    draft = propose(budget, verification)
                    wrong = self.right(0, verification)
                    draft.tokens[:, wrong + 1 :] = (draft.tokens[:, wrong + 1 :] + self.shift_by) % 97
                    return draft

                session.propose = shifted
                return session

        texts = plain(model, inputs, max_new_tokens=60, eos_token_id=None)[:, 9:].tolist()
        drafter = Shifted(texts, right=coin, rule=rule).bind(model)
        lengths.append(budgets(drafter, model, inputs))
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0][:-3])) > 1


@pytest.mark.parametrize("lengths", [[9], [9, 1, 4]], ids=["one row", "ragged batch"])
def test_a_draft_model_catches_up_after_a_pause(lengths, monkeypatch):
    """It has not seen what was emitted meanwhile; rows that ended early may be shorter than that."""
    pauses = [3, 0, 3] + [0] * 30 + [4] * 100
    rounds = count()
    monkeypatch.setattr(Governor, "next_length", lambda self: pauses[next(rounds)])
    model, inputs = tiny_target("llama"), prompts(lengths, seed=4)
    free = plain(model, inputs, max_new_tokens=60, eos_token_id=None)[:, max(lengths) :]
    options = {"max_new_tokens": 60, "eos_token_id": int(free[1, 1]) if len(lengths) > 1 else None}
    expected = plain(model, inputs, **options)
    drafter = DraftModelDrafter(perturbed(model, 0.0)).bind(model)
    assert torch.equal(speculative(model, inputs, drafter, **options), expected)
    assert drafter.last_stats.num_drafted > 20
    assert drafter.last_stats.acceptance_rate == 1.0


def test_plain_decoding_is_never_governed():
    model, inputs = tiny_target("llama"), prompts([9])
    drafter = AutoDrafter.for_target(model, "none")
    speculative(model, inputs, drafter)
    assert drafter.last_stats.num_drafted == 0
    assert drafter.last_stats.num_plain_steps == drafter.last_stats.num_emitted


@pytest.mark.parametrize("plain_steps", [0, 10])
@pytest.mark.parametrize("slow_at", [0, 1, 20])
def test_one_slow_round_does_not_turn_drafting_off(slow_at, plain_steps):
    """A hiccup of the machine, early or late, must not cost the rounds after it."""
    world, ours = World(alpha=0.9, per_drafted=0.02), governor()
    for _ in range(plain_steps):  # a drafter that had nothing to say
        ours.observe([0], [0], 0.0, VERIFICATION)
    if slow_at:
        world.run(ours, slow_at)
    k = ours.next_length()
    ours.observe([k], [k], 10 * world.cost(k)[0], 10 * world.cost(k)[1])
    lengths, _ = world.run(ours, 40)
    assert lengths.count(0) == 0 and sum(lengths) / len(lengths) > 4


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (4, 4, True)),
        ({"num_draft_tokens": 3}, (3, 3, False)),
        ({"governor": "off"}, (4, 4, False)),
        ({"schedule": 0.5}, (4, 4, False)),
    ],
)
def test_a_drafter_with_a_longest_draft_is_shortened_too_where_drafts_do_not_pay(options, lengths):
    model = tiny_target("llama")
    drafter = ScriptedDrafter([[5] * 40], **options).bind(model)
    drafter.default_num_draft_tokens = drafter.max_num_draft_tokens = 4
    assert num_draft_tokens(drafter, model.generation_config) == lengths
