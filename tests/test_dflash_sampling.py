"""Sampled text with DFlash and DFlash 2: one seed, one text, and the target's law."""

import pytest
import torch
from dflash_formats import random_net
from dflash_rounds import load
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.dflash.session import DFlash2Session, DFlashSession
from hf_specdec.verification import Draft

KINDS = {"DFlash": 0, "DFlash 2": 3}  # candidates of a row


def drafter_of(folder, kind: str, **options):
    net = random_net(5, vocab_size=VOCAB, num_candidates=KINDS[kind], block_size=3, std=0.1)
    return load(folder, net, tiny_target("llama", vocab_size=VOCAB), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[12], [12, 5, 9]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_and_without_the_drafter(tmp_path, lengths, kind):
    target, inputs = tiny_target("llama"), prompts(lengths)
    net = random_net(num_candidates=2 * KINDS[kind])
    for options in ({"top_k": 0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.3}):
        expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), **options)
        for k, rule, draft_sampling in (
            (1, "auto", "auto"),
            (4, "auto", "auto"),
            (3, "match", "sample"),
            (3, "auto", "greedy"),
        ):
            chosen = dict(seed=11, num_draft_tokens=k, rule=rule, draft_sampling=draft_sampling)
            drafter = load(tmp_path, net, target, **chosen)
            assert torch.equal(sample(target, inputs, drafter, **options), expected), (options, chosen)
            assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "match"])
def test_sampled_text_has_the_targets_law(tmp_path, rule, kind):
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(21)
    drafter = drafter_of(tmp_path, kind, rule=rule, num_draft_tokens=2)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_chi_square_tells_another_temperature_apart(tmp_path, rule, kind):
    """Negative control of the test above: the same texts against the law at another temperature."""
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB), temperature=3.0)
    torch.manual_seed(21)
    drafter = drafter_of(tmp_path, kind, rule=rule, num_draft_tokens=2)
    assert chi_square(many_texts(drafter, target), law) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_false_law_gives_another_text(tmp_path, rule, kind):
    """Negative control: the law is declared over the wrong tokens, or (DFlash 2) without the selector and its cut."""
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(21)
    drafter = drafter_of(tmp_path, kind, rule=rule, num_draft_tokens=2)

    class Rolled(DFlashSession):
        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            draft.law.logits.copy_(draft.law.logits.roll(1, dims=-1))
            return draft

    class Unselected(DFlash2Session):
        def guesses(self, states, logits):
            self.alone = logits.clone()
            return super().guesses(states, logits)

        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            slots = range(draft.num_slots)
            alone = torch.cat([self.request.process(self.alone[:, i : i + 1], i) for i in slots], dim=1)
            draft.law.logits.copy_(alone)
            return draft

    drafter.start = lambda request: (Unselected if KINDS[kind] else Rolled)(drafter, request)
    assert chi_square(many_texts(drafter, target), law) < 1e-6


def test_the_law_of_dflash_2_knows_the_candidates_only(tmp_path):
    target, seen = tiny_target("llama"), []
    drafter = load(tmp_path, random_net(num_candidates=6), target, rule="rejection", seed=3)

    class Watching(DFlash2Session):
        def propose(self, budget, verification) -> Draft:
            draft = super().propose(budget, verification)
            seen.append((draft.law.logits.isfinite().sum(dim=-1), draft.law.logits, draft.tokens))
            return draft

    drafter.start = lambda request: Watching(drafter, request)
    sample(target, prompts([9, 5]), drafter, top_k=0, eos_token_id=None)
    for counts, logits, tokens in seen:
        assert bool((counts == 6).all())
        drawn = tokens >= 0
        assert bool(logits.gather(2, tokens.clamp_min(0)[..., None])[..., 0][drawn].isfinite().all())
