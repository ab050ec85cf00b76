"""Lengths by confidence are those of the rule, and a cut draft is the start of the whole one."""

import pytest
import torch

from hf_specdec.scheduling import Governor, Schedule
from hf_specdec.scheduling.confidence import admissions, best_lengths, prefix_lengths, threshold_lengths
from hf_specdec.verification import Draft, OneHot, Sampled

CHAT, CODE = (0.75, 0.70, 0.68, 0.66, 0.65, 0.65, 0.64), (0.92,) * 7


def in_total(*seconds: float):
    """A verification's cost by the tokens that it has beyond one for each row."""
    return lambda lengths: seconds[sum(lengths)]


def by_longest(per_token: float):
    """A padded batch's cost."""
    return lambda lengths: 1.0 + per_token * max(lengths)


# The rules


@pytest.mark.parametrize(
    ("confidence", "share", "length"),
    [(CHAT, 0.0025, 7), (CHAT, 0.05, 5), (CHAT, 0.30, 2), (CODE, 0.0025, 7), (CODE, 0.05, 7), (CODE, 0.30, 6)],
)
def test_one_row_is_verified_as_long_as_a_token_pays(confidence, share, length):
    assert prefix_lengths([confidence], by_longest(share)) == [length]
    admitted, tokens, reach = 0, 1.0, 1.0  # the same by the paper's inequality
    for k, c in enumerate(confidence, 1):
        reach *= c
        if not reach > tokens * ((1 + share * k) / (1 + share * (k - 1)) - 1):
            break
        admitted, tokens = k, tokens + reach
    assert admitted == length


def brute_force(confidence, seconds) -> list[int]:
    """Algorithm 1 over a sorted list, as the paper writes it."""
    slots = []
    for r, row in enumerate(confidence):
        reach = 1.0
        for j, c in enumerate(row, 1):
            reach *= c
            slots.append((-reach, j, r))
    lengths, tokens = [0] * len(confidence), float(len(confidence))
    best, best_rate = list(lengths), tokens / seconds(lengths)
    for reach, j, r in sorted(slots):
        lengths[r], tokens = max(lengths[r], j), tokens - reach
        if tokens / seconds(lengths) <= best_rate:
            break
        best, best_rate = list(lengths), tokens / seconds(lengths)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_compete_for_tokens_are_served_as_the_papers_sorted_list_says(seed):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0])  # ties are common
    confidence = [levels[torch.randint(5, (3,), generator=generator)].tolist() for _ in range(1 + seed % 3)]
    steps = torch.rand(10, generator=generator) * (0.4 if seed % 2 else 0.1) + 1e-3
    seconds = in_total(*(1.0 + steps.cumsum(0)).tolist())
    assert prefix_lengths(confidence, seconds) == brute_force(confidence, seconds)


def test_rows_of_a_padded_batch_share_their_columns():
    confidence = [CODE, (0.3,) * 7, (0.9, 0.9)]
    assert prefix_lengths(confidence, by_longest(0.0)) == [7, 7, 2]
    lengths = prefix_lengths(confidence, by_longest(0.2))
    assert lengths == [max(lengths), max(lengths), min(2, max(lengths))] and 0 < max(lengths) < 7
    for step, _ in admissions(confidence, by_longest(0.2)):
        assert step[0] == step[1], "a slot that is free should come with its column"


def test_a_threshold_ends_a_row_before_its_first_doubtful_token():
    confidence = [(0.9, 0.5, 0.4, 0.9), (0.2, 0.9), (), (0.9, 0.9)]
    assert threshold_lengths(confidence, 0.5) == [2, 0, 0, 2]
    assert threshold_lengths(confidence, 0.0) == [4, 2, 0, 2]
    assert threshold_lengths([(1.0, float("nan"))], 0.0) == [1]


def test_the_best_length_may_lie_behind_a_step_that_does_not_pay():
    seconds = in_total(1.0, 2.0, 1 / 0.45)
    assert prefix_lengths([(0.8, 0.9)], seconds) == [0]
    assert best_lengths([(0.8, 0.9)], seconds) == [2]


