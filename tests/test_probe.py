"""The self-check: a model that is wrong over ragged rows is found, and a good one is let through."""

import gc

import pytest
import torch
from test_greedy import plain, speculative
from test_ragged_model import MODELS, build, target
from tiny import prompts, tiny_config

from hf_specdec import AutoDrafter
from hf_specdec.decoding.cache import RaggedCache
from hf_specdec.decoding.ragged_model import RaggedModel
from hf_specdec.integration import probe
from hf_specdec.integration.probe import measure


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_the_self_check_of_a_good_model_finds_rounding_only(name, attention):
    error, allowed = measure(target(name, attention))
    assert error < 1e-4
    assert 1e-3 <= allowed < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_the_self_check_allows_for_half_precision(name, dtype):
    model = build(tiny_config(name)).to(dtype)
    error, allowed = measure(model)
    assert error < allowed


def no_padding(patch):
    init = RaggedModel.__init__
    patch.setattr(RaggedModel, "__init__", lambda self, model, mask, *rest: init(self, model, None, *rest))


def no_window(patch):
    patch.setattr(RaggedModel, "_limit", lambda self, kind, visible, queries, keys: visible)


def one_token_too_far(patch):
    masks = RaggedModel.masks
    patch.setattr(RaggedModel, "masks", lambda self, offsets, count: masks(self, offsets + 1, count))


def one_token_too_few(patch):
    masks = RaggedModel.masks
    patch.setattr(RaggedModel, "masks", lambda self, offsets, count: masks(self, offsets - 1, count))


def positions_off_by_one(patch):
    forward = RaggedModel.forward
    patch.setattr(
        RaggedModel,
        "forward",
        lambda self, tokens, offsets, host, positions, **kwargs: forward(
            self, tokens, offsets, host, positions + 1, **kwargs
        ),
    )


def one_slot_late(patch):
    place = RaggedCache.place
    patch.setattr(
        RaggedCache, "place", lambda self, offsets, host, count: place(self, offsets + 1, [o + 1 for o in host], count)
    )


def rows_take_the_first_rows_offset(patch):
    place = RaggedCache.place
    patch.setattr(
        RaggedCache,
        "place",
        lambda self, offsets, host, count: place(self, offsets[:1].expand_as(offsets), [max(host)] * len(host), count),
    )


FAULTS = {
    no_padding: ["llama", "gpt2"],
    no_window: ["mistral", "gemma3", "gpt_oss", "llama4"],
    one_token_too_far: ["llama", "gemma3", "gpt2"],
    one_token_too_few: ["llama", "gemma3", "gpt2"],
    positions_off_by_one: ["llama", "qwen3", "gpt2", "gpt_oss"],
    one_slot_late: ["llama", "mistral", "gpt2"],
    rows_take_the_first_rows_offset: ["llama", "gemma3"],
}


@pytest.mark.parametrize(
    ("fault", "name"),
    [pytest.param(fault, name, id=f"{fault.__name__}-{name}") for fault, names in FAULTS.items() for name in names],
)
def test_the_self_check_finds_what_was_broken_on_purpose(fault, name, monkeypatch):
    fault(monkeypatch)
    error, allowed = measure(target(name))
    assert error > 10 * allowed


@pytest.mark.parametrize("fault", [one_token_too_few, one_slot_late, no_padding], ids=lambda fault: fault.__name__)
def test_the_self_check_finds_faults_in_half_precision(fault, monkeypatch):
    model = build(tiny_config("llama")).to(torch.bfloat16)
    assert measure(model)[0] < measure(model)[1]
    fault(monkeypatch)
    error, allowed = measure(model)
    assert error > allowed


def test_a_model_that_fails_the_self_check_takes_another_path(monkeypatch):
    model = build(tiny_config("mistral"))
    inputs = prompts([5])
    no_window(monkeypatch)
    with pytest.raises(probe.NotRagged, match="differ from its own one-token steps"):
        probe.check_ragged(model)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(speculative(model, inputs, drafter), plain(model, inputs))
    assert drafter.last_stats.cache == "own"


def test_a_model_whose_logits_are_not_numbers_is_refused():
    model = build(tiny_config("llama"))
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match=r"gives NaN logits in torch\.float32"):
        speculative(model, prompts([5]), AutoDrafter.for_target(model, "none"))


def test_the_self_check_leaves_torchs_random_state_alone():
    model = target("gpt_oss")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    measure(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def checks(monkeypatch):
    """The models that were measured, by type and dtype."""
    measured = []

    def counted(model):
        measured.append(model.dtype)
        return measure(model)

    monkeypatch.setattr(probe, "measure", counted)
    return measured


def test_the_self_check_is_made_once_a_model_and_dtype(checks):
    model, inputs = build(tiny_config("llama")), prompts([5])
    for _ in range(3):
        speculative(model, inputs, AutoDrafter.for_target(model, "none"), max_new_tokens=3)
    assert checks == [torch.float32]
    model.to(torch.bfloat16)
    for _ in range(2):
        speculative(model, inputs, AutoDrafter.for_target(model, "lookup"), max_new_tokens=3)
    assert checks == [torch.float32, torch.bfloat16]
    model.set_attn_implementation("eager")
    speculative(model, inputs, AutoDrafter.for_target(model, "none"), max_new_tokens=3)
    assert len(checks) == 3
    other = build(tiny_config("llama"))
    speculative(other, inputs, AutoDrafter.for_target(other, "none"), max_new_tokens=3)
    assert len(checks) == 4


def test_the_self_check_does_not_keep_a_model_alive():
    gc.collect()
    before = len(probe._verdicts)
    model = build(tiny_config("llama"))
    probe.check_ragged(model)
    assert len(probe._verdicts) == before + 1
    del model
    gc.collect()
    assert len(probe._verdicts) == before


def test_a_model_in_training_mode_is_not_measured(checks):
    """Dropout would make any two forwards differ."""
    model = build(tiny_config("llama")).train()
    speculative(model, prompts([5]), AutoDrafter.for_target(model, "none"), max_new_tokens=3)
    assert checks == []
