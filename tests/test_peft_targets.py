"""Targets with LoRA adapters: plain generate's text with whichever adapter is active."""

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import ScriptedDrafter
from test_greedy import coin
from tiny import perturbed, prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

peft = pytest.importorskip("peft")

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
MODULES = {"attention": ["q_proj", "v_proj"], "embedding and head too": ["q_proj", "embed_tokens", "lm_head"]}


def adapted(modules):
    """A target with two random adapters, the first of them active."""
    config = peft.LoraConfig(r=4, target_modules=MODULES[modules], init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(perturbed(tiny_target(), 0.0), config, adapter_name="first")
        model.add_adapter("second", config)
    return model.eval()


def drafters(target, texts, folder):
    borrowed = random_head(draft_vocab_size=97).with_tensors(lm_head__weight=None)
    yield AutoDrafter.for_target(target, "lookup", min_ngram=1)
    yield DraftModelDrafter(perturbed(tiny_target(), 0.03), num_draft_tokens=4).bind(target)
    yield ScriptedDrafter(texts, right=coin, num_draft_tokens=5).bind(target)
    yield AutoDrafter.from_pretrained(write_head(folder / "full", random_head()), target=target)
    yield AutoDrafter.from_pretrained(write_head(folder / "borrowed", borrowed, "SpecForge"), target=target)


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("bound_to", ["the wrapper", "the model inside"])
def test_text_is_that_of_plain_generate(tmp_path, bound_to, modules):
    model, inputs = adapted(modules), prompts([9, 4])
    target = model if bound_to == "the wrapper" else model.get_base_model()
    expected = model.generate(**inputs, **OPTIONS)
    assert not torch.equal(expected, tiny_target().generate(**inputs, **OPTIONS)), "the adapter should matter"
    for drafter in drafters(target, expected[:, 9:].tolist(), tmp_path):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected), drafter.method
        assert torch.equal(model.base_model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)


def test_the_active_adapter_may_change_between_calls(tmp_path):
    model, inputs = adapted("attention"), prompts([9, 4])
    expected = {}
    for adapter in ("first", "second"):
        model.set_adapter(adapter)
        expected[adapter] = model.generate(**inputs, **OPTIONS)
    with model.disable_adapter():
        expected["none"] = model.generate(**inputs, **OPTIONS)
    assert len({str(text.tolist()) for text in expected.values()}) == 3
    for drafter in list(drafters(model, expected["first"][:, 9:].tolist(), tmp_path)):
        for adapter in ("first", "second", "first"):
            model.set_adapter(adapter)
            found = model.generate(**inputs, **OPTIONS, assistant_model=drafter)
            assert torch.equal(found, expected[adapter]), (drafter.method, adapter)
        with model.disable_adapter():
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected["none"])


def test_the_target_without_its_adapter_drafts_for_itself():
    """A merged copy of the model inside is a draft model like any other."""
    model, inputs = adapted("attention"), prompts([9, 4])
    expected = model.generate(**inputs, **OPTIONS)
    drafter = DraftModelDrafter(tiny_target(), num_draft_tokens=3).bind(model)
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)
    assert 0 <= drafter.last_stats.acceptance_rate < 1
