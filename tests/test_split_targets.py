"""Targets over several devices, and drafters on another one. The devices are simulated: see `devices`."""

import pytest
import torch
from devices import MixedDevices, SimulatedDevices, put, split
from eagle3_formats import random_head, write_head
from scripted import ScriptedDrafter
from test_greedy import coin
from test_outputs import EVERYTHING, assert_same, eager_target
from test_static_caches import assert_same_cache
from tiny import perturbed, prompts, tiny_target
from tiny_hybrids import tiny_own
from transformers import DynamicCache

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.draft_model.session import DraftModelSession

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
BATCHES = {"one row": [9], "ragged batch": [9, 4, 6]}
FIRST, SECOND, THIRD = "xpu:0", "xpu:1", "xpu:2"  # no CUDA: kernels would be asked for


def split_target(model):
    """A copy with the first layer on one device and the rest on another."""
    model = perturbed(model, 0.0)
    model.set_attn_implementation(model.config._attn_implementation)
    inner = [name for name, _ in model.model.named_children() if name != "layers"]
    devices = {f"model.{name}": SECOND if name == "norm" else FIRST for name in inner}
    layers = {f"model.layers.{i}": SECOND if i else FIRST for i in range(len(model.model.layers))}
    return split(model, {**devices, **layers, "lm_head": SECOND})


def on_first(inputs):
    return {name: value.to(FIRST) for name, value in inputs.items()}


def drafters(model, base, texts, folder):
    """Drafters on a third device."""
    layers = base.config.num_hidden_layers
    borrowed = random_head(target_layers=layers, draft_vocab_size=97).with_tensors(lm_head__weight=None)
    paths = [
        write_head(folder / "full", random_head(target_layers=layers)),
        write_head(folder / "borrowed", borrowed, "SpecForge"),
    ]
    yield AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield AutoDrafter.for_target(model, "none")
    yield DraftModelDrafter(put(perturbed(base, 0.03), THIRD), num_draft_tokens=4).bind(model)
    yield ScriptedDrafter(texts, right=coin, num_draft_tokens=5).bind(model)
    for path in paths:
        yield put(AutoDrafter.from_pretrained(path, target=base), THIRD).bind(model)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_text_is_that_of_plain_generate(tmp_path, name, batch):
    base = tiny_target(name)
    free = base.generate(**prompts(BATCHES[batch]), **OPTIONS)
    options = {**OPTIONS, "eos_token_id": [int(free[0, 20]), int(free[-1, 14])], "repetition_penalty": 1.1}
    expected = base.generate(**prompts(BATCHES[batch]), **options)
    model = split_target(base)
    for drafter in list(drafters(model, base, expected[:, 9:].tolist(), tmp_path)):
        with SimulatedDevices() as devices:
            found = model.generate(**on_first(prompts(BATCHES[batch])), **options, assistant_model=drafter)
            assert str(found.device) == FIRST
        assert torch.equal(found, expected), drafter.method
        assert devices.copies > 0


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection", "block"])
def test_sampled_text_is_that_of_one_device(tmp_path, rule):
    base = tiny_target()
    options = {**OPTIONS, "do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}
    small = perturbed(base, 0.03)
    here = DraftModelDrafter(small, num_draft_tokens=4, rule=rule, seed=3).bind(base)
    expected = base.generate(**prompts([9, 4]), **options, assistant_model=here)
    model, there = split_target(base), DraftModelDrafter(perturbed(small, 0.0), num_draft_tokens=4, rule=rule, seed=3)
    put(there, THIRD).bind(model)
    with SimulatedDevices():
        found = model.generate(**on_first(prompts([9, 4])), **options, assistant_model=there)
    assert torch.equal(found, expected)
    assert there.last_stats.num_accepted == here.last_stats.num_accepted


def test_every_output_and_the_cache_are_those_of_plain_generate():
    base = eager_target("llama")
    options = {**OPTIONS, **EVERYTHING, "return_dict_in_generate": True, "max_new_tokens": 8}
    expected = base.generate(**prompts([9, 4]), **options)
    model = split_target(base)
    model.set_attn_implementation("eager")
    drafter = ScriptedDrafter(expected.sequences[:, 9:].tolist(), right=coin, num_draft_tokens=5).bind(model)
    with SimulatedDevices():
        cache = DynamicCache(config=model.config)
        found = model.generate(**on_first(prompts([9, 4])), **options, cache=cache, assistant_model=drafter)
        assert [str(layer.keys.device) for layer in cache.layers] == [FIRST, SECOND, SECOND]
    for key in ("sequences", "scores", "logits", "hidden_states", "attentions"):
        assert_same(found[key], expected[key], key)
    assert_same_cache(cache, expected.cache)


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_targets_with_a_cache_of_their_own(name):
    base = tiny_own(name)
    expected = base.generate(**prompts([9, 4]), **OPTIONS)
    model = split_target(base)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    with SimulatedDevices():
        found = model.generate(**on_first(prompts([9, 4])), **OPTIONS, assistant_model=drafter)
    assert torch.equal(found, expected)
    assert drafter.last_stats.cache == "own"


def test_a_drafter_that_forgets_where_it_is_fails_here(monkeypatch):
    model = split_target(tiny_target())
    drafter = DraftModelDrafter(put(perturbed(tiny_target(), 0.03), THIRD)).bind(model)
    start = DraftModelSession.__init__

    def at_the_targets(self, *args):
        start(self, *args)
        self.device = torch.device(FIRST)

    monkeypatch.setattr(DraftModelSession, "__init__", at_the_targets)
    with SimulatedDevices(), pytest.raises(MixedDevices):
        model.generate(**on_first(prompts([9, 4])), **OPTIONS, assistant_model=drafter)
