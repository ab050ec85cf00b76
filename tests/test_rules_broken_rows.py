"""Rows that no token can be chosen from are marked where they are reached, and nowhere else."""

import pytest
import torch
from test_rules import CPU, MATCHING_RULES

from hf_specdec.lenient import Ensemble, Lenience, Mentored, TopK
from hf_specdec.verification import RULES, Draft, Noise, OneHot, RoundNoise, Sampled, verify


def break_row(scores: torch.Tensor, how: str) -> torch.Tensor:
    """[..., V] scores that no token can be chosen from."""
    broken = scores.clone()
    if how == "all nan":
        broken[...] = torch.nan
    elif how == "all -inf":
        broken[...] = -torch.inf
    else:
        value, where = how.split(" at ")
        broken[..., {"first": 0, "middle": broken.shape[-1] // 2, "last": -1}[where]] = float(value)
    return broken


BROKEN = ["all nan", "all -inf", *(f"{v} at {w}" for v in ("nan", "inf") for w in ("first", "middle", "last"))]


def often_accepted_case(law: str, vocab_size: int) -> tuple[Draft, torch.Tensor, RoundNoise]:
    """Four tokens are left of the vocabulary; the drafted one has p = .6 and q = .8."""
    batch_size, num_slots = 160, 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([0, 1, 2, 3]) if vocab_size == 4 else torch.tensor([3, 700, 701, vocab_size - 1])
    candidates = torch.randint(4, (batch_size, num_slots + 1, 1), generator=generator)
    lengths = torch.randint(num_slots + 1, (batch_size,), generator=generator)
    within = torch.arange(num_slots) < lengths[:, None]

    def weights(drafted: float) -> torch.Tensor:
        other = (1.0 - drafted) / 3.0
        return torch.full((batch_size, num_slots + 1, 4), other).scatter(-1, candidates, drafted).log()

    def over_vocabulary(values: torch.Tensor) -> torch.Tensor:
        return values.new_full((*values.shape[:-1], vocab_size), -torch.inf).index_copy(-1, ids, values)

    logits = weights(0.8)[:, :-1]
    laws = {
        "one-hot": OneHot(),
        "sampled": Sampled(over_vocabulary(logits)),
        "some one-hot": Sampled(
            over_vocabulary(logits), one_hot=torch.tensor([True, False, True]).expand(batch_size, 3)
        ),
        "reduced": Sampled(logits, ids=ids),
    }
    draft = Draft(ids[candidates[:, :-1, 0]].masked_fill(~within, -1), lengths, laws[law])
    noise = RoundNoise(Noise.from_seed(1, batch_size, CPU), torch.arange(batch_size), 2)
    return draft, over_vocabulary(weights(0.6)), noise


@pytest.mark.parametrize("vocab_size", [4, 1500])
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("rule", [*RULES, Lenience(0.9), Mentored(0.01), Ensemble(0.6), TopK(1)], ids=str)
def test_a_broken_row_is_marked_where_it_is_reached_and_nowhere_else(rule, how, vocab_size):
    laws = ["one-hot"] if rule in MATCHING_RULES else ["one-hot", "sampled", "some one-hot", "reduced"]
    for law in laws:
        draft, scores, noise = often_accepted_case(law, vocab_size)
        healthy = verify(draft, scores, rule, noise)
        assert int(healthy.num_accepted.min()) >= 0
        rows = torch.arange(len(scores)) % 2 == 0  # the others must not notice
        for place in range(draft.num_slots + 1):
            broken = scores.clone()
            broken[rows, place] = break_row(scores[rows, place], how)
            verdict = verify(draft, broken, rule, noise)
            # The broken row is reached where a draft that ends before it is accepted to its end.
            lengths = draft.lengths.clamp_max(place)
            kept = torch.arange(draft.num_slots) < lengths[:, None]
            cut = verify(Draft(draft.tokens.masked_fill(~kept, -1), lengths, draft.law), scores, rule, noise)
            reached = rows & (cut.num_accepted == place)
            assert bool(reached.any())
            assert bool((verdict.num_accepted[reached] == -1).all())
            assert bool((verdict.tokens[reached] == -1).all())
            passed_over = rows & ~reached
            for here, wanted in ((passed_over, cut), (~rows, healthy)):
                assert torch.equal(verdict.tokens[here], wanted.tokens[here])
                assert torch.equal(verdict.num_accepted[here], wanted.num_accepted[here])
            everything = rule == TopK(1)  # is accepted
            assert place == 0 or everything or bool((passed_over & (draft.lengths >= place)).any())


UNCHOOSABLE = [how for how in BROKEN if not how.startswith("inf")]  # greedy decoding takes an infinite score


def test_greedy_decoding_takes_a_token_that_is_forced_by_an_infinite_score():
    scores = torch.zeros(1, 2, 5)
    scores[0, 0, 3] = scores[0, 1, 1] = torch.inf
    draft = Draft(torch.tensor([[3]]), torch.tensor([1]), OneHot())
    assert verify(draft, scores, "match", None).tokens.tolist() == [[3, 1]]
    tree = Draft(torch.tensor([[3]]), torch.tensor([1]), OneHot(), parents=torch.tensor([-1]))
    assert verify(tree, scores, "match", None).tokens.tolist() == [[3, 1]]


@pytest.mark.parametrize("how", UNCHOOSABLE)
def test_a_greedy_row_that_is_broken_is_marked_where_it_is_reached(how):
    scores = torch.zeros(3, 3, 5)
    scores[..., 2] = 1.0
    draft = Draft(torch.tensor([[2, 2], [2, 0], [0, 2]]), torch.tensor([2, 2, 2]), OneHot())
    broken = scores.clone()
    broken[:, 2] = break_row(scores[:, 2], how)
    verdict = verify(draft, broken, "match", None)
    assert verdict.num_accepted.tolist() == [-1, 1, 0]
    assert verdict.tokens.tolist() == [[-1, -1, -1], [2, 2, -1], [2, -1, -1]]


@pytest.mark.parametrize(("how", "noisy"), [(h, True) for h in BROKEN] + [(h, False) for h in UNCHOOSABLE])
def test_a_broken_node_of_a_tree_is_marked_where_it_is_reached(how, noisy):
    # Nodes: 0 = token 1, 1 = token 2, 2 = token 2 after node 0, 3 = token 2 after node 1.
    scores = torch.full((2, 5, 4), -30.0)
    scores[0, :, 2] = scores[1, :, 2] = 0.0
    scores[1, 0] = torch.tensor([-30.0, 0.0, -30.0, -30.0])
    parents = torch.tensor([-1, -1, 0, 1])
    draft = Draft(torch.tensor([[1, 2, 2, 2]] * 2), torch.tensor([4, 4]), OneHot(), parents=parents)
    noise = RoundNoise(Noise.from_seed(0, 2, CPU), torch.tensor([0, 0]), 0) if noisy else None
    broken = scores.clone()
    broken[:, 3] = break_row(scores[:, 3], how)  # the row after node 2
    verdict = verify(draft, broken, "match", noise)
    assert verdict.num_accepted.tolist() == [2, -1]
    assert verdict.tokens.tolist() == [[2, 2, 2, -1, -1], [-1] * 5]
    assert verdict.path.tolist() == [[1, 3, -1, -1], [-1] * 4]
