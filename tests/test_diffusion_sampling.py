"""Sampled text with masked diffusion drafters: one seed, one text, and the target's law, whatever the schedule."""

import pytest
import torch
from diffusion_formats import random_model, write_model
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.diffusion import session

WAYS = {
    "one pass": {},
    "confidence": {"effort": 2},
    "entropy": {"effort": 2, "reveal_order": "entropy"},
    "left to right": {"effort": 3, "reveal_order": "left_to_right"},
    "resampled": {"effort": 2, "final_resample": True},
}
FULL, BLOCKS = "a2d Qwen3, mdlm", "Fast-dLLM v2"
MASK = 4  # a token that the target has and that no draft holds


def drafter_of(folder, format: str, **options):
    """A drafter of the tiniest vocabulary, with acceptance that is neither 0 nor 1."""
    written = write_model(folder, format, random_model(format, seed=4, vocab_size=VOCAB, std=0.4), mask_token_id=None)
    target = tiny_target("llama", vocab_size=VOCAB)
    sizes = {"block_size": 3, "num_draft_tokens": 3}
    return AutoDrafter.from_pretrained(written, target=target, mask_token_id=MASK, **sizes, **options)


@pytest.mark.parametrize("format", ["SDAR", "Dream"])
@pytest.mark.parametrize("lengths", [[12], [12, 5, 9]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_and_without_the_drafter(tmp_path, lengths, format):
    target, inputs = tiny_target("llama"), prompts(lengths)
    folder = write_model(tmp_path, format, random_model(format))
    for options in ({"top_k": 0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.3}):
        options["max_new_tokens"] = 14
        expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), **options)
        for k, rule, draft_sampling, way in (
            (1, "auto", "auto", "one pass"),
            (6, "auto", "auto", "confidence"),
            (6, "match", "sample", "entropy"),
            (5, "auto", "greedy", "resampled"),
        ):
            chosen = dict(seed=11, num_draft_tokens=k, rule=rule, draft_sampling=draft_sampling, **WAYS[way])
            drafter = AutoDrafter.from_pretrained(folder, target=target, **chosen)
            assert torch.equal(sample(target, inputs, drafter, **options), expected), (options, chosen)
            assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize(
    ("rule", "format", "way"),
    [
        ("rejection", BLOCKS, "one pass"),
        ("rejection", FULL, "confidence"),
        ("rejection", BLOCKS, "entropy"),
        ("rejection", FULL, "left to right"),
        ("rejection", FULL, "resampled"),
        ("block", FULL, "confidence"),
        ("block", BLOCKS, "confidence"),
        ("coupled", BLOCKS, "confidence"),
        ("match", FULL, "entropy"),
    ],
)
def test_sampled_text_has_the_targets_law(tmp_path, rule, format, way):
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(21)
    drafter = drafter_of(tmp_path, format, rule=rule, **WAYS[way])
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


def test_each_slots_own_softmax_gives_another_text(tmp_path, monkeypatch):
    """Negative control: every token declared as drawn from the softmax of its own pass."""
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    monkeypatch.setattr(session, "own_law_holds", lambda drawn_in: torch.ones_like(drawn_in, dtype=torch.bool))
    torch.manual_seed(21)
    drafter = drafter_of(tmp_path, FULL, rule="rejection", effort=3)
    assert chi_square(many_texts(drafter, target), law) < 1e-6


def test_drafts_are_drawn_with_the_targets_noise_where_the_rule_shares_it(tmp_path):
    target = tiny_target("llama", vocab_size=VOCAB)
    rates = {}
    for rule in ("coupled", "match"):
        drafter = drafter_of(tmp_path / rule, FULL, rule=rule, draft_sampling="sample", seed=5)
        inputs = prompts([6] * 64, vocab_size=VOCAB)
        sample(target, inputs, drafter, max_new_tokens=12, eos_token_id=None, top_k=0)
        rates[rule] = drafter.last_stats.acceptance_rate
    assert rates["coupled"] > rates["match"] + 0.05
