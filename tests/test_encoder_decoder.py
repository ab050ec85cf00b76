"""Encoder-decoder targets write plain generate's text with any drafter, row by row over their own cache."""

import copy
from types import SimpleNamespace

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import RowScript, ScriptedDrafter
from test_greedy import coin, plain, speculative
from test_own_cache_calls import Columns
from tiny import ENCODER_DECODERS, PAD, VOCAB_SIZE, perturbed, prompts, randomise, tiny_encoder_decoder, tiny_target
from transformers import FSMTConfig, FSMTForConditionalGeneration
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import hf_specdec
from hf_specdec import AutoDrafter
from hf_specdec.drafters.base import UnfitDraftModel
from hf_specdec.drafters.draft_model import DraftModelDrafter

BATCHES = {"one row": [9], "encoder padding": [9, 5, 7]}
OPTIONS = {"max_new_tokens": 24, "eos_token_id": None}


def script(model, texts, right=coin, **options):
    return RowScript([list(text) for text in texts], right=right, **{"num_draft_tokens": 4, **options}).bind(model)


def drafters(model, texts):
    yield "none", AutoDrafter.for_target(model, "none")
    yield "lookup", AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield "perfect", script(model, texts, right=lambda row, round: 1_000)
    yield "adversarial", script(model, texts, right=lambda row, round: 0)
    yield "noisy", script(model, texts)
    yield "draft model", DraftModelDrafter(perturbed(model, 0.01), num_draft_tokens=3).bind(model)


