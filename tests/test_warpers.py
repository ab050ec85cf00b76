"""Top-k and top-p as one step keep the tokens that transformers keeps, one step after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.decoding.processors import BlockProcessors
from hf_specdec.decoding.warpers import TopKTopP, fuse

IDS = torch.zeros(1, 1, dtype=torch.long)


def kept_by_transformers(warpers, scores: torch.Tensor) -> torch.Tensor:
    """Position by position, as plain decoding calls them."""
    rows = []
    for row in scores:
        for warper in warpers:
            row = warper(IDS, row.reshape(1, -1))
        rows.append(row)
    return torch.cat(rows)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_scores_are_those_of_transformers(data):
    seed, size = data.draw(st.integers(0, 10_000)), data.draw(st.sampled_from([7, 50, 400]))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(data.draw(st.integers(1, 5)), size, generator=generator) * data.draw(st.sampled_from([0.2, 3]))
    if data.draw(st.booleans()):
        scores = scores.bfloat16().float()  # ties, as half-precision targets give them
    if data.draw(st.booleans()):
        scores = scores.round()
    scores = scores.masked_fill(
        torch.rand(scores.shape, generator=generator) < data.draw(st.sampled_from([0, 0.5])), -torch.inf
    )
    scores[:, 0] = 0.0
    keep = data.draw(st.integers(1, 3))
    warpers = [
        TopKLogitsWarper(data.draw(st.integers(1, size + 2)), min_tokens_to_keep=keep),
        TopPLogitsWarper(data.draw(st.floats(0.01, 1.0)), min_tokens_to_keep=keep),
    ]
    (fused,) = fuse(warpers)
    assert torch.equal(fused(IDS, scores.clone()), kept_by_transformers(warpers, scores))


@pytest.mark.parametrize("ties", [False, True])
def test_the_vocabulary_is_sorted_only_where_scores_tie_at_the_border(monkeypatch, ties):
    scores = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    if ties:
        scores[1, :100] = 5.0
    sorted_sizes: list[int] = []
    monkeypatch.setattr(
        TopPLogitsWarper, "__call__", lambda self, ids, scores: sorted_sizes.append(len(scores)) or scores
    )
    TopKTopP(TopKLogitsWarper(50), TopPLogitsWarper(0.9))(IDS, scores)
    assert sorted_sizes == ([3] if ties else [])


def test_only_a_top_p_right_after_a_top_k_is_joined_with_it():
    temperature, top_k, top_p = TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)
    joined = fuse([temperature, top_k, top_p, temperature])
    assert [type(w) for w in joined] == [TemperatureLogitsWarper, TopKTopP, TemperatureLogitsWarper]
    for apart in ([top_p, top_k], [top_k, temperature, top_p], [TopKLogitsWarper(5, filter_value=-9.0), top_p]):
        assert fuse(apart) == apart


def test_a_block_goes_through_at_once():
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)]
    scores = torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(1))
    found = BlockProcessors(warpers)(scores.clone(), [5, 6], torch.zeros(2, 20, dtype=torch.long))
    assert torch.equal(found.flatten(0, 1), kept_by_transformers(warpers, scores.flatten(0, 1)))
