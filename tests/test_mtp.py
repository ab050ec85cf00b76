"""MTP layers draft what their formulas say, after every rejection, in every row; the text stays the target's own."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from mtp_formats import FAMILIES, deepseek_v3, deepseek_v4, inkling, nemotron_h, write_target
from mtp_reference import Reference
from mtp_rounds import WatchedSession, rounds_of
from test_eagle3 import largest_error
from test_greedy import BATCHES, plain, speculative
from tiny import prompts
from tiny_vision import with_images
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.drafters.common.features import TargetFeatures
from hf_specdec.scheduling import Governor

CLOSE, FAR = 1e-4, 1e-2  # fp32 states of hybrid targets are less exact than those of attention
CHAIN = dict(max_new_tokens=24, eos_token_id=None)


@functools.cache
def published(family: str):
    return FAMILIES[family]()


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """(family) -> its tiny target, loaded from a checkpoint that holds MTP layers."""

    @functools.cache
    def load(family: str):
        folder = write_target(tmp_path_factory.mktemp(family), published(family))
        return published(family).auto.from_pretrained(folder)

    return load


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_plain_at_every_draft_length(target_of, family):
    target = target_of(family)
    inputs = prompts([9])
    expected = plain(target, inputs, max_new_tokens=24, eos_token_id=None)
    drafter = AutoDrafter.for_target(target, "mtp")
    for length in (1, 2, 3, 5, 8):
        found = speculative(target, inputs, drafter, num_assistant_tokens=length, max_new_tokens=24, eos_token_id=None)
        assert torch.equal(found, expected)
        assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_formulas_after_every_rejection(target_of, family, batch):
    target, lengths = target_of(family), BATCHES[batch]
    if family == "deepseek_v4":  # whose own cache takes padding for text
        lengths = lengths[:1] * len(lengths)
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts(lengths), max_new_tokens=20, eos_token_id=None)
    assert largest_error(rounds, Reference(published(family), target)) < CLOSE
    assert 0.2 < drafter.last_stats.acceptance_rate < 0.8, "drafts should be accepted in part"


@pytest.mark.parametrize("variant", ["other carry", "other order", "target's other state", "token of the state"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_tells_each_mistake_apart(target_of, family, variant):
    """Negative control of the test above; a wrong carry leaves the first token of each draft as it was."""
    target, layers = target_of(family), published(family)
    if variant == "other carry" and layers.num_streams == 1 and "final" not in layers.layers[0].norms:
        pytest.skip("without a final norm there is one state to carry")
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([9]), max_new_tokens=20, eos_token_id=None)
    assert largest_error(rounds, Reference(layers, target, variant)) > FAR
    if variant == "other carry":
        firsts = [(texts, finished, scores[:, :1], tokens[:, :1]) for texts, finished, scores, tokens in rounds]
        assert largest_error(firsts, Reference(layers, target, variant)) < CLOSE


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "hy_v4", "qwen4_exp"])
def test_sparse_attention_sees_the_keys_it_chooses(target_of, family):
    """Negative control: a reference that attends to every key differs."""
    target = target_of(family)
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([9]), max_new_tokens=20, eos_token_id=None)
    reference = Reference(published(family), target)
    indexer = reference.blocks[0][0].self_attn.indexer
    indexer.index_topk = indexer.block_topk = indexer.token_budget = 999
    assert largest_error(rounds, reference) > FAR


def test_layers_that_are_not_chained_all_read_the_targets_states(target_of):
    """Negative control of the formulas of MiMo-V2; the first token of each draft is the same either way."""
    target = target_of("mimo_v2_flash")
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([9]), max_new_tokens=20, eos_token_id=None)
    chained = Reference(published("mimo_v2_flash"), target, "other chain")
    assert len(drafter.model.layers) == 3
    assert largest_error(rounds, chained) > FAR
    firsts = [(texts, finished, scores[:, :1], tokens[:, :1]) for texts, finished, scores, tokens in rounds]
    assert largest_error(firsts, chained) < CLOSE


def test_a_row_may_ask_for_the_targets_state_before_its_final_norm(target_of):
    target = target_of("deepseek_v3")
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=4)
    drafter.model.family = replace(drafter.model.family, target_state="raw")
    rounds = rounds_of(drafter, target, prompts([9, 4]), max_new_tokens=20, eos_token_id=None)
    assert largest_error(rounds, Reference(published("deepseek_v3"), target, "target's other state")) < CLOSE


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """(number of MTP layers) -> (what is published, the target)."""

    @functools.cache
    def load(num_layers: int):
        layers = deepseek_v3(num_layers)
        folder = write_target(tmp_path_factory.mktemp("several"), layers)
        return layers, AutoModelForCausalLM.from_pretrained(folder)

    return load


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_layers", [2, 3])
def test_several_layers_draft_one_after_another_and_the_last_one_goes_on(several, num_layers, batch):
    layers, target = several(num_layers)
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=5)
    rounds = rounds_of(drafter, target, prompts(BATCHES[batch]), max_new_tokens=30, eos_token_id=None)
    assert largest_error(rounds, Reference(layers, target)) < CLOSE
    assert len(drafter.model.layers) == num_layers


@pytest.mark.parametrize("num_layers", [1, 3])
def test_drafts_shorter_and_longer_than_the_layers_leave_no_gaps(several, num_layers, monkeypatch):
    layers, target = several(num_layers)
    lengths = itertools.cycle([1, 0, 5, 2, 0, 0, 1, 1, 4, 3])
    monkeypatch.setattr(Governor, "next_length", lambda self: next(lengths))
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=5)
    rounds = rounds_of(drafter, target, prompts([5, 9, 1]), max_new_tokens=40, eos_token_id=None)
    assert largest_error(rounds, Reference(layers, target)) < CLOSE


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_row_far_ahead_of_short_ones_leaves_them_right(several, num_layers):
    layers, target = several(num_layers)
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=5)
    rounds = rounds_of(drafter, target, prompts([6, 2, 1]), lambda row, round: 0 if row else 99, **CHAIN)
    assert largest_error(rounds, Reference(layers, target)) < CLOSE


def test_an_entry_that_held_a_rejected_token_is_run_again(several, monkeypatch):
    """Negative control: without running them again, later layers draft from tokens that are not in the text."""
    layers, target = several(3)
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=5)

    class Forgetful(WatchedSession):
        def propose(self, budget, verification):
            take = TargetFeatures.take
            self.features.take = lambda again: take(self.features)
            return super().propose(budget, verification)

    rounds = rounds_of(drafter, target, prompts([6]), session=Forgetful, **CHAIN)
    assert largest_error(rounds, Reference(layers, target)) > FAR


@pytest.mark.parametrize("family", [nemotron_h, inkling, deepseek_v4])
def test_several_layers_of_several_parts_forget_what_was_rejected(tmp_path, family, monkeypatch):
    """Blocks of two decoder layers each, convolutions and streams; drafts shorter and longer than the layers."""
    layers = family() if family is inkling else family(num_layers=2)
    target = layers.auto.from_pretrained(write_target(tmp_path, layers))
    lengths = itertools.cycle([4, 1, 0, 5, 2, 1, 1, 3])
    monkeypatch.setattr(Governor, "next_length", lambda self: next(lengths))
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=5)
    rounds = rounds_of(drafter, target, prompts([9]), max_new_tokens=36, eos_token_id=None)
    assert largest_error(rounds, Reference(layers, target)) < CLOSE


def test_layers_that_are_never_right_are_called_mismatched_once(target_of):
    target = target_of("deepseek_v3")
    drafter = AutoDrafter.for_target(target, "mtp", num_draft_tokens=2)
    with pytest.warns(
        UserWarning, match=r"mismatched: .* MTP layers of another revision .*, a quantised target"
    ) as caught:
        rounds_of(drafter, target, prompts([6, 4]), lambda row, round: 0, max_new_tokens=140, eos_token_id=None)
    assert len([warning for warning in caught if "mismatched" in str(warning.message)]) == 1


def test_one_drafter_serves_many_calls(target_of):
    target = target_of("deepseek_v3")
    drafter = AutoDrafter.for_target(target, "mtp")
    weights = [parameter.data_ptr() for parameter in drafter.parameters()]
    for seed in range(3):
        inputs = prompts([4 + seed, 7], seed=seed)
        assert torch.equal(speculative(target, inputs, drafter, **CHAIN), plain(target, inputs, **CHAIN))
    assert weights == [parameter.data_ptr() for parameter in drafter.parameters()]


def test_text_after_images_is_plain(target_of):
    target = target_of("qwen3_5_vl")
    inputs = with_images("qwen3_5", [1, 2], [7, 5])
    drafter = AutoDrafter.for_target(target, "mtp")
    assert torch.equal(speculative(target, inputs, drafter, **CHAIN), plain(target, inputs, **CHAIN))
    assert drafter.last_stats.num_drafted > 0


def test_a_cache_from_before_is_gone_on_with(target_of):
    target = target_of("deepseek_v3")
    drafter = AutoDrafter.for_target(target, "mtp")
    inputs = prompts([12])
    first = target.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True, eos_token_id=None)
    longer = {"input_ids": torch.cat([first.sequences, inputs["input_ids"][:, :3]], dim=1)}
    expected = plain(target, longer, **CHAIN)
    rounds: list = []
    drafter.start = lambda request: WatchedSession(drafter, request, rounds)
    assert torch.equal(speculative(target, longer, drafter, cache=first.cache, **CHAIN), expected)
    assert rounds


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_one_seed_gives_one_text_at_every_draft_length_and_rows_are_single_runs(target_of, rule):
    target = target_of("deepseek_v3")
    drafter = AutoDrafter.for_target(target, "mtp", rule=rule, seed=[3, 4])
    sampling = dict(do_sample=True, temperature=0.9, top_k=30, **CHAIN)
    inputs = prompts([7, 4])
    texts = {
        k: target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=k, **sampling) for k in (1, 2, 5)
    }
    if rule == "coupled":
        plainly = AutoDrafter.for_target(target, "none", seed=[3, 4])
        expected = target.generate(**inputs, assistant_model=plainly, **sampling)
        assert all(torch.equal(text, expected) for text in texts.values())
    alone = AutoDrafter.for_target(target, "mtp", rule=rule, seed=3)
    row = {name: tensor[:1] for name, tensor in inputs.items()}
    text = target.generate(**row, assistant_model=alone, num_assistant_tokens=2, **sampling)
    assert torch.equal(text[0], texts[2][0])