def both(model, inputs, **options):
    """(plain, with a drafter that is right now and then) of the same call."""
    expected = plain(model, inputs, **options)
    texts = expected if isinstance(expected, torch.Tensor) else expected.sequences
    start = inputs.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
    return expected, speculative(model, inputs, script(model, texts[:, start:].tolist()), **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_text_is_that_of_plain_generate(name, batch):
    model, inputs = tiny_encoder_decoder(name), prompts(BATCHES[batch])
    expected = plain(model, inputs, **OPTIONS)
    for kind, drafter in drafters(model, expected[:, 1:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected), kind
        stats = drafter.last_stats
        assert (stats.cache, stats.rollback) == ("own", "crop")
        assert [row.num_emitted for row in stats.rows] == [24] * len(expected)
        if kind == "perfect":  # the start, four whole drafts and one of three
            assert stats.num_verifications == 6 * len(expected)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_every_length_ends_where_plain_generate_does(name):
    model, inputs = tiny_encoder_decoder(name), prompts([9])
    long = plain(model, inputs, **OPTIONS)
    for length in range(1, 25):
        for right in (coin, lambda row, round: 1_000):
            drafter = script(model, long[:, 1:].tolist(), right, num_draft_tokens=5)
            found = speculative(model, inputs, drafter, max_new_tokens=length, eos_token_id=None)
            assert torch.equal(found, long[:, : 1 + length])


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_rows_that_reach_their_eos_apart_are_padded_as_plain_generate_does(name):
    model, inputs = tiny_encoder_decoder(name, seed=1), prompts([9, 5, 7])
    free = plain(model, inputs, **OPTIONS)
    for column in (3, 5, 8):
        expected, found = both(model, inputs, max_new_tokens=24, eos_token_id=[int(free[1, column])])
        assert torch.equal(found, expected)
        if int(free[1, column]) not in free[0].tolist():
            assert (expected[1] == PAD).any(), "the rows should end apart"


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_text_may_begin_with_more_than_the_start_token(name):
    model, inputs = tiny_encoder_decoder(name), prompts([9, 5])
    begun = {**inputs, "decoder_input_ids": torch.tensor([[1, 7, 8, 9], [1, 20, 21, 22]])}
    expected, found = both(model, begun, **OPTIONS)
    assert expected.shape[1] == 28 and torch.equal(found, expected)
    begun["decoder_input_ids"] = torch.tensor([[1, 7, 8, 9], [PAD, PAD, 1, 22]])
    begun["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    texts = plain(model, begun, **OPTIONS)
    for _, drafter in drafters(model, texts[:, 4:].tolist()):
        assert torch.equal(speculative(model, begun, drafter, **OPTIONS), texts)


def test_an_encoder_that_has_run_or_read_embeddings_serves_as_well():
    model, inputs = tiny_encoder_decoder("bart"), prompts([9, 5])
    mask = inputs["attention_mask"]
    given = {"encoder_outputs": model.get_encoder()(**inputs), "attention_mask": mask}
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "attention_mask": mask}
    other = DraftModelDrafter(perturbed(model, 0.01), num_draft_tokens=3).bind(model)
    for encoded in (given, embedded):
        expected = plain(model, dict(encoded), **OPTIONS)
        for drafter in (
            AutoDrafter.for_target(model, "lookup", min_ngram=1),
            DraftModelDrafter(perturbed(model, 0.0), num_draft_tokens=3).bind(model),  # the same encoder
        ):
            assert torch.equal(speculative(model, dict(encoded), drafter, **OPTIONS), expected)
        with pytest.raises(ValueError, match="`input_ids` is needed with this draft model"):
            speculative(model, dict(encoded), other, **OPTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"forced_bos_token_id": 31, "forced_eos_token_id": 32},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1, "encoder_no_repeat_ngram_size": 1},
        {"prefix_allowed_tokens_fn": lambda row, text: list(range(5 + 20 * row, 25 + 20 * row))},
        {"max_new_tokens": None, "max_length": 12},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_and_lengths_are_those_of_the_batch(options):
    options = {**OPTIONS, **options}
    expected, found = both(tiny_encoder_decoder("bart"), prompts([9, 5, 7]), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_one_seed_gives_one_text_with_any_drafter(name):
    model, inputs = tiny_encoder_decoder(name), prompts([9, 5])
    options = {**OPTIONS, "do_sample": True, "temperature": 0.8, "top_k": 0}
    texts = speculative(model, inputs, AutoDrafter.for_target(model, "none", seed=3), **options)
    for drafter in (
        script(model, texts[:, 1:].tolist(), seed=3),
        AutoDrafter.for_target(model, "lookup", min_ngram=1, seed=3),
        DraftModelDrafter(perturbed(model, 0.01), num_draft_tokens=3, seed=3).bind(model),
    ):
        assert torch.equal(speculative(model, inputs, drafter, **options), texts)
    other = speculative(model, inputs, AutoDrafter.for_target(model, "none", seed=4), **options)
    assert not torch.equal(other, texts)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_the_returned_dictionary_is_that_of_plain_generate(name, batch):
    model, inputs = tiny_encoder_decoder(name), prompts(BATCHES[batch])
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    options = {**OPTIONS, "return_dict_in_generate": True, **wanted, "repetition_penalty": 1.2}
    if len(BATCHES[batch]) > 1:
        options["eos_token_id"] = [int(plain(model, inputs, **options).sequences[1, 5])]
    expected, found = both(model, inputs, **options)
    assert type(found) is type(expected) and set(expected) - set(found) <= {"cache"}
    assert torch.equal(found.sequences, expected.sequences)
    per_layer = [found.decoder_hidden_states, expected.decoder_hidden_states]
    assert len(found.scores) == len(per_layer[0]) == len(per_layer[1]) == expected.sequences.shape[1] - 1
    ours, theirs = ([*o.scores, *o.logits, *o.encoder_hidden_states] for o in (found, expected))
    for states, part in zip(per_layer, (ours, theirs), strict=True):
        part += [layer for step in states for layer in step]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_the_returned_cache_is_that_of_plain_generate():
    expected, found = both(tiny_encoder_decoder("t5gemma"), prompts([9]), **OPTIONS, return_dict_in_generate=True)
    assert type(found.cache) is EncoderDecoderCache
    for part in ("self_attention_cache", "cross_attention_cache"):
        for ours, theirs in zip(getattr(found.cache, part).layers, getattr(expected.cache, part).layers, strict=True):
            assert type(ours) is type(theirs) and not getattr(ours, "record_past", False)
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("batch", BATCHES)
def test_streamers_are_given_what_plain_generate_gives_them(batch):
    model, inputs = tiny_encoder_decoder("bart"), prompts(BATCHES[batch])
    theirs, ours = Columns(), Columns()
    expected = plain(model, inputs, **OPTIONS, streamer=theirs)
    speculative(model, inputs, script(model, expected[:, 1:].tolist()), **OPTIONS, streamer=ours)
    assert ours.columns == theirs.columns and ours.ended == 1


def test_the_other_doors_lead_to_the_same_text():
    model, inputs = perturbed(tiny_encoder_decoder("bart"), 0.0), prompts([9])
    expected = plain(model, inputs, **OPTIONS)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(plain(model, inputs, **OPTIONS, custom_generate=hf_specdec.SpecGenerate(drafter)), expected)
    assert torch.equal(speculative(hf_specdec.enable(model), inputs, drafter, **OPTIONS), expected)


def test_a_cache_that_is_not_cropped_would_change_the_text(monkeypatch):
    """Negative control."""
    model, inputs = tiny_encoder_decoder("bart"), prompts([9])
    expected = plain(model, inputs, **OPTIONS)
    drafter = script(model, expected[:, 1:].tolist(), right=lambda row, round: 1)
    assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)
    monkeypatch.setattr(DynamicCache, "crop", lambda self, tokens_to_remove: None)
    assert not torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)


@pytest.mark.filterwarnings("ignore:.*generates without drafts")
def test_a_model_that_takes_single_tokens_only_generates_without_drafts():
    shape = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    sizes = {"src_vocab_size": VOCAB_SIZE, "tgt_vocab_size": VOCAB_SIZE, "langs": ["en", "de"]}
    model = FSMTForConditionalGeneration(FSMTConfig(**shape, **heads, **sizes)).eval()
    randomise(model, 0)
    expected, found = both(model, prompts([9, 5]), **OPTIONS, num_beams=1)
    assert torch.equal(found, expected)


