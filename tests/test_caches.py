"""Going on from a cache, and from embeddings: the text, the outputs and the cache are plain generate's."""

import copy

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import ScriptedDrafter
from test_greedy import coin
from test_outputs import EVERYTHING, assert_same, eager_target
from tiny import EOS, TARGETS, perturbed, prompts, tiny_config, tiny_target
from transformers import DynamicCache, StaticCache

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

BATCHES = {"one row": [14], "ragged batch": [14, 9, 3]}
OPTIONS = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": EOS}
GIVEN = ("the whole text", "the new tokens")


def first_turn(model, batch: str, with_config: bool = True) -> tuple[torch.Tensor, torch.Tensor, DynamicCache]:
    """(ids, mask, cache) after a plain first turn and a second message of the user's."""
    inputs = prompts(BATCHES[batch], seed=4)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    ids = model.generate(**inputs, **{**OPTIONS, "eos_token_id": None}, cache=cache)
    message = prompts([5] * len(ids), seed=9)["input_ids"]
    ids = torch.cat([ids, message], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 14), value=1)
    return ids, mask, cache


def second_turn(model, given: str, turn: tuple, **options):
    """(what generate returns, the cache after it); the cache of the first turn is left as it is."""
    ids, mask, cache = turn
    cache = copy.deepcopy(cache)
    if given == "the new tokens":
        ids = ids[:, cache.get_seq_length() :]
    return model.generate(ids, attention_mask=mask, cache=cache, **{**OPTIONS, **options}), cache


def assert_same_cache(found: DynamicCache, expected: DynamicCache) -> None:
    assert len(found.layers) == len(expected.layers)
    for i, (one, other) in enumerate(zip(found.layers, expected.layers, strict=True)):
        assert type(one) is type(other) and one.get_seq_length() == other.get_seq_length()
        assert_same((one.keys, one.values), (other.keys, other.values), f"layer {i}")


def drafters(model, texts, tmp_path):
    head = random_head(target_layers=model.config.num_hidden_layers)
    yield "lookup", AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield "draft model", DraftModelDrafter(perturbed(model, 0.03), num_draft_tokens=4).bind(model)
    yield "EAGLE-3", AutoDrafter.from_pretrained(write_head(tmp_path, head), target=model)
    yield "all right", ScriptedDrafter(texts, num_draft_tokens=5).bind(model)
    yield "some right", ScriptedDrafter(texts, right=coin, num_draft_tokens=5).bind(model)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(tmp_path, name, batch, given):
    model = tiny_target(name)
    turn = first_turn(model, batch)
    free = second_turn(model, given, turn)[0]
    width = free.shape[1] - 12
    stops = [int(free[0, width + 4]), int(free[-1, width + 9])]  # rows end apart
    expected, cache = second_turn(model, given, turn, eos_token_id=stops)
    for kind, drafter in drafters(model, expected[:, width:].tolist(), tmp_path):
        found, ours = second_turn(model, given, turn, eos_token_id=stops, assistant_model=drafter)
        assert torch.equal(found, expected), kind
        assert_same_cache(ours, cache)


def test_a_third_turn_goes_on_from_a_drafters_cache(tmp_path):
    model = tiny_target("gemma3")
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    inputs, texts = prompts([14], seed=4), {}
    for assistant in ({}, {"assistant_model": drafter}):
        cache, ids = DynamicCache(config=model.config), inputs["input_ids"]
        for turn in range(3):
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **OPTIONS, **assistant)
            ids = torch.cat([ids, prompts([4], seed=turn)["input_ids"]], dim=1)
        texts[bool(assistant)] = ids
    assert torch.equal(texts[True], texts[False])


