"""DFlash 2: convolutions inside the blocks, a selector behind them, and a law that knows the candidates only."""

from dataclasses import replace

import pytest
import torch
from dflash_formats import random_net
from dflash_reference import Reference
from dflash_rounds import load
from test_greedy import BATCHES
from tiny import TARGETS, prompts, tiny_config, tiny_target
from watched import largest_error, rounds_of

from hf_specdec.drafters.dflash.convolution import DynamicConvolution, convolve

GREEDY = {"max_new_tokens": 30, "eos_token_id": None}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_the_formulas_after_every_rejection(tmp_path, name, batch):
    target = tiny_target(name)
    scale = float(getattr(target.get_input_embeddings(), "embed_scale", 1.0))
    net = random_net(2, target_layers=tiny_config(name).num_hidden_layers, windows=(None, 6), num_candidates=6)
    drafter = load(tmp_path, net, target)
    rounds = rounds_of(drafter, target, prompts(BATCHES[batch]), **GREEDY)
    assert largest_error(rounds, Reference(replace(net, embedding_scale=scale), target)) < 1e-5


VARIANTS = {
    "one tap": dict(num_taps=1),
    "three taps": dict(num_taps=3),
    "more taps than rows": dict(num_taps=7),
    "groups of one": dict(group_size=1),
    "one group": dict(group_size=64),
    "a capped head": dict(logit_scale=0.4, logit_cap=2.0),
    "one candidate": dict(num_candidates=1),
    "more candidates than tokens": dict(num_candidates=500),
    "sliding, causal": dict(windows=(4, 4), causal=(True, True)),
    "a long block": dict(block_size=16),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_by_its_formulas(tmp_path, variant):
    target, net = tiny_target("llama"), random_net(3, **{"num_candidates": 6, **VARIANTS[variant]})
    drafter = load(tmp_path, net, target)
    rounds = rounds_of(drafter, target, prompts([13, 6]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(net, target)) < 1e-5


@pytest.mark.parametrize("format", ["speculators, new"])
def test_anchors_that_guess_follow_themselves(tmp_path, format):
    target, net = tiny_target("llama"), random_net(3, num_candidates=6, first_slot=0)
    rounds = rounds_of(load(tmp_path, net, target, format), target, prompts([9, 4]), **GREEDY)
    assert largest_error(rounds, Reference(net, target)) < 1e-5


def test_convolutions_that_do_nothing_make_it_dflash(tmp_path):
    target, second = tiny_target("llama"), random_net(3, num_candidates=97)
    plain_tensors = {n: t for n, t in second.tensors.items() if "conv" not in n and "selector" not in n}
    first = replace(second, tensors=plain_tensors, num_candidates=0)
    nothing = {n: torch.zeros_like(t) for n, t in second.tensors.items() if "conv" in n or "codebook" in n}
    for name, tensor in nothing.items():
        if name.endswith("base_kernel"):
            tensor[:, 0] = 1.0
    identity = replace(second, tensors={**second.tensors, **nothing})
    logits = [
        rounds_of(load(tmp_path / name, net, target), target, prompts([9]), alter=False, **GREEDY)[0][2]
        for name, net in (("first", first), ("identity", identity), ("second", second))
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=0)
    assert not torch.allclose(logits[0], logits[2], atol=0.1)


def test_a_new_convolution_is_the_identity():
    convolution, rows = DynamicConvolution(8, 3, 4), torch.randn(2, 5, 8)
    for kernel in convolution.kernels(rows):
        assert torch.equal(convolve(rows, kernel), rows)


def test_a_convolution_does_not_cross_blocks():
    """Two blocks side by side are each what they are alone, and a row is not what comes behind it."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 2, 5, 8, generator=generator)  # [B, blocks, n, H]
    kernel = torch.randn(1, 2, 5, 3, 8, generator=generator)
    both = convolve(rows, kernel)
    for block in range(2):
        assert torch.equal(convolve(rows[:, block], kernel[:, block]), both[:, block])
    later = rows.clone()
    later[:, :, 3:] += 1.0
    assert torch.equal(convolve(later, kernel)[:, :, :3], both[:, :, :3])
    assert not torch.equal(convolve(later, kernel)[:, :, 3:], both[:, :, 3:])


MISTAKES = {
    "taps swapped": ("base_kernel", lambda kernel: kernel.flip(1)),
    "sides swapped": ("base_kernel", lambda kernel: kernel.flip(0)),
    "no dynamic part": ("kernel_projection", torch.zeros_like),
    "codebooks shifted": ("predecessor_codebook", lambda book: book.roll(1, 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_what_dflash_2_adds_would_show(tmp_path, mistake):
    """Negative control of the comparison with the formulas."""
    target, net = tiny_target("llama"), random_net(3, num_candidates=97)
    rounds = rounds_of(load(tmp_path, net, target), target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(net, target)) < 1e-5
    part, change = MISTAKES[mistake]
    wrong = {name: change(t) if part in name else t for name, t in net.tensors.items()}
    assert largest_error(rounds, Reference(replace(net, tensors=wrong), target)) > 1e-3
