"""Everything of a generate call, on targets that keep their own cache: as plain generate has it, or refused."""

import pytest
import torch
from scripted import RowScript
from test_greedy import coin, plain, speculative
from test_own_cache import OPTIONS
from tiny import EOS, PAD, prompts, tiny_target
from tiny_hybrids import tiny_own
from transformers import TextStreamer
from transformers.cache_utils import DynamicCache

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

REPLAY, CROP = "qwen3_next", "bart"
TARGETS = [REPLAY, CROP]


def script(model, expected, width, **options):
    return RowScript(expected[:, width:].tolist(), right=coin, num_draft_tokens=4, **options).bind(model)


def both(model, inputs, **options):
    """(plain, with a drafter that is right now and then) of the same call."""
    expected = plain(model, inputs, **options)
    texts = expected if isinstance(expected, torch.Tensor) else expected.sequences
    found = speculative(model, inputs, script(model, texts, inputs["input_ids"].shape[1]), **options)
    return expected, found


# Ends


@pytest.mark.parametrize("name", TARGETS)
def test_rows_that_reach_their_eos_apart_are_padded_as_plain_generate_does(name):
    model, inputs = tiny_own(name), prompts([11, 5, 8], seed=3)
    free = plain(model, inputs, **OPTIONS)[:, 11:]
    stops = [int(free[0, 6]), int(free[1, 12])]
    expected, found = both(model, inputs, max_new_tokens=24, eos_token_id=stops)
    assert len(set((expected[:, 11:] != 0).sum(dim=1).tolist())) > 1, "the rows should end apart"
    assert torch.equal(found, expected)


@pytest.mark.parametrize("new_tokens", [1, 2, 6])
@pytest.mark.parametrize("name", TARGETS)
def test_length_limits_end_inside_a_block(name, new_tokens):
    model, inputs = tiny_own(name), prompts([9, 4])
    long = plain(model, inputs, **OPTIONS)
    drafter = RowScript(long[:, 9:].tolist(), num_draft_tokens=9).bind(model)
    found = speculative(model, inputs, drafter, max_new_tokens=new_tokens, eos_token_id=None)
    assert torch.equal(found, long[:, : 9 + new_tokens])


@pytest.mark.parametrize("name", TARGETS)
def test_a_length_counts_the_padded_width(name):
    expected, found = both(tiny_own(name), prompts([9, 4]), max_new_tokens=None, max_length=22, eos_token_id=None)
    assert expected.shape[1] == 22 and torch.equal(found, expected)


def test_a_text_ends_at_the_last_position_of_the_target():
    model, inputs = tiny_own(CROP), prompts([9, 4])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hf_specdec.integration.row_by_row.max_positions", lambda model: 20)
        expected = plain(model, inputs, **OPTIONS)
        drafter = RowScript(expected[:, 9:].tolist(), num_draft_tokens=6).bind(model)
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)
        assert drafter.last_stats.num_drafted < 2 * 11, "no draft may reach beyond column 20"


# Inputs


@pytest.mark.parametrize("name", TARGETS)
def test_one_row_with_padding(name):
    model, inputs = tiny_own(name), prompts([9, 4])
    inputs = {key: value[1:] for key, value in inputs.items()}
    expected, found = both(model, inputs, **OPTIONS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", TARGETS)
def test_prompts_shorter_than_a_convolution_and_prefilled_in_chunks(name):
    model = tiny_own(name)
    for lengths, chunk in ([1], None), ([2, 3], None), ([13], 4):
        expected, found = both(model, prompts(lengths), prefill_chunk_size=chunk, **OPTIONS)
        assert torch.equal(found, expected), lengths


def test_text_outgrows_a_chunk_of_the_delta_rule():
    """Blocks cross columns 64 and 128, where the chunked form of a gated delta net begins anew."""
    expected, found = both(tiny_own(REPLAY), prompts([40]), max_new_tokens=110, eos_token_id=None)
    assert torch.equal(found, expected)


# Processors


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"min_length": 15, "eos_token_id": list(range(40))},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda row, text: list(range(5 + 20 * row, 25 + 20 * row))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_each_row_as_in_the_batch(name, options):
    expected, found = both(tiny_own(name), prompts([9, 4, 6]), **{**OPTIONS, **options})
    assert torch.equal(found, expected)


def test_guidance_is_exact_for_one_row():
    expected, found = both(tiny_own(REPLAY), prompts([9]), **OPTIONS, guidance_scale=1.5)
    assert torch.equal(found, expected)


# Sampling


@pytest.mark.parametrize("name", TARGETS)
def test_one_seed_gives_one_text_with_any_drafter(name):
    model, inputs = tiny_own(name), prompts([9, 4])
    options = {**OPTIONS, "do_sample": True, "temperature": 0.8, "top_k": 0}
    texts = speculative(model, inputs, AutoDrafter.for_target(model, "none", seed=3), **options)
    assert not torch.equal(texts[0, 9:], texts[1, 9:])
    for drafter in (
        script(model, texts, 9, seed=3),
        RowScript(texts[:, 9:].tolist(), num_draft_tokens=7, seed=3).bind(model),
        DraftModelDrafter(tiny_target("llama"), num_draft_tokens=3, seed=3).bind(model),
    ):
        assert torch.equal(speculative(model, inputs, drafter, **options), texts)
        assert drafter.last_stats.rule == "coupled"
    other = speculative(model, inputs, AutoDrafter.for_target(model, "none", seed=4), **options)
    assert not torch.equal(other, texts)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_other_rules_run(rule):
    model, inputs = tiny_own(REPLAY), prompts([9, 4])
    drafter = DraftModelDrafter(tiny_target("llama"), num_draft_tokens=3, rule=rule, seed=3).bind(model)
    found = [speculative(model, inputs, drafter, **OPTIONS, do_sample=True) for _ in range(2)]
    assert torch.equal(*found) and drafter.last_stats.num_drafted > 0


