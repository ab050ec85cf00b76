"""Whisper, whose own `generate` is wrapped around transformers', and the speech recognition pipeline."""

import copy

import numpy
import pytest
import torch
import transformers
from eagle3_formats import random_head, write_head
from scripted import RowScript
from test_greedy import coin
from tiny import EOS, perturbed, tiny_encoder_decoder, tiny_tokenizer
from transformers import WhisperFeatureExtractor, WhisperForCausalLM

import hf_specdec
from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

NEW_TOKENS = 12


def heard(rows: int, frames: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random features [rows, 8, frames]; 100 frames fill one segment."""
    features = torch.randn(rows, 8, frames, generator=torch.Generator().manual_seed(seed))
    return {"input_features": features, "attention_mask": torch.ones(rows, frames, dtype=torch.long)}


def distilled(model):
    """A draft model with the target's own encoder, as DistilWhisper has it."""
    small = perturbed(model, 0.0)
    randomised = perturbed(model, 0.01)
    small.model.decoder.load_state_dict(randomised.model.decoder.state_dict())
    return small


def decoder_alone(model) -> WhisperForCausalLM:
    alone = WhisperForCausalLM(copy.deepcopy(model.config)).eval()
    alone.model.decoder.load_state_dict(distilled(model).model.decoder.state_dict())
    alone.proj_out.load_state_dict(model.proj_out.state_dict())
    return alone


def drafters(model):
    yield "none", AutoDrafter.for_target(model, "none")
    yield "lookup", AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield "another encoder", DraftModelDrafter(perturbed(model, 0.01), num_draft_tokens=4).bind(model)
    yield "the same encoder", DraftModelDrafter(distilled(model), num_draft_tokens=4).bind(model)
    yield "a decoder alone", DraftModelDrafter(decoder_alone(model), num_draft_tokens=4).bind(model)


SEGMENTS = {"short": (100, {}), "timestamps": (100, {"return_timestamps": True})}
SEGMENTS["long"] = (170, {"return_timestamps": True})
SEGMENTS["long, conditioned"] = (170, {"return_timestamps": True, "condition_on_prev_tokens": True})


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", SEGMENTS)
def test_text_is_that_of_plain_generate(case, rows):
    frames, options = SEGMENTS[case]
    model, inputs = perturbed(tiny_encoder_decoder("whisper", seed=1), 0.0), heard(rows, frames)
    model.generation_config = copy.deepcopy(tiny_encoder_decoder("whisper").generation_config)
    if options:  # tokens from 61 on are times; without this the texts of the other tests hold none
        model.generation_config.no_timestamps_token_id = 60
    expected = model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS)
    for kind, drafter in drafters(model):
        found = model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS, assistant_model=drafter)
        assert torch.equal(found, expected), kind
        assert (drafter.last_stats.cache, drafter.last_stats.rollback) == ("own", "crop")
        assert kind == "none" or drafter.last_stats.num_drafted > 0


def test_a_text_runs_to_the_last_position():
    model, inputs = tiny_encoder_decoder("whisper"), heard(1, 100)
    expected = model.generate(**inputs, max_length=60, min_length=60)
    drafter = RowScript(expected.tolist(), right=coin, num_draft_tokens=6).bind(model)
    assert torch.equal(model.generate(**inputs, max_length=60, min_length=60, assistant_model=drafter), expected)


def test_tokens_that_may_not_begin_a_text_stay_forbidden_beside_a_drafter():
    """Whisper's generate lifts that for every `assistant_model`, which here would end the text at once."""
    model, inputs = perturbed(tiny_encoder_decoder("whisper"), 0.0), heard(1, 100)
    model.generation_config = copy.deepcopy(tiny_encoder_decoder("whisper").generation_config)
    first = int(model.generate(**inputs, max_new_tokens=1)[0, -1])
    model.generation_config.begin_suppress_tokens = [first]
    expected = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter), expected)
    unwrapped = type(model).generate.__wrapped__
    assert not torch.equal(unwrapped(model, **inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter), expected)


