"""Targets whose weights accelerate keeps on the disk or elsewhere: plain generate's text, and the same drafts."""

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import ScriptedDrafter
from test_greedy import coin
from tiny import TARGETS, perturbed, prompts, tiny_target
from tiny_hybrids import tiny_own
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.decoding.placement import input_device
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle3.session import Eagle3Session

accelerate = pytest.importorskip("accelerate")

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
BATCHES = {"one row": [9], "ragged batch": [9, 4, 6]}
CPU = torch.device("cpu")
SPLIT = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
SPLIT |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
MAPS = {
    "layers and head on the disk": SPLIT,
    "embedding on the disk": {**SPLIT, "model.embed_tokens": "disk"},
    "all on the disk": {"": "disk"},
}
PLACES = ("cpu_offload", "disk_offload", "disk_offload with buffers", *MAPS)


def offloaded(model, place, folder):
    """A copy of a model whose weights are elsewhere between forwards."""
    model = perturbed(model, 0.0)
    if place in MAPS:
        model.save_pretrained(folder / "model")
        options = {"device_map": MAPS[place], "offload_folder": str(folder / "offload"), "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(folder / "model", **options)
    if place == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=CPU)
    accelerate.disk_offload(model, str(folder / "offload"), execution_device=CPU, offload_buffers="buffers" in place)
    return model


def heads(folder, target):
    """EAGLE-3 heads that take from the target: its embedding; its output head too; or nothing."""
    borrowed = random_head(draft_vocab_size=97).with_tensors(lm_head__weight=None)
    for name, head, format, options in (
        ("embedding", random_head(), "speculators, old", {}),
        ("embedding and head", borrowed, "SpecForge", {}),
        ("nothing", random_head(own_embedding=True), "speculators, old", {"own_embedding": True}),
    ):
        path = write_head(folder / name, head, format)
        yield AutoDrafter.from_pretrained(path, target=target, num_draft_tokens=3, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("place", PLACES)
def test_text_is_that_of_plain_generate(tmp_path, place, batch):
    inputs, expected = prompts(BATCHES[batch]), tiny_target().generate(**prompts(BATCHES[batch]), **OPTIONS)
    model = offloaded(tiny_target(), place, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters()), "some weights should be elsewhere"
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    draft_model = offloaded(perturbed(tiny_target(), 0.03), "cpu_offload", tmp_path)
    for drafter in (
        AutoDrafter.for_target(model, "lookup", min_ngram=1),
        DraftModelDrafter(perturbed(tiny_target(), 0.03), num_draft_tokens=4).bind(model),
        DraftModelDrafter(draft_model, num_draft_tokens=4).bind(model),
        ScriptedDrafter(expected[:, 9:].tolist(), right=coin, num_draft_tokens=5).bind(model),
        *heads(tmp_path, model),
    ):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected), drafter.method
        assert drafter.last_stats.cache == "ragged", drafter.method


def drafted(model, inputs, drafter, monkeypatch):
    """All that an EAGLE-3 drafter drafts in a call."""
    drafts, propose = [], Eagle3Session.propose

    def spy(self, budget, verification):
        drafts.append(propose(self, budget, verification))
        return drafts[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Session, "propose", spy)
        model.generate(**inputs, **OPTIONS, assistant_model=drafter)
    return [draft.tokens.tolist() for draft in drafts]


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the second scales its embeddings, by a buffer
@pytest.mark.parametrize("place", ["cpu_offload", "disk_offload with buffers", "all on the disk"])
def test_an_eagle3_head_drafts_what_it_drafts_for_the_same_target_at_hand(tmp_path, monkeypatch, name, place):
    at_hand, inputs = tiny_target(name), prompts([9, 4])
    model = offloaded(at_hand, place, tmp_path)
    layers = at_hand.config.num_hidden_layers
    borrowed = random_head(target_layers=layers, draft_vocab_size=97).with_tensors(lm_head__weight=None)
    path = write_head(tmp_path / "head", borrowed, "SpecForge")
    ours, theirs = (AutoDrafter.from_pretrained(path, target=target, num_draft_tokens=3) for target in (model, at_hand))
    expected = drafted(at_hand, inputs, theirs, monkeypatch)
    assert drafted(model, inputs, ours, monkeypatch) == expected
    with torch.no_grad():
        ours.model.fc.weight.mul_(-1)
    assert drafted(model, inputs, ours, monkeypatch) != expected


def test_an_offloaded_embedding_is_compared_with_a_heads_own(tmp_path):
    model = offloaded(tiny_target(), "embedding on the disk", tmp_path)
    same = tiny_target().get_input_embeddings().weight.detach().clone()
    for name, embedding, taken in (("same", same, False), ("trained on", same + 0.05 * torch.randn(same.shape), True)):
        head = random_head(own_embedding=True).with_tensors(embed_tokens__weight=embedding)
        drafter = AutoDrafter.from_pretrained(write_head(tmp_path / name, head), target=model)
        assert hasattr(drafter.model, "embed_tokens") is taken, name


@pytest.mark.parametrize("name", ["gpt_neo", "qwen3_next", "mamba2"])
def test_targets_with_a_cache_of_their_own(tmp_path, name):
    inputs, expected = prompts([9, 4]), tiny_own(name).generate(**prompts([9, 4]), **OPTIONS)
    model = offloaded(tiny_own(name), "cpu_offload", tmp_path)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)
    assert drafter.last_stats.cache == "own" and drafter.last_stats.rollback != "stepwise"


def test_where_a_model_takes_its_inputs(tmp_path):
    assert input_device(tiny_target()) == CPU
    model = offloaded(tiny_target(), "all on the disk", tmp_path)
    assert model.device.type == "meta" and input_device(model) == CPU


@pytest.mark.parametrize("name", TARGETS)
def test_every_family_is_served_offloaded(tmp_path, name):
    inputs, expected = prompts([9, 4]), tiny_target(name).generate(**prompts([9, 4]), **OPTIONS)
    model = offloaded(tiny_target(name), "cpu_offload", tmp_path)
    drafter = ScriptedDrafter(expected[:, 9:].tolist(), right=coin, num_draft_tokens=5).bind(model)
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)
