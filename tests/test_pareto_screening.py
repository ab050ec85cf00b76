"""tuning/screening.py: what a strict run says about lenient ones is exact, and the run stays strict."""

import itertools

import pytest
import torch
from laws import constant_language, enumerate_worlds, random_language
from scripted import RandomDrafter
from tiny import VOCAB_SIZE, perturbed, prompts, tiny_target

from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.lenient import Lenience
from hf_specdec.tuning.screening import Screen, _sampling, predicted_round
from hf_specdec.verification import Draft, OneHot, Sampled

LENGTH, SIZE = 3, 3


def all_drafts(q_of, p_of):
    """Every draft of `LENGTH` tokens that q can draw, one a row, the target's scores there, and their probabilities."""
    texts = list(itertools.product(range(SIZE), repeat=LENGTH))
    q = torch.stack([torch.stack([q_of(text[:i]) for i in range(LENGTH)]) for text in texts])
    p = torch.stack([torch.stack([p_of(text[:i]) for i in range(LENGTH + 1)]) for text in texts])
    tokens = torch.tensor(texts)
    weights = q.softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).prod(dim=1)
    drawn = weights > 0.0
    draft = Draft(tokens[drawn], torch.full((int(drawn.sum()),), LENGTH), Sampled(q[drawn]))
    return draft, p[drawn], weights[drawn]


@pytest.mark.parametrize("level", [1.0, 0.7, 0.4])
def test_with_one_law_everywhere_slots_pass_as_powers_of_the_acceptance(level):
    p, q = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([0.6, 0.3, 0.1]).double()
    draft, scores, weights = all_drafts(constant_language(*q.tolist()), constant_language(*p.tolist()))
    passed, divergence = (weights[:, None] * one for one in _sampling(Lenience(level), draft, scores))
    alpha = torch.minimum(q, p / level).sum()
    torch.testing.assert_close(passed.sum(dim=0), alpha ** torch.tensor([1.0, 2.0, 3.0]).double())
    kept = torch.minimum(q, p / level)
    residual = (p - kept).clamp_min(0.0)
    h = kept + (1.0 - kept.sum()) * residual / residual.sum().clamp_min(1e-300)
    kl = (h * (h / p).log()).sum()
    torch.testing.assert_close(divergence.sum(dim=0), kl * alpha ** torch.tensor([0.0, 1.0, 2.0]).double())


@pytest.mark.parametrize("level", [1.0, 0.6, 0.3])
def test_predictions_are_what_the_rule_itself_does_over_all_drafts_and_coins(level):
    draft, scores, weights = all_drafts(random_language(SIZE, seed=1), random_language(SIZE, seed=2))

    def run(rows, noise):
        law = Sampled(draft.law.logits[rows])
        return Lenience(level).verify(Draft(draft.tokens[rows], draft.lengths[rows], law), scores[rows], noise)

    verdict, rows, chances = enumerate_worlds(run, len(weights))
    chances = chances * weights[rows]
    passed, divergence = (
        (weights[:, None] * one).sum(dim=0).tolist() for one in _sampling(Lenience(level), draft, scores)
    )
    tokens, kl = predicted_round(passed, divergence, LENGTH)
    assert tokens == pytest.approx(float((chances * (verdict.num_accepted + 1)).sum()), abs=1e-9)
    emitted = torch.arange(LENGTH + 1) <= verdict.num_accepted[:, None]
    lost = (chances[:, None] * verdict.kl.masked_fill(~emitted, 0.0)).sum()
    assert kl * tokens == pytest.approx(float(lost), abs=1e-9)
    if level < 1.0:  # the strict rule's numbers would not do
        strict, _ = _sampling(Lenience(1.0), draft, scores)
        assert abs(1.0 + float((weights[:, None] * strict).sum()) - tokens) > 0.05


def test_a_deterministic_draft_is_its_own_law():
    scores = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]).double().log()
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), OneHot())
    assert float(_sampling(Lenience(0.5), draft, scores)[0]) == pytest.approx(0.4)


@pytest.mark.parametrize("do_sample", [False, True])
def test_screening_keeps_the_text_of_the_lossless_rule(do_sample):
    target, inputs = tiny_target("llama"), prompts([7])
    options = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 16, "eos_token_id": None}
    if not do_sample:
        del options["top_k"]
    drafter = DraftModelDrafter(perturbed(target, 0.03), seed=3, num_draft_tokens=3, lenience=1.0).bind(target)
    expected = target.generate(**inputs, **options, assistant_model=drafter)
    accepted = drafter.last_stats.accepted_per_position
    screen = Screen((Lenience(1.0), Lenience(0.3)), 3)
    drafter.spec_config = drafter.spec_config.with_options(lenience=screen)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)
    if not do_sample:  # nothing is drawn, so the prediction for the strict rule is what happened
        assert screen.sums[0, 0, : len(accepted)].tolist() == accepted
        assert float(screen.sums[1, 0].sum()) == 0.0
    assert bool((screen.sums[0, 1] >= screen.sums[0, 0] - 1e-9).all())
    stats = drafter.last_stats  # of whose rounds the prefill drafts nothing
    assert int(screen.sums[2, 0, 0]) == stats.num_verifications - stats.num_plain_steps


def test_a_lenient_run_accepts_as_predicted():
    """The drafter's laws hardly matter for the contexts of a random target, so predictions come true on average."""
    target, inputs = tiny_target("llama"), prompts([6] * 24, seed=1)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, "eos_token_id": None}
    screen = Screen((Lenience(1.0), Lenience(0.2)), 3)
    drafter = RandomDrafter(VOCAB_SIZE, seed=0, lenience=screen, num_draft_tokens=3).bind(target)
    drafter.spec_config = drafter.spec_config.with_options(seed=0)
    target.generate(**inputs, **options, assistant_model=drafter)
    found = screen.predictions()
    for level, lenience in enumerate((1.0, 0.2)):
        drafter.spec_config = drafter.spec_config.with_options(lenience=lenience, seed=1)
        target.generate(**inputs, **options, assistant_model=drafter)
        stats = drafter.last_stats
        drafted_rounds = stats.num_verifications - stats.num_plain_steps
        measured = stats.accepted_per_position[0] / drafted_rounds
        assert found["passed"][level][0] == pytest.approx(measured, abs=0.08)
    assert found["passed"][1][0] - found["passed"][0][0] > 0.1
