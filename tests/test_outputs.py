"""The returned dictionary is plain generate's: same lengths, same shapes, same values."""

import copy
import functools

import pytest
import torch
from eagle3_formats import random_head, write_head
from test_greedy import drafters
from tiny import EOS, TARGETS, prompts, tiny_config, tiny_target
from transformers import StoppingCriteria

from hf_specdec import AutoDrafter
from hf_specdec.decoding.ragged_model import RaggedModel
from hf_specdec.drafters.eagle3.modeling import Eagle3Model

EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
BATCHES = {"one row": [11], "rows in step": [11, 5, 8], "rows that end apart": [11, 5, 8, 2]}


@functools.cache
def eager_target(name: str) -> torch.nn.Module:
    """Only the eager backend returns attentions."""
    model = copy.deepcopy(tiny_target(name))
    model.set_attn_implementation("eager")
    return model


def options_of(model, batch: str) -> dict:
    """Greedy decoding; some rows reach an eos early where they are to end apart."""
    options = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True, "eos_token_id": EOS}
    if batch == "rows that end apart":
        free = model.generate(**inputs_of(batch), **options).sequences[:, 11:]
        options["eos_token_id"] = [int(free[0, 6]), int(free[1, 11]), int(free[2, 2])]
        ends = (model.generate(**inputs_of(batch), **options).sequences[:, 11:] != 0).sum(dim=1)
        assert len(set(ends.tolist())) > 1
    return options


def inputs_of(batch: str) -> dict[str, torch.Tensor]:
    return prompts(BATCHES[batch], seed=3)


def assert_same(found, expected, path: str) -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, tuple):
        assert len(found) == len(expected), path
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif expected is not None:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{path}: {text}")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_every_output_is_that_of_plain_generate(name, batch):
    model, inputs = eager_target(name), inputs_of(batch)
    options = {**options_of(model, batch), **EVERYTHING, "repetition_penalty": 1.2}
    expected = model.generate(**inputs, **options)
    for kind, drafter in drafters(model, expected.sequences[:, 11:].tolist()):
        found = model.generate(**inputs, **options, assistant_model=drafter)
        assert found.keys() - {"specdec"} == expected.keys()
        for key in ("sequences", "scores", "logits", "hidden_states", "attentions"):
            assert_same(found[key], expected[key], f"{kind}: {key}")
        for one, other in zip(found.cache.layers, expected.cache.layers, strict=True):
            assert_same((one.keys, one.values), (other.keys, other.values), f"{kind}: cache")
            assert one.get_seq_length() == other.get_seq_length()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_attentions_are_as_empty_as_in_plain_generate_where_the_backend_gives_none(name):
    model, inputs = tiny_target(name), inputs_of("one row")
    assert model.config._attn_implementation == "sdpa"
    options = dict(max_new_tokens=6, eos_token_id=None, output_attentions=True, return_dict_in_generate=True)
    expected = model.generate(**inputs, **options)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert model.generate(**inputs, **options, assistant_model=drafter).attentions == expected.attentions


def test_outputs_are_whole_while_the_drafter_taps_hidden_states(tmp_path):
    model, batch = eager_target("llama"), "rows that end apart"
    head = random_head(target_layers=tiny_config("llama").num_hidden_layers, aux_layers=(0, 2, 3))
    drafter = AutoDrafter.from_pretrained(write_head(tmp_path, head), target=model)
    options, seen = options_of(model, batch), []
    expected = model.generate(**inputs_of(batch), **options, **EVERYTHING)
    fuse = Eagle3Model.fuse
    for extra in ({}, EVERYTHING):
        features: list[torch.Tensor] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Eagle3Model, "fuse", lambda self, x, seen=features: seen.append(x) or fuse(self, x))
            found = model.generate(**inputs_of(batch), **options, **extra, assistant_model=drafter)
        seen.append(features[0])
    assert_same(found.hidden_states, expected.hidden_states, "hidden_states")
    assert_same(tuple(seen[1]), tuple(seen[0]), "what the head reads")


@pytest.mark.parametrize("kept", [(name,) for name in EVERYTHING] + [()])
def test_only_what_is_asked_for_is_returned(kept):
    model, batch = eager_target("llama"), "rows that end apart"
    options = {**options_of(model, batch), **dict.fromkeys(kept, True)}
    expected = model.generate(**inputs_of(batch), **options)
    found = model.generate(
        **inputs_of(batch), **options, assistant_model=AutoDrafter.for_target(model, "lookup", min_ngram=1)
    )
    for key in ("scores", "logits", "hidden_states", "attentions"):
        assert_same(found.get(key), expected.get(key), key)


class EndsOnItsScores(StoppingCriteria):
    """Ends a row by what the scores of its newest and its first token say, and remembers what it was shown."""

    def __init__(self):
        self.shown: dict[int, tuple[torch.Tensor, ...]] = {}

    def __call__(self, ids, scores, **kwargs):
        self.shown[ids.shape[1]] = scores
        newest = scores[-1].gather(1, ids[:, -1:])[:, 0]
        first = scores[0].gather(1, ids[:, -len(scores), None])[:, 0]
        return ((10 * newest).round() + (10 * first).round()) % 6 == 0


@pytest.mark.parametrize("batch", BATCHES)
def test_a_criterion_that_reads_scores_ends_rows_as_in_plain_generate(batch):
    model = tiny_target()
    options = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True, "output_scores": True}
    options["eos_token_id"] = EOS
    theirs = EndsOnItsScores()
    expected = model.generate(**inputs_of(batch), **options, stopping_criteria=[theirs])
    assert 12 < expected.sequences.shape[1] < 27, "it should end rows"
    for kind, drafter in drafters(model, expected.sequences[:, 11:].tolist()):
        ours = EndsOnItsScores()
        found = model.generate(**inputs_of(batch), **options, stopping_criteria=[ours], assistant_model=drafter)
        assert torch.equal(found.sequences, expected.sequences), kind
        assert_same(found.scores, expected.scores, kind)
        assert all(len(scores) == width - 11 for width, scores in ours.shown.items()), kind


def test_nothing_is_returned_without_a_dictionary():
    model, inputs = tiny_target(), inputs_of("rows in step")
    options = {"do_sample": False, "max_new_tokens": 8, "output_hidden_states": True, "output_scores": True}
    found = model.generate(**inputs, **options, assistant_model=AutoDrafter.for_target(model, "lookup", min_ngram=1))
    assert torch.equal(found, model.generate(**inputs, **options))


def test_rows_that_have_finished_leave_the_work(monkeypatch):
    model, batch = tiny_target(), "rows that end apart"
    options = {**options_of(model, batch), "return_dict_in_generate": False}
    expected = model.generate(**inputs_of(batch), **options)
    rows: list[int] = []
    embed = model.get_input_embeddings()
    watch = embed.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[0]))
    try:
        for kind, drafter in drafters(model, expected[:, 11:].tolist()):
            rows.clear()
            assert torch.equal(model.generate(**inputs_of(batch), **options, assistant_model=drafter), expected), kind
            if kind != "draft model":  # its copy of the embedding is not watched, but the target's is
                assert rows[0] == 4 and rows[-1] == 1 and rows == sorted(rows, reverse=True), kind
    finally:
        watch.remove()
    monkeypatch.setattr(RaggedModel, "drop", lambda self, finished: None)
    for kind, drafter in drafters(model, expected[:, 11:].tolist()):
        assert torch.equal(model.generate(**inputs_of(batch), **options, assistant_model=drafter), expected), kind