# Outputs


@pytest.mark.parametrize("lengths", [[9], [9, 4, 6]], ids=["one row", "rows that end apart"])
@pytest.mark.filterwarnings("ignore:.*generates without drafts")
@pytest.mark.parametrize("name", [REPLAY, "mamba2", "falcon_h1", "lfm2", CROP, "mamba"])
def test_outputs_are_those_of_plain_generate(name, lengths):
    model, inputs = tiny_own(name), prompts(lengths)
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    options = {**OPTIONS, "return_dict_in_generate": True, **wanted, "repetition_penalty": 1.2}
    if len(lengths) > 1:
        free = plain(model, inputs, **options).sequences[:, 9:]
        options["eos_token_id"] = [int(free[0, 5]), int(free[2, 9])]
    expected, found = both(model, inputs, **options)
    ends = (expected.sequences[:, 9:] != PAD).sum(dim=1).tolist()
    assert len(lengths) == 1 or len(set(ends)) > 1
    assert torch.equal(found.sequences, expected.sequences)
    for key in ("scores", "logits"):
        assert len(found[key]) == len(expected[key]) == expected.sequences.shape[1] - 9
        for one, other in zip(found[key], expected[key], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert len(one) == len(other)
        for state, their_state in zip(one, other, strict=True):
            torch.testing.assert_close(state, their_state, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("new_tokens", [5, 12, 13])
@pytest.mark.parametrize("name", [REPLAY, "falcon_h1", "lfm2", CROP])
def test_the_returned_cache_serves_plain_generate_in_the_next_turn(name, new_tokens):
    model, inputs = tiny_own(name), prompts([9])
    options = {"max_new_tokens": new_tokens, "eos_token_id": None, "return_dict_in_generate": True}
    expected, found = both(model, inputs, **options)
    for one, other in zip(found.cache.layers, expected.cache.layers, strict=True):
        assert type(one) is type(other) and not getattr(one, "record_past", False)
        for key in ("keys", "values"):
            if getattr(other, key, None) is not None:
                torch.testing.assert_close(getattr(one, key), getattr(other, key), atol=1e-4, rtol=1e-3)
        for key in ("conv_states", "recurrent_states"):
            for index, state in getattr(other, key, {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(one, key)[index], state, atol=1e-4, rtol=1e-3)
    second = {"input_ids": torch.cat([found.sequences, prompts([5], seed=8)["input_ids"]], dim=1)}
    answers = [plain(model, {**second, "cache": output.cache}, **OPTIONS) for output in (expected, found)]
    assert torch.equal(*answers)


class Columns(TextStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.columns, self.ended = [], 0

    def put(self, value):
        self.columns.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("lengths", [[9], [9, 4]], ids=["one row", "batch"])
@pytest.mark.parametrize("name", TARGETS)
def test_streamers_are_given_what_plain_generate_gives_them(name, lengths):
    model, inputs = tiny_own(name), prompts(lengths)
    theirs, ours = Columns(), Columns()
    expected = plain(model, inputs, **OPTIONS, streamer=theirs)
    speculative(model, inputs, script(model, expected, 9), **OPTIONS, streamer=ours)
    assert ours.columns == theirs.columns and ours.ended == 1


def test_statistics_are_kept_by_row():
    model, inputs = tiny_own(REPLAY), prompts([9, 4])
    expected = plain(model, inputs, **OPTIONS)
    drafter = RowScript(expected[:, 9:].tolist(), right=lambda row, round: 3 * row, num_draft_tokens=3).bind(model)
    speculative(model, inputs, drafter, **OPTIONS)
    first, second = drafter.last_stats.rows
    assert first.num_accepted == 0 and second.num_accepted > 10
    assert drafter.last_stats.num_forwards == first.num_verifications + second.num_verifications
    assert "cache own, rollback replay" in drafter.last_stats.summary()


# Refusals


@pytest.mark.parametrize(
    ("lengths", "options", "match"),
    [
        ([9], {"output_attentions": True, "return_dict_in_generate": True}, "`output_attentions` is not served"),
        ([9, 4], {"max_time": 5.0, "eos_token_id": EOS}, "`max_time` with 2 rows is not served"),
        ([9, 4], {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor with 2 rows is not served"),
        ([9], {"cache": DynamicCache()}, "`cache` is yours"),
        ([9], {"inputs_embeds": torch.zeros(1, 9, 64)}, "`inputs_embeds` is not served"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_kept_exact_is_refused_before_any_forward(lengths, options, match):
    model, forwards = tiny_own(REPLAY), []
    watch = model.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=match):
            speculative(model, prompts(lengths), AutoDrafter.for_target(model, "none"), **{**OPTIONS, **options})
    finally:
        watch.remove()
    assert forwards == []


def test_padding_is_refused_where_a_cache_layer_may_count_it(monkeypatch):
    model = tiny_own(REPLAY)
    monkeypatch.setattr("hf_specdec.integration.row_by_row.unknown_layers", lambda cache: ["BlockLayer"])
    with pytest.raises(ValueError, match="without padding only: its cache has layers of class BlockLayer"):
        speculative(model, prompts([9, 4]), AutoDrafter.for_target(model, "none"))
    expected, found = both(model, prompts([9, 9]), **OPTIONS)
    assert torch.equal(found, expected)
