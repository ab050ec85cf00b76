"""Masked diffusion drafters through generate: their passes, their caches, and the target's text."""

from collections import Counter

import pytest
import torch
from diffusion_formats import FORMATS, MASK, random_model
from diffusion_rounds import largest_error, load, passes_of
from test_greedy import plain, speculative
from tiny import VOCAB_SIZE, prompts, tiny_target
from tiny_hybrids import tiny_own

from hf_specdec.decoding.cache import RaggedCache

BATCHES = {"one row": [13], "ragged batch": [13, 9, 3]}
WAYS = {
    "one pass": {},
    "confidence": {"effort": 2},
    "entropy": {"effort": 3, "reveal_order": "entropy"},
    "left to right": {"effort": 2, "reveal_order": "left_to_right"},
    "resampled": {"effort": 3, "final_resample": True},
}
FAMILIES = ("SDAR", "Fast-dLLM v2", "Dream", "a2d Qwen3, mdlm", "a2d Qwen3, bd3lm")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_pass_is_that_of_the_whole_text_and_the_text_is_the_targets(tmp_path, format, batch):
    target, model = tiny_target("qwen3"), random_model(format)
    drafter = load(tmp_path, format, target, model, num_draft_tokens=5, effort=2)
    passes = passes_of(drafter, target, prompts(BATCHES[batch]), max_new_tokens=20, eos_token_id=None)
    assert largest_error(passes, model, format, VOCAB_SIZE) < 1e-4
    assert 0 < drafter.last_stats.num_accepted < drafter.last_stats.num_drafted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", FAMILIES)
def test_every_way_to_reveal_runs_its_passes_and_keeps_the_text(tmp_path, format, way):
    target, model = tiny_target("llama"), random_model(format)
    drafter = load(tmp_path, format, target, model, num_draft_tokens=7, **WAYS[way])
    passes = passes_of(drafter, target, prompts([11, 6]), max_new_tokens=16)
    assert largest_error(passes, model, format, VOCAB_SIZE) < 1e-4
    if FORMATS[format].block_size is None:
        rounds = Counter(tuple(map(tuple, one.texts)) for one in passes)
        assert max(rounds.values()) == drafter.spec_config.effort


@pytest.mark.parametrize("format", FAMILIES)
def test_rows_that_end_apart_end_as_in_plain_generate(tmp_path, format):
    target, inputs = tiny_target("llama"), prompts([11, 5, 8], seed=3)
    free = plain(target, inputs, eos_token_id=2)[:, 11:]
    stops = [int(free[0, 6]), int(free[1, 15]), int(free[2, 2])]
    drafter = load(tmp_path, format, target, num_draft_tokens=6, effort=2)
    assert passes_of(drafter, target, inputs, eos_token_id=stops)
    assert torch.equal(
        speculative(target, inputs, load(tmp_path / "b", format, target), eos_token_id=stops),
        plain(target, inputs, eos_token_id=stops),
    )


def test_complete_blocks_are_run_once(tmp_path):
    """Behind the prompt, a pass runs what is new of complete blocks, and the blocks that hold the draft."""
    target = tiny_target("llama")
    drafter = load(tmp_path, "SDAR", target, num_draft_tokens=4, effort=2)
    widths, place = [], RaggedCache.place

    def watched(cache, offsets, host_offsets, num_tokens):
        if cache.layers and len(cache.layers) == drafter.model.config.num_hidden_layers:
            widths.append(num_tokens)
        place(cache, offsets, host_offsets, num_tokens)

    RaggedCache.place = watched
    try:
        passes_of(drafter, target, prompts([40]), right=lambda row, round: 4, max_new_tokens=20, eos_token_id=None)
    finally:
        RaggedCache.place = place
    assert widths[0] >= 41  # the prompt
    assert max(widths[1:]) <= 4 + 4 + 8  # a block that has become complete, the text's last one, and the draft's


def test_a_draft_over_two_blocks_sees_the_first_one_finished(tmp_path):
    """Slots of a later block stay masked until those before them are drawn."""
    target, model = tiny_target("llama"), random_model("SDAR")
    drafter = load(tmp_path, "SDAR", target, model, num_draft_tokens=6)
    passes = passes_of(drafter, target, prompts([7]), max_new_tokens=14, eos_token_id=None)
    assert any(one.canvas.shape[1] == 6 for one in passes)
    for one in passes:
        length, canvas = len(one.texts[0]), one.canvas[0].tolist()
        masked = [slot for slot, token in enumerate(canvas) if token == MASK]
        block = (length + masked[0]) // 4
        assert all(slot in masked for slot in range(len(canvas)) if (length + slot) // 4 >= block)


def test_a_cache_of_an_earlier_turn_is_continued(tmp_path):
    target = tiny_target("llama")
    for format in FAMILIES:
        inputs = prompts([12])
        out = plain(target, inputs, max_new_tokens=6, return_dict_in_generate=True, eos_token_id=None)
        longer = {"input_ids": torch.cat([out.sequences, torch.tensor([[9, 8, 7]])], dim=1)}
        expected = plain(target, longer, max_new_tokens=8, eos_token_id=None)
        drafter = load(tmp_path / format, format, target, num_draft_tokens=3)
        found = speculative(target, longer, drafter, max_new_tokens=8, eos_token_id=None, cache=out.cache)
        assert torch.equal(found, expected), format


def test_processors_that_read_the_text_are_kept(tmp_path):
    target, inputs = tiny_target("llama"), prompts([12, 5])
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [11, 12]]}
    options["max_new_tokens"] = 16
    expected = plain(target, inputs, **options)
    for format, way in (("SDAR", "confidence"), ("SDAR", "resampled"), ("Dream", "entropy"), ("Dream", "one pass")):
        drafter = load(tmp_path / format / way, format, target, num_draft_tokens=5, **WAYS[way])
        assert torch.equal(speculative(target, inputs, drafter, **options), expected)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "mamba2"])
def test_other_targets_are_served(tmp_path, name):
    target = tiny_own(name) if name == "mamba2" else tiny_target(name)
    inputs, options = prompts(BATCHES["ragged batch"]), {"max_new_tokens": 20}
    for format in ("Efficient-DLM", "Dream"):
        drafter = load(tmp_path / format, format, target, effort=2)
        assert torch.equal(speculative(target, inputs, drafter, **options), plain(target, inputs, **options))
