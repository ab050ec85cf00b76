"""A smaller model is a draft model where its vocabulary, its tokenizer and its special tokens fit the target's."""

import re
from pathlib import Path

import pytest
import torch
from draft_model_folders import assert_drafts, change_config, refusal, save_tokenizer
from test_greedy import plain, speculative
from tiny import EOS, VOCAB_SIZE, prompts, tiny_target
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.draft_model.session import DraftModelSession


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_target("qwen3", seed=1).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def target():
    return tiny_target("llama")


def loaded_target(folder: Path, **options):
    tiny_target("llama").save_pretrained(folder)
    save_tokenizer(folder, **options)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_same_tokenizer_is_accepted(folder, tmp_path):
    target = loaded_target(tmp_path / "target")
    save_tokenizer(folder)
    assert_drafts(AutoDrafter.from_pretrained(folder, target=target), target)


@pytest.mark.parametrize("difference", [{"swapped": True}, {"size": VOCAB_SIZE - 1}], ids=["swapped", "shorter"])
def test_another_tokenizer_is_refused_with_a_token_that_differs(folder, tmp_path, difference):
    target = loaded_target(tmp_path / "target", **difference)
    save_tokenizer(folder)
    message = refusal(folder, target)
    assert "another tokenizer" in message and re.search(r"for example 'token(5|6|96)'", message)


def test_another_tokenizer_is_refused_before_weights_are_read(folder, tmp_path, monkeypatch):
    target = loaded_target(tmp_path / "target", swapped=True)
    save_tokenizer(folder)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights were read")
    )
    assert "another tokenizer" in refusal(folder, target)


def test_where_a_tokenizer_is_not_at_hand_nothing_is_compared(folder, target, tmp_path):
    save_tokenizer(folder)
    assert AutoDrafter.from_pretrained(folder, target=target).method == "draft_model"
    (folder / "tokenizer.json").unlink()
    target = loaded_target(tmp_path / "target")
    assert AutoDrafter.from_pretrained(folder, target=target).method == "draft_model"


def padded_pair(draft_size: int, target_size: int):
    """(target, draft model, prompts that hold the last ids of the target)."""
    target = tiny_target("llama", vocab_size=target_size)
    inputs = prompts([9, 5], vocab_size=target_size)
    inputs["input_ids"][:, -4] = target_size - 1
    inputs["input_ids"][0, 2] = target_size - 2
    return target, tiny_target("qwen3", seed=1, vocab_size=draft_size), inputs


PADDED = [(97, 99), (99, 97), (90, 99), (97, 97)]


@pytest.mark.parametrize(("draft_size", "target_size"), PADDED)
def test_vocabularies_that_differ_by_padding_are_exact_in_greedy_decoding(draft_size, target_size):
    target, model, inputs = padded_pair(draft_size, target_size)
    drafter = DraftModelDrafter(model, num_draft_tokens=3).bind(target)
    assert drafter.config.vocab_size == target_size  # what pipelines compare with the target's
    options = {"sequence_bias": {(target_size - 1,): 4.0}, "eos_token_id": None}  # the padding comes up in the text
    expected = plain(target, inputs, **options)
    assert (expected[:, 9:] == target_size - 1).any()
    assert torch.equal(speculative(target, inputs, drafter, **options), expected)


@pytest.mark.parametrize("rule", ["coupled", "match"])
@pytest.mark.parametrize(("draft_size", "target_size"), PADDED)
def test_vocabularies_that_differ_by_padding_are_exact_in_sampling(draft_size, target_size, rule):
    target, model, inputs = padded_pair(draft_size, target_size)
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "sequence_bias": {(target_size - 1,): 4.0}}
    plainly = AutoDrafter.for_target(target, "none", seed=5)
    expected = speculative(target, inputs, plainly, **options)
    assert (expected[:, 9:] == target_size - 1).any()
    drafter = DraftModelDrafter(model, num_draft_tokens=3, seed=5, rule=rule).bind(target)
    assert torch.equal(speculative(target, inputs, drafter, **options), expected)
    for sampled in ("rejection", "block"):  # no reference for these; they must run
        drafter = DraftModelDrafter(model, num_draft_tokens=3, seed=5, rule=sampled).bind(target)
        assert speculative(target, inputs, drafter, **options).shape == expected.shape


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_what_the_smaller_vocabulary_lacks_is_never_drafted(rule, monkeypatch):
    target, model, inputs = padded_pair(90, 99)
    drafted = []
    propose = DraftModelSession.propose

    def recorded(self, *args):
        draft = propose(self, *args)
        drafted.append(draft.tokens)
        return draft

    monkeypatch.setattr(DraftModelSession, "propose", recorded)
    drafter = DraftModelDrafter(model, num_draft_tokens=3, seed=5, rule=rule).bind(target)
    speculative(target, inputs, drafter, do_sample=True, top_k=0, temperature=3.0, eos_token_id=None)
    assert 80 < torch.cat([tokens.flatten() for tokens in drafted]).max() < 90


@pytest.mark.parametrize("size", [60, 140])
def test_a_vocabulary_of_another_size_is_refused_with_both_sizes(tmp_path, target, size):
    tiny_target("qwen3", vocab_size=size).save_pretrained(tmp_path)
    message = refusal(tmp_path, target)
    assert f"vocabulary of {size}" in message and str(VOCAB_SIZE) in message


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_special_tokens_that_differ_are_refused_by_name(folder, target, name):
    change_config(folder, **{name: 33})
    message = refusal(folder, target)
    assert f"{name} is 33" in message and str(getattr(target.config, name)) in message


def test_one_eos_token_in_common_is_enough(folder, target):
    change_config(folder, eos_token_id=[EOS, 33])
    assert AutoDrafter.from_pretrained(folder, target=target).method == "draft_model"
