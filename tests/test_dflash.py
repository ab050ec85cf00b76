"""DFlash drafts what its formulas say, after every rejection, in every row; the text stays the target's own."""

import itertools

import pytest
import torch
from dflash_formats import random_net, write_net
from dflash_reference import MISTAKES, Reference
from dflash_rounds import load
from test_greedy import BATCHES, plain, speculative
from tiny import TARGETS, prompts, tiny_config, tiny_target
from tiny_hybrids import config_of, tiny_own
from watched import keep_what_was_drafted, largest_error, mismatch_warnings, rounds_of, watch

from hf_specdec import AutoDrafter
from hf_specdec.drafters.dflash.session import DFlashSession
from hf_specdec.scheduling import Governor

GREEDY = {"max_new_tokens": 30, "eos_token_id": None}


def scaled(target) -> float:
    """What a target's embedding multiplies its rows with."""
    return float(getattr(target.get_input_embeddings(), "embed_scale", 1.0))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_the_formulas_after_every_rejection(tmp_path, name, batch):
    target = tiny_target(name)
    facts = dict(target_layers=tiny_config(name).num_hidden_layers, windows=(None, 6), causal=(False, True))
    drafter = load(tmp_path, random_net(2, **facts), target)
    rounds = rounds_of(drafter, target, prompts(BATCHES[batch]), **GREEDY)
    assert largest_error(rounds, Reference(random_net(2, **facts, embedding_scale=scaled(target)), target)) < 1e-5
    assert 0.2 < drafter.last_stats.acceptance_rate < 0.8, "drafts should be accepted in part"


