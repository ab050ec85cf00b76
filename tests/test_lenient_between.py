"""`SpecConfig(lenient_between=(start, end))`: a rule is lenient between the markers, and nowhere else.

By exact enumeration on a toy, with controls that read the markers wrongly, and through the whole of `generate`.
"""

import json
from collections import defaultdict
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import EXACT, LENIENT_RULES, chain_drafter, emitted_law, greedy_drafter, random_language
from scripted import RandomDrafter, ScriptedDrafter
from test_bad_input import no_forward, refusal  # noqa: F401 - a fixture
from test_lenient_calls import GREEDY, SAMPLING, near_copy
from test_lenient_laws import one_round, softmax
from test_rules import cases, random_case
from tiny import VOCAB_SIZE, prompts, tiny_target
from tiny_hybrids import tiny_own

from hf_specdec import AutoDrafter, SpecConfig
from hf_specdec.decoding.markers import Between
from hf_specdec.lenient import Lenience, TopK
from hf_specdec.verification import Draft, OneHot, verify

STRICT = Lenience(1.0)


def is_inside(text, start, end) -> bool:
    """Read from the left."""
    inside = False
    for i in range(1, len(text) + 1):
        if tuple(text[:i][-len(start) :]) == start:
            inside = True
        elif tuple(text[:i][-len(end) :]) == end:
            inside = False
    return inside


# Where the slots are


def rows_of(texts):
    return SimpleNamespace(texts=texts, ids=torch.zeros(0))


MARKERS = [((1,), (2,)), ((1, 0), (2,)), ((1,), (2, 2)), ((0, 1, 0), (1, 1))]
tokens = st.lists(st.integers(0, 2), max_size=6)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(MARKERS), st.lists(st.lists(st.tuples(tokens, tokens), min_size=4, max_size=4), max_size=3))
def test_slots_are_those_with_the_start_before_them_and_not_the_end(markers, rounds):
    """Over rounds in which the texts of four rows go on with other tokens than were drafted."""
    rows, between = rows_of([[], [1], [1, 0, 2], [0, 1, 0]]), Between(*markers, 4)
    for found in rounds:
        drafts = [draft for _, draft in found]
        longest = max(1, *map(len, drafts))
        padded = torch.tensor([draft + [-1] * (longest - len(draft)) for draft in drafts])
        draft = Draft(padded, torch.tensor([len(draft) for draft in drafts]), OneHot())
        between.read(rows)
        slots = between.slots(draft)
        assert slots.shape == padded.shape and slots.dtype == torch.bool
        for text, drafted, row in zip(rows.texts, drafts, slots.tolist(), strict=True):
            assert row[: len(drafted)] == [is_inside(text + drafted[:j], *markers) for j in range(len(drafted))]
        for text, (new, _) in zip(rows.texts, found, strict=True):
            text.extend(new)


# The law


@settings(deadline=None, max_examples=100)
@given(cases, st.sampled_from(LENIENT_RULES))
def test_no_slot_is_rejection_bit_for_bit_and_every_slot_is_the_rule(case, rule):
    draft, scores, noise = random_case(*case)
    slots = torch.ones(draft.tokens.shape, dtype=torch.bool)
    nowhere, strict = verify(draft, scores, rule, noise, slots=~slots), verify(draft, scores, "rejection", noise)
    assert torch.equal(nowhere.tokens, strict.tokens) and torch.equal(nowhere.num_accepted, strict.num_accepted)
    assert bool((nowhere.tv == 0.0).all()) and bool((nowhere.kl == 0.0).all())
    everywhere, lenient = verify(draft, scores, rule, noise, slots=slots), verify(draft, scores, rule, noise)
    for name in ("tokens", "num_accepted", "tv", "kl"):
        assert torch.equal(getattr(everywhere, name), getattr(lenient, name))