def test_the_cache_of_a_dictionary_serves_the_next_turn():
    model = tiny_target("mistral")
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    first = model.generate(**prompts([14]), **OPTIONS, return_dict_in_generate=True, assistant_model=drafter)
    ids = torch.cat([first.sequences, prompts([4], seed=1)["input_ids"]], dim=1)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
    again = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=first.cache, **OPTIONS, assistant_model=drafter
    )
    assert torch.equal(again, expected)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_empty_cache_is_filled_in_place(name, with_config):
    model, inputs = tiny_target(name), prompts([14, 6])
    ours, theirs = (DynamicCache(config=model.config) if with_config else DynamicCache() for _ in range(2))
    expected = model.generate(**inputs, **OPTIONS, cache=theirs)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    found = model.generate(**inputs, **OPTIONS, cache=ours, return_dict_in_generate=True, assistant_model=drafter)
    assert torch.equal(found.sequences, expected)
    assert found.cache is ours
    assert_same_cache(ours, theirs)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_outputs_after_a_cache_are_those_of_plain_generate(name, given):
    model = eager_target(name)
    turn = first_turn(model, "ragged batch")
    options = {**EVERYTHING, "return_dict_in_generate": True}
    expected, _ = second_turn(model, given, turn, **options)
    texts = expected.sequences[:, -12:].tolist()
    drafter = ScriptedDrafter(texts, right=coin, num_draft_tokens=5).bind(model)
    found, _ = second_turn(model, given, turn, **options, assistant_model=drafter)
    for key in ("sequences", "scores", "logits", "hidden_states", "attentions"):
        assert_same(found[key], expected[key], key)


def test_one_seed_gives_one_text_however_the_text_before_was_given():
    model = tiny_target()
    turn = first_turn(model, "ragged batch")
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1, seed=5)
    options = {"do_sample": True, "top_k": 0, "assistant_model": drafter}
    ids, mask, _ = turn
    expected = model.generate(ids, attention_mask=mask, **{**OPTIONS, **options})[:, ids.shape[1] :]
    for given in GIVEN:
        assert torch.equal(second_turn(model, given, turn, **options)[0][:, -expected.shape[1] :], expected)


def test_a_head_after_a_cache_drafts_from_what_it_has_seen(tmp_path):
    """The whole text given again without a cache is the text that the head was made for; with one it sees less of it,
    but never something wrong: on a prompt of which the cache held nothing the drafts are the same."""
    model = tiny_target()
    head = random_head(target_layers=tiny_config("llama").num_hidden_layers)
    drafter = AutoDrafter.from_pretrained(write_head(tmp_path, head), target=model, governor="off")
    inputs = prompts([14, 9])
    counts = []
    for extra in ({}, {"cache": DynamicCache(config=model.config)}):
        model.generate(**inputs, **OPTIONS, **extra, assistant_model=drafter)
        counts.append([(row.num_drafted, row.num_accepted) for row in drafter.last_stats.rows])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_embeddings_as_a_prompt_give_the_text_of_plain_generate(name, batch):
    model, inputs = tiny_target(name), prompts(BATCHES[batch], seed=4)
    embeds = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    expected = model.generate(**embeds, **OPTIONS)
    assert expected.shape[1] <= 12
    for drafter in (
        AutoDrafter.for_target(model, "lookup", min_ngram=1),
        AutoDrafter.for_target(model, "none"),
        DraftModelDrafter(perturbed(model, 0.03), num_draft_tokens=4).bind(model),
        ScriptedDrafter(expected.tolist(), right=coin, num_draft_tokens=5).bind(model),
    ):
        assert torch.equal(model.generate(**embeds, **OPTIONS, assistant_model=drafter), expected), drafter.method


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda config: StaticCache(config=config, max_cache_len=64, offloading=True), "`cache` is a StaticCache"),
        (lambda config: DynamicCache(config=config, offloading=True), "`cache` is a DynamicCache"),
    ],
)
def test_caches_that_cannot_be_continued_are_refused(make, match):
    model = tiny_target()
    drafter = AutoDrafter.for_target(model, "lookup")
    with pytest.raises(ValueError, match=match):
        model.generate(**prompts([6]), **OPTIONS, cache=make(model.config), assistant_model=drafter)


def test_a_cache_of_another_text_is_refused_and_left_alone():
    model = tiny_target()
    ids, mask, cache = first_turn(model, "one row")
    length = cache.get_seq_length()
    drafter = AutoDrafter.for_target(model, "lookup")
    for given, its_mask in ((ids[:, :10], mask[:, :10]), (ids[:, -4:], mask[:, -4:]), (ids[:, -4:], mask[:, -20:])):
        with pytest.raises(ValueError, match=f"`cache` holds {length} tokens beside `input_ids` of"):
            model.generate(given, attention_mask=its_mask, cache=cache, **OPTIONS, assistant_model=drafter)
    assert cache.get_seq_length() == length
