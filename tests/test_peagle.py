"""A P-EAGLE head guesses a draft in one forward, by its formulas; the text stays the target's."""

import itertools

import pytest
import torch
from eagle3_formats import Head, random_head
from eagle3_reference import Reference
from peagle_formats import TRAINED_LENGTH, write_head
from test_eagle3 import rounds_with_a_row_ahead
from test_greedy import BATCHES, plain, speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import prompts, tiny_config, tiny_target
from tiny_hybrids import tiny_own
from watched import keep_what_was_drafted, largest_error, rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.drafters.eagle3.session import Eagle3Session
from hf_specdec.scheduling import Governor

MASK = 0


def head_for(name: str, **options) -> Head:
    return random_head(target_layers=tiny_config(name).num_hidden_layers, mask_token_id=MASK, **options)


def load(folder, head: Head, target, format: str = "P-EAGLE, speculators", **options):
    return AutoDrafter.from_pretrained(write_head(folder / format, head, format), target=target, **options)


# The drafts


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_drafts_are_those_of_the_formulas_after_every_rejection(tmp_path, name, batch):
    target, head = tiny_target(name), head_for(name)
    drafter = load(tmp_path, head, target, num_draft_tokens=5)
    rounds = rounds_of(drafter, target, prompts(BATCHES[batch]), max_new_tokens=30, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5
    assert 0.2 < drafter.last_stats.acceptance_rate < 0.8, "drafts should be accepted in part"


VARIANTS = {
    "four layers, as trained by default": dict(num_layers=4, own_embedding=True),
    "residual after the norm": dict(flags=("norm_before_residual",)),
    "norm before fc": dict(flags=("norm_before_fc", "norm_before_residual")),
    "norms of the states": dict(flags=("fc_norm", "norm_output")),
    "qwen3 layers": dict(qk_norm=True, num_layers=2),
    "five hidden states": dict(aux_layers=(0, 1, 2, 2, 3)),
    "the target's final state": dict(aux_layers=()),
    "all tokens": dict(draft_vocab_size=97),
    "wider than the target": dict(hidden_size=96, num_heads=6, own_embedding=True),
    "sliding window": dict(windows=(6,)),
    "layers with and without a window": dict(num_layers=2, windows=(None, 3)),
    "biases": dict(biases=("q_proj", "k_proj", "v_proj", "fc")),
    "yarn": dict(rope={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_by_its_formulas(tmp_path, variant):
    target, head = tiny_target("llama"), random_head(seed=3, mask_token_id=MASK, **VARIANTS[variant])
    format = "P-EAGLE, speculators" if head.aux_layers else "P-EAGLE, ModelOpt"
    drafter = load(tmp_path, head, target, format, num_draft_tokens=6)
    rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=20, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


MISTAKES = (
    "no mask feature",
    "mask feature without fc",
    "last token repeated",
    "positions of masks off",
    "one by one",
    "layer id shifted",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_masked_entries_would_show(tmp_path, mistake):
    """Negative control of the comparison with the formulas."""
    target, head = tiny_target("llama"), random_head(seed=3, mask_token_id=MASK)
    drafter = load(tmp_path, head, target, num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5
    assert largest_error(rounds, Reference(head, target, mistake)) > 1e-3


def test_a_masked_entry_that_survives_would_show(tmp_path, monkeypatch):
    """Negative control: the entry of the last token but one stays what the mask made of it."""
    target, head = tiny_target("llama"), random_head(seed=3, mask_token_id=MASK)
    drafter = load(tmp_path, head, target, num_draft_tokens=4)

    keep_what_was_drafted(monkeypatch, Eagle3Session)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) > 1e-3


def test_rounds_of_any_length_and_without_a_draft_are_caught_up(tmp_path, monkeypatch):
    target, head = tiny_target("qwen3"), head_for("qwen3", seed=3)
    drafter = load(tmp_path, head, target)
    lengths = itertools.cycle([0, 0, 3, 1, 0, TRAINED_LENGTH])
    monkeypatch.setattr(Governor, "next_length", lambda self: next(lengths))
    rounds = rounds_of(drafter, target, prompts([5, 9, 1]), max_new_tokens=40, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


@pytest.mark.parametrize("lengths", [[1, 1], [4, 4]])
def test_a_short_text_whose_neighbour_gets_ahead_is_drafted_for_rightly(tmp_path, lengths):
    target, head = tiny_target("llama"), random_head(seed=3, mask_token_id=MASK)
    drafter = load(tmp_path, head, target, num_draft_tokens=TRAINED_LENGTH)
    rounds = rounds_with_a_row_ahead(drafter, target, prompts(lengths))
    assert largest_error(rounds, Reference(head, target)) < 1e-5


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_prompt_in_chunks_gives_the_drafts_of_the_formulas(tmp_path, chunk):
    target, head = tiny_target("llama"), head_for("llama")
    drafter, inputs = load(tmp_path, head, target, num_draft_tokens=4), prompts([14, 9])
    rounds = rounds_of(drafter, target, inputs, max_new_tokens=20, eos_token_id=None, prefill_chunk_size=chunk)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


def test_a_draft_is_one_forward_of_the_head(tmp_path):
    target = tiny_target("llama")
    drafter = load(tmp_path, head_for("llama"), target, num_draft_tokens=7)
    calls = []
    drafter.model.register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    speculative(target, prompts([9]), drafter, max_new_tokens=30, eos_token_id=None)
    assert len(calls) == drafter.last_stats.num_verifications - drafter.last_stats.num_plain_steps
    assert drafter.last_stats.num_drafted > 3 * len(calls)


# The text


@pytest.mark.parametrize("num_heads", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_greedy_text_is_the_targets_for_many_random_heads(tmp_path, num_heads):
    names, num_rounds = ("llama", "qwen3", "gemma3"), 0
    for seed in range(num_heads):
        target = tiny_target(names[seed % 3], seed=seed // 30)
        flags = [(), ("norm_output",), ("fc_norm",), ("norm_before_fc", "norm_before_residual")][seed % 4]
        head = head_for(names[seed % 3], seed=seed, flags=flags, draft_vocab_size=(30, 97)[seed % 2])
        drafter = load(tmp_path / str(seed), head, target, num_draft_tokens=1 + seed % TRAINED_LENGTH)
        for lengths in ([5 + seed % 9], [9, 2, 6]):
            inputs = prompts(lengths, seed=seed)
            num_rounds += len(rounds_of(drafter, target, inputs, max_new_tokens=24))
            expected = plain(target, inputs, max_new_tokens=14)
            assert torch.equal(speculative(target, inputs, drafter, max_new_tokens=14), expected), seed
            num_rounds += drafter.last_stats.num_verifications
    assert num_rounds > 30 * num_heads


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_greedy_text_is_that_of_a_target_with_replay(tmp_path, name):
    target, inputs = tiny_own(name), prompts([17, 6])
    layers = target.config.num_hidden_layers
    head = random_head(target_layers=layers, aux_layers=(0, 1, layers), mask_token_id=MASK)
    drafter = load(tmp_path, head, target, num_draft_tokens=4)
    rounds_of(drafter, target, inputs, max_new_tokens=24, eos_token_id=None)
    assert drafter.last_stats.rollback == "replay"
    assert 0.1 < drafter.last_stats.acceptance_rate < 0.9


@pytest.mark.parametrize("lengths", [[12], [12, 5, 9, 3]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_and_without_the_head(tmp_path, lengths):
    target, inputs = tiny_target("llama"), prompts(lengths)
    for options in ({"top_k": 0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.3}):
        expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), **options)
        for k, rule in ((1, "auto"), (6, "auto"), (3, "match")):
            drafter = load(tmp_path, head_for("llama"), target, seed=11, num_draft_tokens=k, rule=rule)
            assert torch.equal(sample(target, inputs, drafter, **options), expected), (options, k, rule)
            assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_sampled_text_has_the_targets_law(tmp_path, rule):
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    head = head_for("llama", vocab_size=VOCAB, draft_vocab_size=3)
    torch.manual_seed(20)
    drafter = load(tmp_path, head, target, rule=rule, num_draft_tokens=2)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert drafter.last_stats.accepted_per_position[1] > 100, "the masked slot should be accepted now and then"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_law_that_is_a_slot_late_gives_another_text(tmp_path, rule):
    """Negative control: the second token is declared as drawn from the first one's law."""
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    head = head_for("llama", vocab_size=VOCAB, draft_vocab_size=3)
    torch.manual_seed(20)
    drafter = load(tmp_path, head, target, rule=rule, num_draft_tokens=2)

    class Late(Eagle3Session):
        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            draft.law.logits.copy_(draft.law.logits.roll(1, dims=1))
            return draft

    drafter.start = lambda request: Late(drafter, request)
    assert chi_square(many_texts(drafter, target), law) < 1e-6