VARIANTS = {
    "full layers": ("z-lab", {}),
    "one layer": ("z-lab", dict(num_layers=1)),
    "three layers": ("z-lab", dict(num_layers=3)),
    "full layers, causal": ("z-lab", dict(causal=(True, True))),
    "sliding, causal": ("z-lab", dict(windows=(6, 6), causal=(True, True))),
    "sliding, not causal": ("z-lab", dict(windows=(6, 6))),
    "a window within the block": ("z-lab", dict(windows=(3, None), causal=(True, False))),
    "a window of one": ("z-lab", dict(windows=(1, 1), causal=(True, True))),
    "mixed": ("z-lab", dict(windows=(4, None), causal=(True, False))),
    "windows from the anchor": ("speculators, new", dict(windows=(4, 4), from_anchor=True)),
    "windows from the anchor, causal": (
        "speculators, new",
        dict(windows=(4, None), causal=(True, False), from_anchor=True),
    ),
    "one hidden state": ("z-lab", dict(aux_layers=(2,))),
    "the embedding and the last state": ("speculators, new", dict(aux_layers=(0, 3))),
    "five hidden states": ("speculators, new", dict(aux_layers=(0, 1, 2, 2, 3))),
    "a long block": ("z-lab", dict(block_size=16)),
    "a block of two": ("z-lab", dict(block_size=2)),
    "anchors that guess": ("speculators, new", dict(first_slot=0)),
    "a reduced vocabulary": ("speculators, new", dict(draft_vocab_size=41)),
    "a capped head": ("z-lab", dict(logit_scale=0.4, logit_cap=2.0)),
    "text past the drafter's positions": ("z-lab", dict(max_positions=8)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_by_its_formulas(tmp_path, variant):
    format, facts = VARIANTS[variant]
    target, net = tiny_target("llama"), random_net(3, **facts)
    drafter = load(tmp_path, net, target, format)
    rounds = rounds_of(drafter, target, prompts([13, 6]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(net, target)) < 1e-5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_network_would_show(tmp_path, mistake):
    """Negative control of the comparison with the formulas."""
    target, net = tiny_target("llama"), random_net(3, windows=(None, 4), causal=(False, True))
    drafter = load(tmp_path, net, target)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(net, target)) < 1e-5
    assert largest_error(rounds, Reference(net, target, mistake)) > 1e-3


def test_a_block_that_survives_a_rejection_would_show(tmp_path, monkeypatch):
    """Negative control: keep the block's own keys and values where the context of the accepted tokens belongs."""
    target, net = tiny_target("llama"), random_net(3)
    drafter = load(tmp_path, net, target)

    keep_what_was_drafted(monkeypatch, DFlashSession)
    rounds = rounds_of(drafter, target, prompts([11]), **GREEDY)
    assert largest_error(rounds, Reference(net, target)) > 1e-3


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_prompt_in_chunks_gives_the_drafts_of_the_whole_prompt(tmp_path, chunk):
    target, net = tiny_target("llama"), random_net(3, windows=(None, 6), causal=(False, True))
    drafter = load(tmp_path, net, target)
    rounds = rounds_of(drafter, target, prompts([14, 9]), prefill_chunk_size=chunk, **GREEDY)
    assert largest_error(rounds, Reference(net, target)) < 1e-5


def test_rounds_without_a_draft_are_caught_up(tmp_path, monkeypatch):
    target, net = tiny_target("qwen3"), random_net(3)
    drafter, lengths = load(tmp_path, net, target), itertools.cycle([0, 0, 3, 1, 0, 4])
    monkeypatch.setattr(Governor, "next_length", lambda self: next(lengths))
    rounds = rounds_of(drafter, target, prompts([5, 9, 1]), max_new_tokens=40, eos_token_id=None)
    assert largest_error(rounds, Reference(net, target)) < 1e-5


def test_shorter_drafts_are_the_first_tokens_of_the_whole_block(tmp_path):
    target, net, inputs = tiny_target("llama"), random_net(3), prompts([9, 5])
    drafts = {}
    for k in (1, 2, 4):
        drafter = load(tmp_path, net, target, num_draft_tokens=k)
        rounds = rounds_of(drafter, target, inputs, **GREEDY)
        assert largest_error(rounds, Reference(net, target)) < 1e-5
        drafts[k] = rounds[0][3]
        assert drafts[k].shape[1] == k
    assert torch.equal(drafts[4][:, :2], drafts[2]) and torch.equal(drafts[4][:, :1], drafts[1])


def test_one_block_is_the_longest_draft(tmp_path):
    target = tiny_target("llama")
    folder = write_net(tmp_path, random_net())
    assert AutoDrafter.from_pretrained(folder, target=target).default_num_draft_tokens == 4
    drafter = AutoDrafter.from_pretrained(folder, target=target, num_draft_tokens=5)
    with pytest.raises(ValueError, match="`num_draft_tokens` is 5; this 'dflash' drafter drafts at most 4 tokens"):
        speculative(target, prompts([5]), drafter)
    drafter = AutoDrafter.from_pretrained(folder, target=target)
    with pytest.raises(ValueError, match=r"`num_assistant_tokens` is 6; .* at most 4"):
        speculative(target, prompts([5]), drafter, num_assistant_tokens=6)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_length_limits_end_inside_a_block(tmp_path, new_tokens):
    target, inputs = tiny_target("llama"), prompts([9, 4])
    drafter = load(tmp_path, random_net(block_size=8), target)
    rounds_of(drafter, target, inputs, right=lambda row, round: 99, max_new_tokens=new_tokens, eos_token_id=None)
    assert drafter.last_stats.num_emitted == 2 * new_tokens


def test_rows_that_end_apart_leave_the_others_drafts_alone(tmp_path):
    target, net, inputs = tiny_target("llama"), random_net(3), prompts([11, 5, 8], seed=3)
    free = plain(target, inputs, **GREEDY)[:, 11:]
    stops = [int(free[0, 6]), int(free[1, 14])]
    expected = plain(target, inputs, max_new_tokens=30, eos_token_id=stops)[:, 11:]
    assert len(set((expected != 0).sum(dim=1).tolist())) > 1, "the rows should end apart"
    drafter = load(tmp_path, net, target)
    rounds = rounds_of(drafter, target, inputs, max_new_tokens=30, eos_token_id=stops)
    assert any(any(done) and not all(done) for _, done, _, _ in rounds)
    assert largest_error(rounds, Reference(net, target)) < 1e-5


# The text


@pytest.mark.parametrize("num_drafters", [48, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_text_is_the_targets_for_many_random_drafters(tmp_path, num_drafters):
    names = [*TARGETS, "qwen3_5"]
    for seed in range(num_drafters):
        name = names[seed % len(names)]
        is_hybrid = name not in TARGETS
        target = tiny_own(name) if is_hybrid else tiny_target(name, seed=seed // len(names) % 4)
        layers = (config_of(name) if is_hybrid else tiny_config(name)).num_hidden_layers
        windows, causal = [((None, None), (False, False)), ((4, None), (True, False)), ((5, 5), (False, False))][
            seed % 3
        ]
        shape = dict(target_layers=layers, windows=windows, causal=causal, block_size=2 + seed % 6)
        net = random_net(seed, **shape, num_candidates=(0, 5)[seed % 2])
        drafter = load(tmp_path / str(seed), net, target)
        inputs = prompts([5 + seed % 9] if seed % 3 else [9, 2, 6], seed=seed)
        expected = plain(target, inputs, max_new_tokens=10)
        assert torch.equal(speculative(target, inputs, drafter, max_new_tokens=10), expected), seed
        watch(drafter, [], expected[:, inputs["input_ids"].shape[1] :].tolist())
        assert torch.equal(speculative(target, inputs, drafter, max_new_tokens=10), expected), seed


def test_a_recurrent_target_is_rolled_back_at_every_position(tmp_path):
    target = tiny_own("qwen3_next")
    net = random_net(3, target_layers=4)
    drafter = load(tmp_path, net, target)
    for right in range(5):
        rounds = rounds_of(drafter, target, prompts([9]), right=lambda row, round, right=right: right, **GREEDY)
        assert drafter.last_stats.rollback == "replay"
        assert largest_error(rounds, Reference(net, target)) < 1e-4  # the recurrence in chunks and in steps


# The warning


def test_a_drafter_that_is_never_right_is_called_mismatched_and_the_thinking_template_named(tmp_path):
    target = tiny_target("llama")
    drafter = load(tmp_path, random_net(), target, num_draft_tokens=2)
    (message,) = mismatch_warnings(drafter, target, right=0, new_tokens=140)
    causes = ("revision", "layer ids (aux_layers", "thinking template", "quantised")
    assert sorted(causes, key=message.index) == list(causes)
    assert mismatch_warnings(drafter, target, right=1, new_tokens=140) == []
