"""Static caches, asked for or given: plain generate's text and cache, up to the last slot."""

import copy

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import ScriptedDrafter
from test_caches import GIVEN, assert_same_cache
from test_greedy import coin
from tiny import EOS, TARGETS, perturbed, prompts, tiny_encoder_decoder, tiny_target
from tiny_hybrids import tiny_own
from transformers import DynamicCache, StaticCache

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

OPTIONS = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
BATCHES = {"one row": [14], "ragged batch": [14, 9, 3]}


def all_right(model, texts):
    """Drafts that are right up to the last slot, and one token beyond it."""
    return ScriptedDrafter(texts, num_draft_tokens=5).bind(model)


def drafters(model, texts, folder):
    head = random_head(target_layers=model.config.num_hidden_layers)
    yield AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield AutoDrafter.for_target(model, "none")
    yield DraftModelDrafter(perturbed(model, 0.03), num_draft_tokens=4).bind(model)
    yield AutoDrafter.from_pretrained(write_head(folder, head), target=model)
    yield all_right(model, texts)
    yield ScriptedDrafter(texts, right=coin, num_draft_tokens=5).bind(model)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_text_and_cache_are_those_of_plain_generate_with_a_static_cache(tmp_path, name, batch):
    model, inputs = tiny_target(name), prompts(BATCHES[batch])
    options = {**OPTIONS, "cache_implementation": "static", "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options)
    assert torch.equal(expected.sequences, model.generate(**inputs, **OPTIONS)), "static and dynamic texts should agree"
    assert type(expected.cache) is StaticCache
    for drafter in drafters(model, expected.sequences[:, 14:].tolist(), tmp_path):
        found = model.generate(**inputs, **options, assistant_model=drafter)
        assert torch.equal(found.sequences, expected.sequences), drafter.method
        assert_same_cache(found.cache, expected.cache)
        assert drafter.last_stats.cache == "ragged"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_last_slot_of_a_static_cache_of_ones_own_is_filled(name, max_new_tokens):
    model, inputs = tiny_target(name), prompts([9, 4])
    options = {**OPTIONS, "max_new_tokens": max_new_tokens}
    theirs, ours = (StaticCache(config=model.config, max_cache_len=9 + max_new_tokens - 1) for _ in range(2))
    expected = model.generate(**inputs, **options, cache=theirs)
    drafter = all_right(model, expected[:, 9:].tolist())
    found = model.generate(**inputs, **options, cache=ours, return_dict_in_generate=True, assistant_model=drafter)
    assert torch.equal(found.sequences, expected)
    assert found.cache is ours
    assert_same_cache(ours, theirs)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_second_turn_goes_on_from_a_static_cache(name, batch, given):
    model, inputs = tiny_target(name), prompts(BATCHES[batch])
    cache = StaticCache(config=model.config, max_cache_len=64)
    first = model.generate(**inputs, **OPTIONS, cache=cache)
    ids = torch.cat([first, prompts([5] * len(first), seed=9)["input_ids"]], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 14), value=1)
    ids = ids if given == "the whole text" else ids[:, int(cache.get_seq_length()) :]
    ours = copy.deepcopy(cache)
    expected = model.generate(ids, attention_mask=mask, cache=cache, **OPTIONS)
    drafter = ScriptedDrafter(expected[:, ids.shape[1] :].tolist(), right=coin, num_draft_tokens=5).bind(model)
    found = model.generate(ids, attention_mask=mask, cache=ours, **OPTIONS, assistant_model=drafter)
    assert torch.equal(found, expected)
    assert_same_cache(ours, cache)


def test_rows_that_end_apart_fill_a_static_cache_of_ones_own():
    model, inputs = tiny_target("mistral"), prompts([14, 9, 3])
    free = model.generate(**inputs, **OPTIONS)
    options = {**OPTIONS, "eos_token_id": [EOS, int(free[0, 17]), int(free[1, 21])]}
    theirs, ours = (StaticCache(config=model.config, max_cache_len=40) for _ in range(2))
    expected = model.generate(**inputs, **options, cache=theirs)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(model.generate(**inputs, **options, cache=ours, assistant_model=drafter), expected)
    assert_same_cache(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*generates without drafts")
@pytest.mark.parametrize("name", ["gpt_neo", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("batch", BATCHES)
def test_targets_with_a_cache_of_their_own_serve_the_same_text_and_return_no_static_cache(name, batch):
    model, inputs = tiny_own(name), prompts(BATCHES[batch])
    expected = model.generate(**inputs, **OPTIONS)
    options = {**OPTIONS, "cache_implementation": "static", "return_dict_in_generate": True}
    found = model.generate(**inputs, **options, assistant_model=all_right(model, expected[:, 14:].tolist()))
    assert torch.equal(found.sequences, expected)
    assert found.specdec.cache == "own" and found.specdec.num_accepted > 0
    assert found.cache is None


def refusal(model, drafter, inputs, **options):
    with pytest.raises(ValueError) as error:
        model.generate(**inputs, **{**OPTIONS, **options}, assistant_model=drafter)
    assert drafter.last_stats is None
    return str(error.value)


def test_a_static_cache_too_small_for_the_text_is_refused_and_left_alone():
    model = tiny_target("llama")
    cache = StaticCache(config=model.config, max_cache_len=19)
    message = refusal(model, AutoDrafter.for_target(model, "lookup"), prompts([9]), cache=cache)
    assert "room for 19 tokens and this call may fill 20" in message and "max_cache_len=20" in message
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_of_other_rows_is_refused(kind):
    model = tiny_target("llama")
    cache = kind(config=model.config, **({"max_cache_len": 64} if kind is StaticCache else {}))
    ids = model.generate(**prompts([9, 9]), **OPTIONS, cache=cache)
    inputs = {"input_ids": torch.cat([ids, ids[:, :4]], dim=1)[:1]}
    assert "`cache` holds 2 rows and this call has 1" in refusal(
        model, AutoDrafter.for_target(model, "lookup"), inputs, cache=cache
    )


def test_encoder_decoder_targets_are_not_served_with_a_static_cache():
    model = tiny_encoder_decoder()
    drafter = AutoDrafter.for_target(tiny_target("llama"), "lookup")
    assert "`cache_implementation` is 'static'" in refusal(model, drafter, prompts([6]), cache_implementation="static")
