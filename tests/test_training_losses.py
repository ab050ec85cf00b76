"""The distance of two laws, and its gradient."""

import pytest
import torch
from torch.autograd import gradcheck

from hf_specdec.training.losses import divergence


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 23, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


@pytest.mark.parametrize(("cross_entropy", "distance"), [(1.0, 0.0), (0.1, 0.9), (0.0, 1.0), (2.0, 0.0)])
def test_values_and_gradients_are_those_of_the_formulas(cross_entropy, distance):
    logits, target = random_logits(70, 0).requires_grad_(), random_logits(70, 1)
    found = divergence(logits, target, cross_entropy, distance)
    q, p = logits.softmax(-1), target.softmax(-1)
    apart = (q - p).abs().sum(-1)
    loss = -cross_entropy * (p * q.log()).sum(-1) + distance * apart
    torch.testing.assert_close(found.loss, loss)
    torch.testing.assert_close(found.acceptance, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(found.log_normaliser, logits.logsumexp(-1))
    assert torch.equal(found.best, logits.argmax(-1))
    weights = torch.rand(70, dtype=torch.float64)
    (ours,) = torch.autograd.grad((found.loss * weights).sum(), logits)
    (theirs,) = torch.autograd.grad((loss * weights).sum(), logits)
    torch.testing.assert_close(ours, theirs)
    assert gradcheck(lambda x: divergence(x, target[:5], cross_entropy, distance).loss, logits[:5])


def test_half_precision_is_summed_in_single():
    logits, target = random_logits(10, 0), random_logits(10, 1)
    exact = divergence(logits, target, 0.1, 0.9).loss
    rounded = divergence(logits.bfloat16(), target.bfloat16(), 0.1, 0.9).loss
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), exact, atol=0.03, rtol=0.03)