def test_outputs_are_those_of_plain_generate():
    model, inputs = tiny_encoder_decoder("whisper"), heard(3, 100)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    options = {**wanted, "max_new_tokens": NEW_TOKENS}
    expected = model.generate(**inputs, **options)
    found = model.generate(**inputs, **options, assistant_model=AutoDrafter.for_target(model, "lookup", min_ngram=1))
    assert torch.equal(found.sequences, expected.sequences) and len(found.scores) == len(expected.scores)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_streamer_is_given_what_plain_generate_gives_it():
    from test_own_cache_calls import Columns

    model, inputs = tiny_encoder_decoder("whisper"), heard(1, 100)
    theirs, ours = Columns(), Columns()
    model.generate(**inputs, max_new_tokens=NEW_TOKENS, streamer=theirs)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    model.generate(**inputs, max_new_tokens=NEW_TOKENS, streamer=ours, assistant_model=drafter)
    assert ours.columns == theirs.columns and ours.ended == theirs.ended == 1


def test_the_other_doors_lead_to_the_same_text(tmp_path):
    model, inputs = tiny_encoder_decoder("whisper"), heard(1, 100)
    options = {**inputs, "max_new_tokens": NEW_TOKENS}
    expected = model.generate(**options)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(model.generate(**options, custom_generate=hf_specdec.SpecGenerate(drafter)), expected)
    distilled(model).save_pretrained(tmp_path)
    assert torch.equal(model.generate(**options, assistant_model=str(tmp_path)), expected)
    hf_specdec.uninstall()
    try:
        one = perturbed(model, 0.0)
        one.generation_config = model.generation_config
        assert torch.equal(hf_specdec.enable(one).generate(**options, assistant_model=drafter.bind(one)), expected)
    finally:
        hf_specdec.install()
    assert drafter.last_stats.num_emitted > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "`num_beams` is 2"),
        ({"use_cache": False}, "`use_cache` is False"),
        ({"assistant_tokenizer": object()}, "`assistant_tokenizer` is given beside a drafter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused_is_refused_before_any_forward(options, match):
    model, forwards = tiny_encoder_decoder("whisper"), []
    watch = model.get_encoder().register_forward_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=match):
            drafter = AutoDrafter.for_target(model, "none")
            model.generate(**heard(1, 100), **options, max_new_tokens=4, assistant_model=drafter)
    finally:
        watch.remove()
    assert forwards == []


class Words(type(tiny_tokenizer())):
    """Tiny words for Whisper's pipeline."""

    def _decode_asr(self, outputs, **options):
        return self.decode(outputs[0]["tokens"][0]), {}


def test_the_speech_recognition_pipeline_takes_drafters_and_their_names(tmp_path):
    model, tokenizer = tiny_encoder_decoder("whisper"), tiny_tokenizer()
    tokenizer.__class__ = Words
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    parts = {"model": model, "tokenizer": tokenizer, "feature_extractor": extractor}
    sound = numpy.random.default_rng(0).standard_normal(16_000).astype("float32")
    options = {"max_new_tokens": NEW_TOKENS, "num_beams": 1, "eos_token_id": EOS}

    def pipeline(**assistant):
        return transformers.pipeline("automatic-speech-recognition", **parts, **assistant)

    expected = pipeline()(sound, generate_kwargs=options)
    distilled(model).save_pretrained(tmp_path / "small")
    for assistant in (AutoDrafter.for_target(model, "lookup", min_ngram=1), str(tmp_path / "small")):
        pipe = pipeline(assistant_model=assistant)
        assert pipe(sound, generate_kwargs=options) == expected
        assert pipe.assistant_model.last_stats.num_emitted > 0
        with pytest.raises(ValueError, match=r"`num_beams` is 5; .* use 1"):  # this pipeline's default
            pipe(sound, generate_kwargs={"max_new_tokens": 4})
    head = write_head(tmp_path / "head", random_head())
    with pytest.raises(ValueError, match="is an encoder-decoder, and a 'eagle3' drafter"):
        pipeline(assistant_model=str(head))
