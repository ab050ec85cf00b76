"""Prompt lookup copies what followed the best earlier place, and costs next to nothing where there is none."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_greedy import plain, speculative
from tiny import VOCAB_SIZE, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec import AutoDrafter
from hf_specdec.decoding.rows import Rows
from hf_specdec.drafters.lookup.session import LookupDrafter, LookupSession, NgramIndex
from hf_specdec.verification import Draft, OneHot

TEXTS = st.lists(st.integers(0, 2), max_size=40)  # three tokens, so that places agree by many lengths
OPTIONS = st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(1, 6))


def index(text, options):
    size, more, most = options
    return NgramIndex(text, size, size + more, most)


def best_places(text, options):
    """The reference: try every place."""
    size, more, most = options
    agreement = {}
    for end in range(len(text) - 1):
        n = 0
        while n <= end and n < size + more and text[end - n] == text[len(text) - 1 - n]:
            n += 1
        if n >= size:
            agreement[end + 1] = n
    recent = sorted(agreement, reverse=True)[:most]
    return sorted(recent, key=lambda place: (-agreement[place], -place))


def test_the_index_finds_an_example():
    #       0  1  2  3  4  5  6  7  8  9
    text = [5, 1, 2, 3, 9, 1, 2, 4, 1, 2]
    found = NgramIndex(text, 2, 8, 8)
    assert found.candidates() == [7, 3]
    assert found.continuation(3) == [4, 1, 2]
    assert NgramIndex([9, *text[1:7], 3, 9, 1, 2], 2, 8, 8).candidates() == [7, 3]  # "9 1 2" agrees further
    assert NgramIndex([7, *text], 3, 8, 8).candidates() == []


@settings(max_examples=400, deadline=None)
@given(TEXTS, OPTIONS)
def test_the_longest_agreement_comes_first_and_of_equal_ones_the_most_recent(text, options):
    assert index(text, options).candidates() == best_places(text, options)


@settings(max_examples=200, deadline=None)
@given(TEXTS, OPTIONS, st.integers(0, 30))
def test_a_copy_that_reaches_the_end_of_the_text_goes_on_with_its_period(text, options, length):
    places = best_places(text, options)
    expected = []
    if places:
        longer = list(text)
        for i in range(length):
            longer.append(longer[places[0] + i])
        expected = longer[len(text) :]
    assert index(text, options).continuation(length) == expected


@settings(max_examples=200, deadline=None)
@given(TEXTS, OPTIONS, st.lists(st.booleans(), min_size=40, max_size=40))
def test_an_index_that_grows_with_its_text_equals_one_made_at_once(text, options, asked):
    growing: list[int] = []
    grown = index(growing, options)
    for token, ask in zip(text, asked, strict=False):
        growing.append(token)
        if ask:
            assert grown.candidates() == best_places(growing, options)
    assert grown.candidates() == best_places(growing, options)


class CountingDict(dict):
    def setdefault(self, key, default):
        self.calls = getattr(self, "calls", 0) + 1
        return super().setdefault(key, default)


def test_each_token_is_indexed_once():
    text = [1, 2, 3, 1, 2]
    grown = NgramIndex(text, 2, 8, 8)
    grown.ends = CountingDict()
    for i in range(50):
        grown.continuation(4)
        grown.candidates()
        text.extend([i % 3, i % 5])
        grown.candidates()
    assert grown.ends.calls == sum(map(len, grown.ends.values())) == len(text) - 2


def session(texts, width, **options):
    rows = Rows(torch.zeros(len(texts), width, dtype=torch.long), None, pad_token_id=0)
    rows.texts = [list(text) for text in texts]
    return LookupSession(LookupDrafter(**options), SimpleNamespace(rows=rows, source=None, vocab_size=VOCAB_SIZE))


class CountingMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.calls.append(str(function))
        return function(*arguments, **(kwargs or {}))


def test_without_a_match_nothing_is_drafted_and_no_tensor_is_touched():
    unmatched = session([range(3, 15), range(20, 32)], width=12)
    with CountingMode() as ours:
        draft = unmatched.propose([5, 5], 1)
    with CountingMode() as empty:
        Draft.empty(2, torch.device("cpu"))
    assert draft.num_slots == 0 and draft.lengths.tolist() == [0, 0]
    assert ours.calls == empty.calls
    matched = session([range(3, 15), [7, 8, 9] * 4], width=12)
    with CountingMode() as ours:
        assert matched.propose([5, 5], 1).num_slots == 5
    assert ours.calls != empty.calls  # the count does see tensors


def test_each_row_keeps_to_its_own_budget():
    repeating = [7, 8, 9] * 4
    texts = [repeating, repeating, range(3, 15), repeating, repeating]
    lookup = session(texts, width=12)
    lookup.rows.finished[4] = True
    draft = lookup.propose([2, 0, 4, 5, 5], 1)
    assert draft.lengths.tolist() == [2, 0, 0, 5, 0]
    assert draft.tokens.tolist() == [[7, 8, -1, -1, -1], [-1] * 5, [-1] * 5, [7, 8, 9, 7, 8], [-1] * 5]
    assert draft.law == OneHot()


def test_a_text_with_a_period_is_drafted_whole():
    """The target is made to look at the last token only."""
    model = tiny_target("llama")
    successor = torch.arange(VOCAB_SIZE).roll(-1)
    successor[VOCAB_SIZE - 1] = VOCAB_SIZE - 7  # counts up to the last token, and then in a circle of seven

    def follow(module, arguments, kwargs, output):
        if following:
            output.logits = torch.nn.functional.one_hot(successor[kwargs["input_ids"]], VOCAB_SIZE).float()
            output.logits = output.logits[:, -(kwargs.get("logits_to_keep") or 0) :]
        return output

    following = []
    drafter = AutoDrafter.for_target(model, "lookup", num_draft_tokens=5)
    inputs = {"input_ids": torch.tensor([[VOCAB_SIZE - 9, VOCAB_SIZE - 8]])}
    speculative(model, inputs, drafter, max_new_tokens=2)  # its self-check sees the target as it is
    hook = model.register_forward_hook(follow, with_kwargs=True)
    following.append(True)
    try:
        expected = plain(model, inputs, max_new_tokens=60)
        assert torch.equal(speculative(model, inputs, drafter, max_new_tokens=60), expected)
    finally:
        hook.remove()
    stats = drafter.last_stats
    assert stats.acceptance_rate == 1.0  # as soon as something repeats, everything does
    assert stats.num_plain_steps < 14
    assert stats.num_verifications == stats.num_plain_steps + -(-(60 - stats.num_plain_steps) // 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ngram": 0}, "`min_ngram` is 0"),
        ({"min_ngram": 3, "max_ngram": 2}, "`max_ngram` is 2"),
        ({"max_candidates": 0}, "`max_candidates` is 0"),
        ({"max_candidates": 2.0}, "`max_candidates` is 2.0"),
        ({"ngram": 3}, "unknown option 'ngram'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AutoDrafter.for_target(tiny_target("llama"), "lookup", **options)
