"""Every layout of a P-EAGLE head loads, and is the same head; what does not make one is refused with a sentence."""

import pytest
import torch
from eagle3_formats import random_head
from eagle3_formats import write_head as write_eagle3
from eagle3_reference import Reference
from peagle_formats import FORMATS, TRAINED_LENGTH, write_head
from test_eagle3_bad_input import refusal
from test_greedy import plain, speculative
from test_peagle import MASK, head_for, load
from tiny import prompts, tiny_target
from watched import largest_error, rounds_of

from hf_specdec import AutoDrafter

SPECULATORS = "P-EAGLE, speculators"


def test_one_head_is_the_same_in_every_format(tmp_path):
    target, head = tiny_target("llama"), random_head(seed=1, mask_token_id=5, own_embedding=True)
    for format in FORMATS:
        folder = write_head(tmp_path / format, head, format)
        detected = AutoDrafter.detect(folder)
        assert (detected.method, detected.variant) == ("eagle3", format) and "mask_hidden" in detected.reason
        drafter = AutoDrafter.from_pretrained(folder, target=target, num_draft_tokens=4)
        rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=16, eos_token_id=None)
        assert largest_error(rounds, Reference(head, target)) < 1e-5


def test_the_layers_config_does_not_name_the_mask_token(tmp_path):
    """It is often a copy of the target's."""
    target, head = tiny_target("llama"), random_head(seed=1, mask_token_id=5)
    fields, _ = FORMATS[SPECULATORS](head)
    layer = {**fields["transformer_layer_config"], "mask_token_id": 9}
    folder = write_head(tmp_path, head, SPECULATORS, transformer_layer_config=layer)
    drafter = AutoDrafter.from_pretrained(folder, target=target, num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=16, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


def test_an_embedding_of_its_own_is_taken_because_the_mask_was_trained(tmp_path):
    """One row differs from the target's, so little that an ordinary head would take the target's."""
    target = tiny_target("llama")
    embedding = target.get_input_embeddings().weight.detach().clone()
    embedding[MASK] += 0.5
    head = random_head(seed=1, mask_token_id=MASK).with_tensors(embed_tokens__weight=embedding)
    for format in FORMATS:
        drafter = load(tmp_path, head, target, format, num_draft_tokens=4)
        rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=16, eos_token_id=None)
        assert largest_error(rounds, Reference(head, target)) < 1e-5
    folder = tmp_path / SPECULATORS
    assert not hasattr(AutoDrafter.from_pretrained(folder, target=target, own_embedding=False).model, "embed_tokens")


def test_drafts_are_as_long_as_the_training_said_and_no_longer(tmp_path):
    target, head = tiny_target("llama"), head_for("llama")
    drafter = load(tmp_path, head, target, num_draft_tokens=TRAINED_LENGTH)
    assert drafter.max_num_draft_tokens == drafter.default_num_draft_tokens == TRAINED_LENGTH
    assert torch.equal(speculative(target, prompts([9]), drafter), plain(target, prompts([9])))
    drafter = load(tmp_path, head, target, num_draft_tokens=TRAINED_LENGTH + 1)
    with pytest.raises(ValueError, match="`num_draft_tokens` is 9; this 'eagle3' drafter drafts at most 8 tokens"):
        speculative(target, prompts([9]), drafter)
    unknown = load(tmp_path, head, target, "P-EAGLE, ModelOpt", num_draft_tokens=20)
    assert unknown.max_num_draft_tokens is None
    rounds = rounds_of(unknown, target, prompts([9]), max_new_tokens=40, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


def test_an_ordinary_head_with_a_mask_token_in_its_config_drafts_one_by_one(tmp_path):
    target, head = tiny_target("llama"), random_head(seed=1)
    folder = write_eagle3(tmp_path, head, "SpecForge", mask_token_id=4)
    drafter = AutoDrafter.from_pretrained(folder, target=target, num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=16, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


# Bad input

CONFIGS = {
    "no mask token": (dict(mask_token_id=None), "does not say which token it masks with"),
    "a negative mask token": (dict(mask_token_id=-1), "mask_token_id -1 where an integer from 0 on belongs"),
    "a mask token in words": (
        dict(mask_token_id="<mask>"),
        "mask_token_id '<mask>' where an integer from 0 on belongs",
    ),
    "a mask token beyond the embedding": (dict(mask_token_id=97), "masks with token 97 and the embedding has 97 rows"),
    "proposals in words": (dict(speculators_config={"proposal_methods": "greedy"}), "a list of objects belongs"),
    "drafts of no length": (
        dict(speculators_config={"proposal_methods": [{"speculative_tokens": 0}]}),
        "speculative_tokens 0 where a positive integer belongs",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_do_not_make_the_head_are_refused(tmp_path, case):
    fields, expected = CONFIGS[case]
    assert expected in refusal(write_head(tmp_path, head_for("llama"), SPECULATORS, **fields))


def test_mask_features_that_do_not_fit_are_refused(tmp_path):
    head = head_for("llama")
    for name, shape in (("too narrow", (1, 1, 64)), ("too many", (1, 2, 192)), ("flat", (192,))):
        folder = write_head(tmp_path / name, head.with_tensors(mask_hidden=torch.ones(shape)), SPECULATORS)
        assert f"has mask_hidden of shape {list(shape)} where [1, 1, 192] is expected" in refusal(folder)
    folder = write_head(tmp_path / "none", head.with_tensors(mask_hidden=None), SPECULATORS)
    assert AutoDrafter.detect(folder).variant == SPECULATORS
    assert "lacks the tensors mask_hidden" in refusal(folder)
