"""Greedy text with any drafter is plain generate's text, token for token, in fp32."""

import pytest
import torch
from scripted import ScriptedDrafter
from tiny import EOS, TARGETS, perturbed, prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.decoding.cache import RaggedCache
from hf_specdec.drafters.draft_model import DraftModelDrafter

NEW_TOKENS = 40
BATCHES = {"one row": [17], "ragged batch": [17, 12, 3, 9]}


def plain(model, inputs, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(**inputs, **options)


def speculative(model, inputs, drafter, **options):
    return plain(model, inputs, assistant_model=drafter, **options)


def coin(row: int, round: int) -> int:
    """0 to 5 right tokens, different for each row and round."""
    return (row * 7 + round * 13 + row * round * 5) % 6


def drafters(model, texts):
    yield "none", AutoDrafter.for_target(model, "none")
    yield "lookup", AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield "draft model", DraftModelDrafter(perturbed(model, 0.03), num_draft_tokens=4).bind(model)
    yield "all right", ScriptedDrafter(texts, num_draft_tokens=5).bind(model)
    yield "all wrong", ScriptedDrafter(texts, right=lambda row, round: 0, num_draft_tokens=5).bind(model)
    yield "some right", ScriptedDrafter(texts, right=coin, num_draft_tokens=5).bind(model)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_text_is_that_of_plain_generate(name, batch):
    model = tiny_target(name)
    inputs = prompts(BATCHES[batch])
    expected = plain(model, inputs)
    texts = expected[:, inputs["input_ids"].shape[1] :].tolist()
    for kind, drafter in drafters(model, texts):
        found = speculative(model, inputs, drafter)
        assert torch.equal(found, expected), kind


@pytest.mark.parametrize("name", TARGETS)
def test_rows_that_reach_their_eos_apart_are_padded_as_plain_generate_does(name):
    model = tiny_target(name)
    inputs = prompts([11, 5, 8, 2], seed=3)
    free = plain(model, inputs, eos_token_id=EOS)[:, 11:]
    stops = [int(free[0, 6]), int(free[1, 15]), int(free[2, 2])]  # tokens at which rows 0 to 2 end
    expected = plain(model, inputs, eos_token_id=stops)
    assert len(set((expected[:, 11:] != 0).sum(dim=1).tolist())) > 1, "the rows should end apart"
    texts = expected[:, 11:].tolist()
    for kind, drafter in drafters(model, texts):
        found = speculative(model, inputs, drafter, eos_token_id=stops)
        assert torch.equal(found, expected), kind


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_length_limits_end_inside_a_block(new_tokens):
    model, inputs = tiny_target("llama"), prompts([9, 4])
    long = plain(model, inputs, max_new_tokens=20)
    for k in (1, 2, 5, 9):
        drafter = ScriptedDrafter(long[:, 9:].tolist(), num_draft_tokens=k).bind(model)
        found = speculative(model, inputs, drafter, max_new_tokens=new_tokens)
        assert torch.equal(found, long[:, : 9 + new_tokens])


@pytest.mark.parametrize("name", TARGETS)
def test_a_cache_row_that_survives_a_rejection_would_change_the_text(name):
    """Negative control: write every block one slot late, so that the slot before it keeps what was rejected."""
    model, inputs = tiny_target(name), prompts([17])
    expected = plain(model, inputs)
    place = RaggedCache.place

    def one_slot_late(self, offsets, host_offsets, num_tokens):
        place(self, offsets + 1, [offset + 1 for offset in host_offsets], num_tokens)

    drafter = ScriptedDrafter(expected[:, 17:].tolist(), right=lambda row, round: 1, num_draft_tokens=4).bind(model)
    assert torch.equal(speculative(model, inputs, drafter), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedCache, "place", one_slot_late)
        assert not torch.equal(speculative(model, inputs, drafter), expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_hidden_states_that_a_drafter_asks_for_are_those_of_its_rows(name):
    model, inputs = tiny_target(name), prompts([10])
    expected = plain(model, inputs)
    drafter = ScriptedDrafter(expected[:, 10:].tolist(), right=coin, hidden_states=(0, 2), num_draft_tokens=3)
    speculative(model, inputs, drafter.bind(model))
    with torch.no_grad():
        whole = model(expected, output_hidden_states=True).hidden_states
    assert len(drafter.seen) > 5
    for signals, first, columns in drafter.seen:
        for layer in (0, 2):
            found = signals.hidden_states[layer][:, :columns]
            torch.testing.assert_close(found, whole[layer][:, first : first + columns], atol=1e-4, rtol=1e-4)
            if columns > 1:  # the other layer, or the same one a column off, would not pass
                other = whole[2 - layer][:, first : first + columns]
                assert not torch.allclose(found, other, atol=1e-2)
