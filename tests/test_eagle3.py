"""EAGLE-3 drafts what its formulas say, after every rejection, in every row; the text stays the target's own."""

import itertools

import pytest
import torch
from eagle3_formats import Head, random_head, write_head
from eagle3_reference import Reference
from test_greedy import BATCHES, plain, speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import TARGETS, prompts, tiny_config, tiny_target
from watched import keep_what_was_drafted, largest_error, mismatch_warnings, rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.drafters.eagle3.session import Eagle3Session
from hf_specdec.scheduling import Governor

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def load(tmp_path, head: Head, target, format: str = "speculators, old", **options):
    return AutoDrafter.from_pretrained(write_head(tmp_path / format, head, format), target=target, **options)


def head_for(name: str, **options) -> Head:
    return random_head(target_layers=tiny_config(name).num_hidden_layers, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_the_formulas_after_every_rejection(tmp_path, name, batch):
    target, head = tiny_target(name), head_for(name)
    drafter = load(tmp_path, head, target, num_draft_tokens=5)
    rounds = rounds_of(drafter, target, prompts(BATCHES[batch]), max_new_tokens=30, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5
    stats = drafter.last_stats
    assert 0.2 < stats.acceptance_rate < 0.8, "drafts should be accepted in part"


VARIANTS = {
    "residual after the norm": dict(flags=("norm_before_residual",)),
    "norm before fc": dict(flags=("norm_before_fc", "norm_before_residual")),
    "EAGLE-3.1": dict(flags=("fc_norm", "norm_output")),
    "post-norm state fed back": dict(flags=("norm_output",)),
    "qwen3 layer": dict(qk_norm=True),
    "two layers": dict(num_layers=2),
    "three qwen3 layers, residual after the norm": dict(num_layers=3, qk_norm=True, flags=("norm_before_residual",)),
    "one hidden state": dict(aux_layers=(2,)),
    "five hidden states": dict(aux_layers=(0, 1, 2, 2, 3)),
    "the target's final state": dict(aux_layers=()),
    "all tokens": dict(draft_vocab_size=97),
    "wider than the target": dict(hidden_size=96, num_heads=6, own_embedding=True),
    "heads that do not divide the width": dict(hidden_size=60, num_heads=8, head_dim=16, own_embedding=True),
    "sliding window": dict(windows=(6,)),
    "layers with and without a window": dict(num_layers=2, windows=(None, 4)),
    "attention biases": dict(biases=("q_proj", "k_proj", "v_proj")),
    "all biases": dict(biases=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")),
    "linear rope": dict(rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "yarn": dict(
        rope={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "llama3 rope": dict(
        rope={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "dynamic rope": dict(rope={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, max_positions=64),
    "text past the head's positions": dict(max_positions=8),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_by_its_formulas(tmp_path, variant):
    target, head = tiny_target("llama"), random_head(seed=3, **VARIANTS[variant])
    format = "speculators, old" if head.aux_layers else "ModelOpt"
    drafter = load(tmp_path, head, target, format, num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=16, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
def test_a_prompt_in_chunks_gives_the_drafts_of_the_whole_prompt(tmp_path, chunk):
    target, head = tiny_target("llama"), head_for("llama", aux_layers=(0, 2, 3))  # the last one comes through a hook
    drafter, inputs = load(tmp_path, head, target, num_draft_tokens=4), prompts([14, 9])
    whole, parts = (
        rounds_of(drafter, target, inputs, max_new_tokens=20, eos_token_id=None, **options)
        for options in ({}, {"prefill_chunk_size": chunk})
    )
    assert largest_error(parts, Reference(head, target)) < 1e-5
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one[3], other[3])
        torch.testing.assert_close(one[2], other[2], atol=1e-5, rtol=0)


def test_rounds_without_a_draft_are_caught_up(tmp_path, monkeypatch):
    target, head = tiny_target("qwen3"), random_head(seed=3)
    drafter = load(tmp_path, head, target)
    lengths = itertools.cycle([0, 0, 3, 1, 0, 6])
    monkeypatch.setattr(Governor, "next_length", lambda self: next(lengths))
    rounds = rounds_of(drafter, target, prompts([5, 9, 1]), max_new_tokens=40, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5


def rounds_with_a_row_ahead(drafter, target, inputs) -> list:
    """The rounds of a greedy call whose first row has every draft accepted and the others none."""
    ahead = {"right": lambda row, round: 0 if row else 99}
    return rounds_of(drafter, target, inputs, **ahead, max_new_tokens=30, eos_token_id=None)


@pytest.mark.parametrize("lengths", [[1, 1], [4, 4], [2, 1, 2]])
def test_a_short_text_whose_neighbour_gets_ahead_is_drafted_for_rightly(tmp_path, lengths):
    """It has fewer tokens than its neighbour has new ones."""
    target, head = tiny_target("llama"), random_head(seed=3)
    rounds = rounds_with_a_row_ahead(load(tmp_path, head, target, num_draft_tokens=8), target, prompts(lengths))
    assert len(rounds[1][0][0]) - len(rounds[0][0][0]) > len(rounds[1][0][1])
    assert largest_error(rounds, Reference(head, target)) < 1e-5


def test_dynamic_rope_depends_on_the_text_and_not_on_earlier_texts(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target, head = tiny_target("llama"), random_head(rope=rope, max_positions=16)
    drafter = load(tmp_path, head, target, num_draft_tokens=1)
    for length in (40, 30, 8):  # one round each: later rounds keep the keys that earlier lengths made
        inputs = prompts([length])
        rounds = rounds_of(drafter, target, inputs, max_new_tokens=3, alter=False)
        texts, _, scores, tokens = rounds[0]
        torch.testing.assert_close(scores[0].double(), Reference(head, target)(texts[0], tokens[0].tolist()), **CLOSE)


MISTAKES = (
    "layer id shifted",
    "last state normed",
    "other state fed back",
    "other residual",
    "halves swapped",
    "position off",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_network_would_show(tmp_path, mistake):
    """Negative control of the comparison with the formulas."""
    target, head = tiny_target("llama"), random_head(seed=3)
    drafter = load(tmp_path, head, target, num_draft_tokens=4)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) < 1e-5
    assert largest_error(rounds, Reference(head, target, mistake)) > 1e-3


def test_an_entry_that_survives_a_rejection_would_show(tmp_path, monkeypatch):
    """Negative control: keep drafted entries of accepted tokens, made from the head's own state."""
    target, head = tiny_target("llama"), random_head(seed=3)
    drafter = load(tmp_path, head, target, num_draft_tokens=4)

    keep_what_was_drafted(monkeypatch, Eagle3Session)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target)) > 1e-3


def test_the_last_hidden_state_is_read_before_the_final_norm(tmp_path):
    """What the session fuses equals a hook on the last layer; without fc it is what the target's head reads."""
    target, inputs = tiny_target("qwen3"), prompts([9])
    seen = {}
    hook = target.model.layers[-1].register_forward_hook(lambda m, args, out: seen.setdefault("raw", out))
    normed = target(**inputs, output_hidden_states=True).hidden_states[-1]
    hook.remove()
    hooks_before = len(target.model.layers[-1]._forward_hooks)
    for layers, expected in (((3,), seen["raw"]), ((), normed)):
        head = random_head(aux_layers=layers)
        drafter = load(tmp_path / str(layers), head, target, "ModelOpt")
        states = []
        fuse = drafter.model.fuse
        drafter.model.fuse = lambda hidden, fuse=fuse, states=states: fuse(states.append(hidden[-1]) or hidden)
        speculative(target, inputs, drafter, max_new_tokens=4)
        torch.testing.assert_close(states[0], expected, **CLOSE)
    assert not torch.allclose(seen["raw"], normed, atol=0.1)
    assert len(target.model.layers[-1]._forward_hooks) == hooks_before, "the call should leave the model as it was"


# The text


@pytest.mark.parametrize("num_heads", [48, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_text_is_the_targets_for_many_random_heads(tmp_path, num_heads):
    for seed in range(num_heads):
        name = TARGETS[seed % len(TARGETS)]
        target = tiny_target(name, seed=seed // len(TARGETS))
        flags = [(), ("norm_output",), ("fc_norm",), ("norm_before_fc", "norm_before_residual")][seed % 4]
        head = head_for(name, seed=seed, flags=flags, draft_vocab_size=(30, 97)[seed % 2], qk_norm=seed % 3 == 0)
        drafter = load(tmp_path / str(seed), head, target, num_draft_tokens=1 + seed % 6)
        for lengths in ([5 + seed % 9], [9, 2, 6]):
            inputs = prompts(lengths, seed=seed)
            rounds_of(drafter, target, inputs, max_new_tokens=14)
            expected = plain(target, inputs, max_new_tokens=14)
            assert torch.equal(speculative(target, inputs, drafter, max_new_tokens=14), expected), seed


@pytest.mark.parametrize("lengths", [[12], [12, 5, 9, 3]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_and_without_the_head(tmp_path, lengths):
    target, inputs = tiny_target("llama"), prompts(lengths)
    for options in ({"top_k": 0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.3}):
        expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), **options)
        for k, rule, draft_sampling in (
            (1, "auto", "auto"),
            (4, "auto", "auto"),
            (3, "match", "sample"),
            (3, "auto", "greedy"),
        ):
            chosen = dict(seed=11, num_draft_tokens=k, rule=rule, draft_sampling=draft_sampling)
            drafter = load(tmp_path, random_head(), target, **chosen)
            assert torch.equal(sample(target, inputs, drafter, **options), expected), (options, chosen)
            assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_sampled_text_has_the_targets_law_with_a_reduced_vocabulary(tmp_path, rule):
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    head = random_head(vocab_size=VOCAB, draft_vocab_size=3)
    torch.manual_seed(20)
    drafter = load(tmp_path, head, target, rule=rule, num_draft_tokens=2)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_law_over_the_wrong_tokens_gives_another_text(tmp_path, rule):
    """Negative control: the law is declared as if d2t held ids and not offsets."""
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    torch.manual_seed(20)
    drafter = load(tmp_path, random_head(vocab_size=VOCAB, draft_vocab_size=3), target, rule=rule, num_draft_tokens=2)

    class Misdeclaring(Eagle3Session):
        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            draft.law.logits.copy_(draft.law.logits.roll(1, dims=-1))
            return draft

    drafter.start = lambda request: Misdeclaring(drafter, request)
    assert chi_square(many_texts(drafter, target), law) < 1e-6


# The warning


def test_a_head_that_is_never_right_is_called_mismatched_once(tmp_path):
    target = tiny_target("llama")
    drafter = load(tmp_path, random_head(), target, num_draft_tokens=2)
    assert mismatch_warnings(drafter, target, right=0, new_tokens=64) == []
    (message,) = mismatch_warnings(drafter, target, right=0, new_tokens=140)
    causes = ("revision", "layer ids (aux_layers", "chat template", "quantised")
    assert sorted(causes, key=message.index) == list(causes)


def test_a_weak_head_with_long_drafts_is_not_called_mismatched(tmp_path):
    target = tiny_target("llama")
    drafter = load(tmp_path, random_head(), target, num_draft_tokens=24)
    assert mismatch_warnings(drafter, target, right=1, new_tokens=160) == []
    assert drafter.last_stats.acceptance_rate < 0.05