# Drafters


def test_lookup_copies_from_what_the_encoder_read():
    model = tiny_encoder_decoder("bart")
    rows = SimpleNamespace(texts=[[1, 6], [1, 6]], ids=torch.zeros(2, 8), finished=[False, False])
    source = SimpleNamespace(ids=[[5, 6, 7, 8, 9, 2], [30, 31, 2]])
    request = SimpleNamespace(rows=rows, source=source, vocab_size=VOCAB_SIZE)
    session = AutoDrafter.for_target(model, "lookup", min_ngram=1).start(request)
    assert session.propose([3, 3], 1).tokens[0].tolist() == [7, 8, 9]
    rows.texts[0] += [7, 8, 40, 7]  # the text itself is the more recent place
    rows.texts[1] += [30]
    assert session.propose([2, 2], 2).tokens.tolist() == [[8, 40], [31, 2]]


def test_lookup_reads_the_source_without_its_padding_and_only_where_it_is_tokens():
    model, seen = tiny_encoder_decoder("bart"), []

    class Reads(ScriptedDrafter):
        def start(self, request):
            seen.append(request.source.ids)
            return super().start(request)

    for inputs in (prompts([4, 2]), {"encoder_outputs": model.get_encoder()(**prompts([4, 2]))}):
        speculative(
            model, inputs, Reads([[]], right=lambda *_: 0).bind(model), max_new_tokens=2, num_return_sequences=1
        )
    ids = prompts([4, 2])["input_ids"].tolist()
    assert seen == [[ids[0]], [ids[1][2:]], None, None]


def test_a_draft_model_runs_its_encoder_once_or_takes_the_targets_where_it_is_the_same():
    model, inputs = tiny_encoder_decoder("t5"), prompts([9])
    expected = plain(model, inputs, **OPTIONS)
    for amount, runs in ((0.0, 0), (0.002, 1)):
        small, ran = perturbed(model, amount), []
        small.get_encoder().register_forward_hook(lambda *_, ran=ran: ran.append(1))
        drafter = DraftModelDrafter(small, num_draft_tokens=4).bind(model)
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)
        assert len(ran) == runs and drafter.last_stats.num_accepted > 8
    assert drafter.last_stats.num_drafted > drafter.last_stats.num_accepted, "some drafts should be rejected"


def test_a_draft_model_is_loaded_by_name(tmp_path):
    model, inputs = tiny_encoder_decoder("bart"), prompts([9])
    perturbed(model, 0.002).save_pretrained(tmp_path)
    assert AutoDrafter.detect(tmp_path).variant == "transformers encoder-decoder"
    expected = plain(model, inputs, **OPTIONS)
    for drafter in (AutoDrafter.from_pretrained(tmp_path, target=model), str(tmp_path)):
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)


def test_draft_models_that_do_not_fit_are_refused():
    bart, whisper = tiny_encoder_decoder("bart"), tiny_encoder_decoder("whisper")
    with pytest.raises(UnfitDraftModel, match="BartForConditionalGeneration, which needs an encoder, and Llama"):
        DraftModelDrafter(bart).bind(tiny_target("llama"))
    with pytest.raises(UnfitDraftModel, match="reads 'input_features' and BartForConditionalGeneration 'input_ids'"):
        DraftModelDrafter(whisper).bind(bart)
    other = copy.copy(whisper)
    other.config = copy.deepcopy(whisper.config)
    other.config.num_mel_bins = 80
    with pytest.raises(UnfitDraftModel, match="num_mel_bins of the draft model is 80"):
        DraftModelDrafter(other).bind(whisper)


# Refusals


def test_heads_that_read_hidden_states_are_refused_when_they_are_bound(tmp_path):
    model = tiny_encoder_decoder("t5")
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder, and a 'scripted' drafter"):
        ScriptedDrafter([[]], hidden_states=(0,)).bind(model)
    with pytest.raises(ValueError, match="is an encoder-decoder, and a 'eagle3' drafter"):
        AutoDrafter.from_pretrained(write_head(tmp_path, random_head()), target=model)


@pytest.mark.parametrize(
    ("lengths", "options", "match"),
    [
        ([9], {"num_beams": 2}, "`num_beams` is 2"),
        ([9], {"output_attentions": True, "return_dict_in_generate": True}, "`output_attentions` is not served"),
        ([9], {"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())}, "`cache` is yours"),
        ([9, 4], {"max_time": 5.0}, "`max_time` with 2 rows is not served"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_kept_exact_is_refused_before_any_forward_of_the_text(lengths, options, match):
    model, forwards = tiny_encoder_decoder("bart"), []
    watch = model.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=match):
            drafter = AutoDrafter.for_target(model, "none")
            speculative(model, prompts(lengths), drafter, **{"max_new_tokens": 4, **options})
    finally:
        watch.remove()
    assert forwards == []
