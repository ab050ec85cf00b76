"""Sampled text has the target's law whatever MTP layers draft, and no other law passes for it."""

import pytest
import torch
from mtp_formats import llama, write_standalone
from test_sampling import VOCAB, chi_square, joint_law, many_texts
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.mtp.session import MtpSession


def drafter_for(tmp_path, target, **options):
    return AutoDrafter.from_pretrained(write_standalone(tmp_path, llama()), target=target, **options)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection", "block"])
def test_sampled_text_has_the_targets_law(tmp_path, rule):
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(20)
    drafter = drafter_for(tmp_path, target, rule=rule, num_draft_tokens=2)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_law_that_the_drafts_were_not_drawn_from_gives_another_text(tmp_path, rule):
    """Negative control: each slot declares the probabilities of another token."""
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(20)
    drafter = drafter_for(tmp_path, target, rule=rule, num_draft_tokens=2)

    class Misdeclaring(MtpSession):
        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            draft.law.logits.copy_(draft.law.logits.roll(1, dims=-1))
            return draft

    drafter.start = lambda request: Misdeclaring(drafter, request)
    assert chi_square(many_texts(drafter, target), law) < 1e-6