class Thinking:
    """A drafter and a rule for tests/laws.py, which remember the texts of the round.

    Args:
        propose: the drafter.
        rule: between the markers.
        markers, prompt: of the texts.
    """

    def __init__(self, propose, rule, markers, prompt=()):
        self.drafter, self.rule, self.markers, self.prompt = propose, rule, markers, prompt

    def propose(self, texts, noise):
        self.texts = [[*self.prompt, *text] for text in texts]
        return self.drafter(texts, noise)

    def slots(self, draft):
        between = Between(*self.markers, len(self.texts))
        between.read(rows_of(self.texts))
        return between.slots(draft)

    def verify(self, draft, scores, noise):
        return verify(draft, scores, self.rule, noise, slots=self.slots(draft))

    def law(self, target, num_tokens, rounds):
        return emitted_law(target, self.propose, self.verify, num_tokens, rounds)


class BlindToTheDraft(Thinking):
    """Control: a marker among the drafted tokens is seen a round too late."""

    def slots(self, draft):
        return super().slots(draft)[:, :1].expand_as(draft.tokens)


class Everywhere(Thinking):
    """Control: no markers."""

    def slots(self, draft):
        return torch.ones_like(draft.tokens, dtype=torch.bool)


def errors(law, target, markers, prompt, num_tokens) -> tuple[float, float]:
    """Largest error of the law of a token, given the text before it: (outside of the markers, between them)."""
    weights = defaultdict(float)
    for text, probability in law.items():
        for length in range(num_tokens + 1):
            weights[text[:length]] += probability
    outside = inside = 0.0
    for text, weight in list(weights.items()):
        if len(text) == num_tokens or weight < 1e-6:
            continue
        found = [weights.get((*text, x), 0.0) / weight for x in range(3)]
        error = max(abs(x - y) for x, y in zip(found, softmax(target(text)), strict=True))
        if is_inside([*prompt, *text], *markers):
            inside = max(inside, error)
        else:
            outside = max(outside, error)
    return outside, inside


