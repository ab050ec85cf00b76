"""MTP layers that draft a part of the vocabulary read that part of the output head, and the text stays the target's."""

import pytest
import torch
from mtp_formats import deepseek_v3, llama, random_target, write_standalone, write_target
from mtp_reference import Reference
from mtp_rounds import rounds_of
from safetensors.torch import load_file
from test_eagle3 import largest_error
from test_greedy import speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.export.mtp import save_mtp
from hf_specdec.tuning.sweep import _digest

CHAIN = dict(max_new_tokens=36, eos_token_id=None)
SOME = [3, 17, 18, 40, 41, 55, 70, 90]


class PartReference(Reference):
    """Drafts only the tokens `ids`."""

    ids = SOME

    def __call__(self, text, drafted):
        logits = super().__call__(text, drafted)
        return torch.full_like(logits, -torch.inf).index_copy_(1, torch.tensor(self.ids), logits[:, self.ids])


def finite_error(rounds, reference) -> float:
    """The largest difference of logits, after those of tokens that cannot be drafted were seen to agree."""
    worst = 0.0
    for texts, finished, scores, tokens in rounds:
        for row, text in enumerate(texts):
            if finished[row]:
                continue
            wanted = reference(text, tokens[row].tolist())
            found = scores[row].double()
            assert torch.equal(found.isinf(), wanted.isinf())
            worst = max(worst, (found - wanted)[wanted.isfinite()].abs().max().item())
    return worst


@pytest.mark.parametrize("family", [llama, deepseek_v3])
@pytest.mark.parametrize("given", [SOME, torch.tensor(SOME[::-1]), 20])
def test_only_these_tokens_are_drafted_with_the_logits_of_the_whole_head(tmp_path, family, given):
    published = family()
    target = random_target(published)
    folder = write_standalone(tmp_path, published)
    drafter = AutoDrafter.from_pretrained(folder, target=target, num_draft_tokens=3, draft_vocab=given)
    reference = PartReference(published, target)
    reference.ids = list(range(given)) if isinstance(given, int) else SOME
    rounds = rounds_of(drafter, target, prompts([9, 5]), lambda row, round: 3, **CHAIN)
    assert finite_error(rounds, reference) < 1e-4
    assert drafter.last_stats.num_drafted > 0


def test_the_first_tokens_are_another_part_than_these(tmp_path):
    """Negative control of the test above."""
    published, target = llama(), tiny_target("llama")
    folder = write_standalone(tmp_path, published)
    drafter = AutoDrafter.from_pretrained(folder, target=target, num_draft_tokens=3, draft_vocab=len(SOME))
    rounds = rounds_of(drafter, target, prompts([9]), lambda row, round: 3, **CHAIN)
    with pytest.raises(AssertionError):
        finite_error(rounds, PartReference(published, target))


def test_no_more_of_the_head_is_read(tmp_path, monkeypatch):
    published = deepseek_v3()
    target = published.auto.from_pretrained(write_target(tmp_path, published))
    drafter = AutoDrafter.for_target(target, "mtp", draft_vocab=SOME)
    read: list[int] = []
    original = torch.nn.Linear.forward

    def forward(module, x):
        read.append(len(module.weight))
        return original(module, x)

    sessions: list = []
    start = drafter.start

    def watched(request):
        sessions.append(start(request))
        propose = sessions[-1].propose

        def counted(budget, verification):
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.Linear, "forward", forward)
                return propose(budget, verification)

        sessions[-1].propose = counted
        return sessions[-1]

    drafter.start = watched
    speculative(target, prompts([9]), drafter, **CHAIN)
    assert len(SOME) in read and target.config.vocab_size not in read


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_sampled_text_has_the_targets_law(tmp_path, rule):
    target = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(target, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(20)
    folder = write_standalone(tmp_path, llama())
    drafter = AutoDrafter.from_pretrained(folder, target=target, rule=rule, num_draft_tokens=2, draft_vocab=VOCAB // 2)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


def test_a_repository_may_name_the_tokens_and_the_caller_others(tmp_path):
    published, target = llama(), tiny_target("llama")
    whole = AutoDrafter.from_pretrained(write_standalone(tmp_path / "whole", published), target=target)
    assert whole.target_ids is None
    save_mtp(tmp_path / "part", whole.model, torch.tensor(SOME), torch.float32)
    assert AutoDrafter.detect(tmp_path / "part").method == "mtp"
    part = AutoDrafter.from_pretrained(tmp_path / "part", target=target)
    assert part.target_ids.tolist() == SOME
    assert finite_error(rounds_of(part, target, prompts([9]), **CHAIN), PartReference(published, target)) < 1e-4
    assert torch.equal(load_file(tmp_path / "part" / "model.safetensors")["d2t"] + torch.arange(8), torch.tensor(SOME))
    other = AutoDrafter.from_pretrained(tmp_path / "part", target=target, draft_vocab=7)
    assert other.target_ids.tolist() == list(range(7))
    rounds = rounds_of(whole, target, prompts([9]), **CHAIN)
    assert largest_error(rounds, Reference(published, target)) < 1e-4


def test_a_sweep_does_not_take_one_part_for_another(tmp_path):
    target, folder = tiny_target("llama"), write_standalone(tmp_path, llama())
    parts = [AutoDrafter.from_pretrained(folder, target=target, draft_vocab=n) for n in (None, 20, 21, 20)]
    whole, part, other, again = map(_digest, parts)
    assert part == again and len({whole, part, other}) == 3


@pytest.mark.parametrize("given", [0, -1, 10**6, True, "all", [], [1, 10**6], [-1, 2], [0.5], [[1], [2]], {1, 2}])
def test_what_names_no_tokens_of_the_target_is_refused_before_anything_is_read(tmp_path, given):
    published = deepseek_v3()
    target = published.auto.from_pretrained(write_target(tmp_path / "target", published))
    with pytest.raises(ValueError, match=r"`draft_vocab` is .* a number of tokens or their ids, of the target's"):
        AutoDrafter.for_target(target, "mtp", draft_vocab=given)
    folder = write_standalone(tmp_path / "alone", published)
    with pytest.raises(ValueError, match=r"`draft_vocab` is .*"):
        AutoDrafter.from_pretrained(folder, target=target, draft_vocab=given)


def test_a_head_that_cannot_be_taken_apart_is_refused(tmp_path):
    published = deepseek_v3()
    target = published.auto.from_pretrained(write_target(tmp_path, published))
    AutoDrafter.for_target(target, "mtp", draft_vocab=SOME)
    target.get_output_embeddings().base_layer = torch.nn.Identity()
    with pytest.raises(ValueError, match="`draft_vocab` takes a part of the output head, and this one is quantised"):
        AutoDrafter.for_target(target, "mtp", draft_vocab=SOME)
