"""Quantised targets: the text of their own plain generate. A weight is never read past its module."""

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import ScriptedDrafter
from test_greedy import coin
from test_offloaded_targets import drafted
from tiny import perturbed, prompts, tiny_target
from torch import nn

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
BATCHES = {"one row": [9], "ragged batch": [9, 4, 6]}


class PackedLinear(nn.Module):
    """Four bits a weight, two weights a byte in one column, as bitsandbytes packs them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.scale = nn.Buffer(weight.abs().amax(dim=1, keepdim=True) / 7)
        codes = (weight / self.scale).round().clamp(-7, 7).add(8).to(torch.uint8).flatten()
        self.weight = nn.Parameter((codes[::2] * 16 + codes[1::2])[:, None], requires_grad=False)

    def dequantised(self) -> torch.Tensor:
        codes = torch.stack([self.weight[:, 0] // 16, self.weight[:, 0] % 16], dim=1).float() - 8
        return codes.view(self.out_features, self.in_features) * self.scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.dequantised())


def packed(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child))
    return model


def quanto(model):
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)
    return model


def torchao(model):
    library = pytest.importorskip("torchao.quantization")
    library.quantize_(model, library.Int8WeightOnlyConfig())
    return model


def dequantised_head(head):
    """[V, H] what an output head multiplies by, from what it does."""
    return head(torch.eye(64)).T.detach()


QUANTISERS = {"packed": packed, "quanto": quanto, "torchao": torchao}


@pytest.fixture(params=QUANTISERS)
def target(request):
    model = QUANTISERS[request.param](perturbed(tiny_target(), 0.0)).eval()
    logits = [each(**prompts([9])).logits for each in (model, tiny_target())]
    assert not torch.allclose(*logits, atol=1e-3), "quantisation should show"
    return model


def borrowing_head(folder):
    """An EAGLE-3 head that takes the target's embedding and output head."""
    head = random_head(draft_vocab_size=97).with_tensors(lm_head__weight=None)
    return write_head(folder / "borrowing", head, "SpecForge")


@pytest.mark.parametrize("batch", BATCHES)
def test_text_is_that_of_the_quantised_targets_plain_generate(tmp_path, target, batch):
    inputs = prompts(BATCHES[batch])
    expected = target.generate(**inputs, **OPTIONS)
    for drafter in (
        AutoDrafter.for_target(target, "lookup", min_ngram=1),
        DraftModelDrafter(target, num_draft_tokens=4).bind(target),
        ScriptedDrafter(expected[:, 9:].tolist(), right=coin, num_draft_tokens=5).bind(target),
        AutoDrafter.from_pretrained(write_head(tmp_path / "full", random_head()), target=target),
        AutoDrafter.from_pretrained(borrowing_head(tmp_path), target=target),
    ):
        assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter), expected), drafter.method
        assert drafter.last_stats.cache == "ragged", drafter.method


def test_a_head_drafts_through_the_quantised_output_head(tmp_path, monkeypatch, target):
    """The same drafts come from a head that holds the dequantised weights itself, others from the original ones."""
    inputs, options = prompts([9, 4]), {"target": target, "num_draft_tokens": 3}
    found = drafted(target, inputs, AutoDrafter.from_pretrained(borrowing_head(tmp_path), **options), monkeypatch)
    for name, weight, same in (
        ("dequantised", dequantised_head(target.lm_head), True),
        ("other", tiny_target(seed=1).lm_head.weight.detach(), False),
    ):
        head = random_head(draft_vocab_size=97).with_tensors(lm_head__weight=weight)
        own = AutoDrafter.from_pretrained(write_head(tmp_path / name, head, "SpecForge"), **options)
        assert (drafted(target, inputs, own, monkeypatch) == found) is same, name


def test_quantised_by_transformers(tmp_path):
    """In bf16, too, where its own steps and blocks agree on this text."""
    pytest.importorskip("optimum.quanto")
    from transformers import AutoModelForCausalLM, QuantoConfig

    perturbed(tiny_target(), 0.0).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        config = QuantoConfig(weights="int8")
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=dtype)
        drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
        expected = model.generate(**prompts([9, 4]), **OPTIONS, output_logits=True, return_dict_in_generate=True)
        found = model.generate(**prompts([9, 4]), **OPTIONS, assistant_model=drafter)
        assert same_up_to_ties(found, expected, tie=0.0 if dtype == torch.float32 else 0.05)


def same_up_to_ties(found, expected, tie):
    """Whether each row is the expected one, or is up to a step whose two best logits are as close as that."""
    for row, other, *logits in zip(found, expected.sequences, *expected.logits, strict=True):
        differs = (row != other).nonzero()
        if len(differs):
            best, second = logits[int(differs[0]) - 9].topk(2).values
            if best - second > tie * best.abs() or tie == 0.0:
                return False
    return True