PROMPTS = [(), (1,), (1, 2), (0, 1, 0)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("markers", MARKERS, ids=str)
@pytest.mark.parametrize("rule", [Lenience(0.5), TopK(2)], ids=repr)
def test_outside_of_the_markers_every_token_has_the_targets_law_and_between_them_the_rules(rule, markers, prompt):
    target, q = random_language(3, 3), random_language(3, 4)
    for propose, law_of in (
        (chain_drafter(q, 2), lambda text, slot: softmax(q(text))),
        (greedy_drafter(q, 2), lambda text, slot: tuple(float(x == int(q(text).argmax())) for x in range(3))),
    ):
        thinking = Thinking(propose, rule, markers, prompt)
        found = thinking.law(target, num_tokens=4, rounds=4)
        assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
        assert errors(found, target, markers, prompt, 4)[0] < 1e-9
        expected = {(): 1.0}
        for _ in range(4):
            after = defaultdict(float)
            for start, weight in expected.items():
                if len(start) >= 4:
                    after[start] += weight
                    continue
                here = lambda text: rule if is_inside([*prompt, *text], *markers) else STRICT  # noqa: E731
                for text, probability in one_round(here, target, law_of, 2, start):
                    after[text[:4]] += weight * probability
            expected = after
        assert max(abs(found.get(text, 0.0) - expected.get(text, 0.0)) for text in {*found, *expected}) < EXACT


def test_control_markers_that_are_read_wrongly_bias_the_text_outside():
    target, q, markers = random_language(3, 3), random_language(3, 4), MARKERS[0]
    for kind in (BlindToTheDraft, Everywhere):
        law = kind(chain_drafter(q, 2), Lenience(0.3), markers, (1,)).law(target, num_tokens=4, rounds=4)
        assert errors(law, target, markers, (1,), 4)[0] > 1e-2, kind
    law = Thinking(chain_drafter(q, 2), Lenience(0.3), markers, (1,)).law(target, num_tokens=4, rounds=4)
    assert errors(law, target, markers, (1,), 4)[1] > 1e-2


# In a generate call

START, END = 90, 91
ANYTHING = 1e-9  # in greedy decoding


def opened(lengths, rows):
    """Prompts of which some hold the start marker."""
    inputs = prompts(lengths)
    for row in rows:
        inputs["input_ids"][row, -2] = START
    return inputs


def test_greedy_text_is_the_drafts_between_the_markers_and_plain_from_the_end_marker_on():
    """The end marker stands inside a block, whose later tokens are wrong."""
    model, inputs = tiny_target("llama"), opened([9, 9, 4], [0, 2])
    plain = model.generate(**inputs, **GREEDY, eos_token_id=None)
    script = [0, 11, 12, END, 13, 14, 15, 16] + [17] * 40
    drafter = ScriptedDrafter([script] * 3, num_draft_tokens=7, lenience=ANYTHING, lenient_between=(START, END)).bind(
        model
    )
    found = model.generate(**inputs, **GREEDY, eos_token_id=None, assistant_model=drafter)
    assert torch.equal(found[1], plain[1])  # never opened
    for row in (0, 2):
        assert found[row, 10:13].tolist() == [11, 12, END]
        begun = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        begun["input_ids"] = found[row : row + 1, :13]
        begun["attention_mask"] = torch.nn.functional.pad(begun["attention_mask"], (0, 4), value=1)
        rest = model.generate(**begun, do_sample=False, eos_token_id=None, max_new_tokens=26)
        assert torch.equal(found[row : row + 1], rest)
    stats = drafter.last_stats
    assert [row.tv for row in stats.rows] == [3.0, 0.0, 3.0] and not stats.lossless
    assert stats.rule == "Lenience(l=1e-09) between tokens 90 and 91"
    assert stats.bound == "p(token) >= 1e-09 max p between the markers, the best token elsewhere"


def test_greedy_tokens_outside_are_the_best_after_any_rejections_and_stops():
    """The text opens and closes by itself: drafts hold markers, and rows end apart at an eos."""
    model, inputs = tiny_target("llama"), opened([9, 5, 7], [1])
    script = [[t + 10 * (t % 3 == 0) for t in range(30, 80)] for _ in range(3)]
    for row, text in enumerate(script):
        for i in range(3 + row, 50, 9):
            text[i : i + 4] = [START, 5, 6, END]
    markers = (START, [6, END])
    drafter = ScriptedDrafter(
        script,
        right=lambda row, round: 2 + (row + round) % 4,
        num_draft_tokens=5,
        lenience=0.3,
        lenient_between=markers,
    ).bind(model)
    for eos in (None, 45):
        drafter.spec_config = drafter.spec_config.with_options(lenience=ANYTHING if eos else 0.3)
        ids = model.generate(**inputs, **GREEDY, eos_token_id=eos, pad_token_id=0, assistant_model=drafter)
        for row, length in enumerate([9, 5, 7]):
            text = ids[row, 9 - length :].tolist()
            new = drafter.last_stats.rows[row].num_emitted
            with torch.no_grad():
                best = model(torch.tensor([text[: length + new]])).logits[0].argmax(dim=-1).tolist()
            others = 0
            for i in range(length, length + new):
                if not is_inside(text[:i], (START,), (6, END)):
                    assert text[i] == best[i - 1]
                others += text[i] != best[i - 1]
            assert drafter.last_stats.rows[row].tv == others
        assert eos is None or drafter.last_stats.mean_tv > 0.0


@pytest.mark.parametrize("lenience", [0.3, TopK(3)], ids=str)
def test_sampled_text_is_rejections_until_a_marker_opens_and_wholly_lenient_after_it(lenience):
    model, inputs = tiny_target("llama"), prompts([9, 4, 6])
    inputs["input_ids"][inputs["input_ids"] >= START] = 7
    never = SAMPLING | {"suppress_tokens": [START, END]}
    options = {"lenience": lenience, "lenient_between": (START, END)}
    strict = model.generate(**inputs, **never, assistant_model=near_copy(model, rule="rejection"))
    drafter = near_copy(model, **options)
    assert torch.equal(model.generate(**inputs, **never, assistant_model=drafter), strict)
    assert drafter.last_stats.mean_tv == drafter.last_stats.mean_kl == 0.0 and not drafter.last_stats.lossless
    assert drafter.last_stats.bound.endswith(" between the markers, h = p elsewhere")
    inputs["input_ids"][:, -1] = START
    lenient, confined = near_copy(model, lenience=lenience), near_copy(model, **options)
    everywhere = model.generate(**inputs, **never, assistant_model=lenient)
    assert torch.equal(model.generate(**inputs, **never, assistant_model=confined), everywhere)
    assert confined.last_stats.mean_tv == lenient.last_stats.mean_tv > 0.0
    inputs["input_ids"][1, -1] = END
    model.generate(**inputs, **never, assistant_model=confined)
    assert [row.tv > 0.0 for row in confined.last_stats.rows] == [True, False, True]


def test_rows_that_run_one_by_one_read_their_own_markers():
    model = tiny_own("qwen3_next")
    inputs = prompts([9, 9])
    inputs["input_ids"][1, 3] = START
    drafter = RandomDrafter(VOCAB_SIZE, seed=1, lenience=0.2, lenient_between=(START, END)).bind(model)
    options = SAMPLING | {"suppress_tokens": [START, END], "eos_token_id": None}
    model.generate(**inputs, **options, assistant_model=drafter)
    assert drafter.last_stats.cache == "own"
    assert [row.tv > 0.0 for row in drafter.last_stats.rows] == [False, True]


# Options


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (5, r"`lenient_between` is 5; give two markers, \(start, end\)"),
        ("<>", "`lenient_between` is '<>'; give two markers"),
        ((5,), "`lenient_between` is .*; give two markers"),
        (("<think>", "</think>"), "has the marker '<think>'; give a token id, as tokenizer.convert_tokens_to_ids"),
        ((5, []), r"has the marker \[\]; give a token id"),
        ((5, None), "has the marker None; give a token id"),
        ((True, 6), "has the marker True"),
        ((5, -1), "has the marker -1"),
        ((5, [6, 7.0]), r"has the marker \[6, 7.0\]"),
        ((5, 5), r"is \(5, 5\), and a text could end with both markers at once"),
        (([4, 5], 5), "could end with both markers at once"),
    ],
    ids=str,
)
def test_markers_that_are_none_are_refused(value, match):
    with pytest.raises(ValueError, match=match):
        SpecConfig(lenience=0.5, lenient_between=value)


@pytest.mark.parametrize("lenience", [None, 1, 1.0, Lenience(1.0)], ids=str)
def test_markers_without_a_loss_are_refused(lenience):
    with pytest.raises(ValueError, match=r"`lenient_between` is .* beside `lenience` .*, which loses nothing"):
        SpecConfig(lenience=lenience, lenient_between=(5, 6))


def test_markers_of_another_vocabulary_are_refused(no_forward):  # noqa: F811
    drafter = AutoDrafter.for_target(tiny_target("llama"), "lookup", lenience=0.5, lenient_between=(5, [6, 97]))
    assert "`lenient_between` has token 97 and LlamaForCausalLM a vocabulary of 97" in refusal(drafter=drafter)


def test_markers_go_through_a_file(tmp_path):
    config = SpecConfig(lenience=0.5, lenient_between=(5, [6, 7]))
    assert config.lenient_between == ((5,), (6, 7))
    (tmp_path / "options.json").write_text(json.dumps(asdict(config)))
    assert SpecConfig.from_file(tmp_path / "options.json") == config