# A schedule


def draft_of(confidence, lengths=None) -> Draft:
    confidence = torch.tensor(confidence)
    batch_size, num_slots = confidence.shape
    lengths = torch.full((batch_size,), num_slots) if lengths is None else torch.tensor(lengths)
    logits = torch.randn(batch_size, num_slots, 6)
    tokens = logits.argmax(-1).masked_fill(torch.arange(num_slots) >= lengths[:, None], -1)
    return Draft(tokens, lengths, Sampled(logits), confidence=confidence)


def timed(*seconds: float) -> Governor:
    """A governor that has seen one verification of each length, and drafts for nothing."""
    governor = Governor(5, 5, adaptive=False)
    for length, time in enumerate(seconds):
        governor.observe([length], [0], 0.0, time)
    return governor


def test_a_cut_draft_holds_the_first_tokens_and_their_laws():
    draft = draft_of([[0.9, 0.9, 0.9, 0.1], [0.9, 0.1, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]], [4, 4, 0])
    cut = Schedule(0.5).cut(draft, timed())
    assert cut.lengths.tolist() == [3, 1, 0] and cut.num_slots == 3
    assert torch.equal(cut.tokens[0], draft.tokens[0, :3])
    assert cut.tokens[1].tolist() == [int(draft.tokens[1, 0]), -1, -1] and cut.tokens[2].tolist() == [-1] * 3
    assert torch.equal(cut.law.logits, draft.law.logits[:, :3]) and cut.confidence.shape == (3, 3)
    nothing = Schedule(1.0).cut(draft, timed())
    assert nothing.num_slots == 0 and nothing.lengths.tolist() == [0, 0, 0]
    greedy = Draft(draft.tokens, draft.lengths, OneHot(), confidence=draft.confidence)
    assert isinstance(Schedule(0.5).cut(greedy, timed()).law, OneHot)


@pytest.mark.parametrize("kind", ["confidence", "lagged"])
def test_costs_are_learnt_from_lengths_that_differ(kind):
    schedule, governor = Schedule(kind), timed()
    draft = draft_of([[0.9] * 5])
    assert schedule.cut(draft, governor).num_slots == 5
    governor.observe([5], [0], 0.1, 2.0)
    assert schedule.cut(draft, governor).num_slots == 1
    governor.observe([1], [0], 0.1, 1.2)
    assert governor.knows_slope
    assert governor.seconds(3) == pytest.approx(0.1 + 1.6)
    assert schedule.cut(draft, governor).num_slots > 1
    for _ in range(100):
        governor.observe([5], [0], 0.1, 2.0)
    assert not governor.knows_slope, "what has not been seen for long may have changed"


def test_a_token_is_worth_its_measured_cost():
    dear, cheap = timed(1.0, 1.3, 1.6, 1.9), timed(1.0, 1.01, 1.02, 1.03)
    draft = draft_of([CHAT])
    schedule = Schedule("confidence")
    schedule.cut(draft, dear)  # the first round says nothing yet
    lengths = [int(schedule.cut(draft, costs).lengths) for costs in (dear, cheap)]
    assert lengths == [2, 7]


def test_a_lagged_length_is_the_best_one_of_the_round_before():
    schedule, costs = Schedule("lagged"), timed(1.0, 1.3, 1.6, 1.9)
    sure, unsure = draft_of([[0.95] * 5, [0.95] * 5]), draft_of([[0.1] * 5, [0.1] * 5], [5, 2])
    assert schedule.cut(sure, costs).lengths.tolist() == [5, 5]
    assert schedule.cut(unsure, costs).lengths.tolist() == [5, 2]
    assert Schedule("lagged").cut(unsure, costs).lengths.tolist() == [5, 2], "its own confidence must not be asked"
    assert schedule.cut(sure, costs).num_slots == 0
    assert schedule.cut(sure, costs).num_slots == 5
