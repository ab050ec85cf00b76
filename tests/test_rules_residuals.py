"""What is drawn after a rejection: the residual, right to the last digit, and the target where none is left."""

from decimal import Decimal, localcontext

import pytest
import torch
from laws import chi_square_p_value
from test_rules import CPU, SAMPLING_RULES

from hf_specdec.verification import Draft, Noise, OneHot, RoundNoise, Sampled, verify


class _Tails:
    """Every coin comes up tails; records what the last token is drawn from."""

    def __init__(self, noise: RoundNoise):
        self.noise = noise

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.zeros(p.shape, dtype=torch.bool)

    def choose(self, stream: int | torch.Tensor, scores: torch.Tensor, slots: int | torch.Tensor = 0) -> torch.Tensor:
        self.scores = scores
        return self.noise.choose(stream, scores, slots)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("law", ["one-hot", "sampled", "reduced"])
def test_a_rejection_without_a_residual_draws_from_the_target(rule, law):
    # p = q, yet rejected: rounding may do that. Token 0 is filtered, so index 0 is not an answer.
    num_rows = 20_000
    row = torch.tensor([-torch.inf, 0.3, -1.0, 0.7, -torch.inf])
    if law == "one-hot":
        row = torch.tensor([-torch.inf, -torch.inf, 0.4, -torch.inf, -torch.inf])
    scores = row.expand(num_rows, 2, 5)
    tokens = torch.full((num_rows, 1), 2)
    ids = torch.tensor([3, 2, 1]) if law == "reduced" else None
    logits = scores[:, :1] if ids is None else scores[:, :1, ids]
    draft = Draft(
        tokens, torch.ones(num_rows, dtype=torch.long), OneHot() if law == "one-hot" else Sampled(logits, ids)
    )
    noise = RoundNoise(Noise.from_seed(2, num_rows, CPU), torch.zeros(num_rows, dtype=torch.long), 0)
    verdict = verify(draft, scores, rule, _Tails(noise))
    assert verdict.num_accepted.tolist() == [0] * num_rows
    if law == "one-hot":
        assert bool((verdict.tokens[:, 0] == 2).all())
    elif law == "sampled":
        assert chi_square_p_value(verdict.tokens[:, 0], row.softmax(dim=-1)) > 1e-6
    # Where the two softmaxes differ by rounding, what is left of the residual is drawn from: never a filtered token.
    assert bool((row[verdict.tokens[:, 0]] > -torch.inf).all())


def exact_log_residual(p_logits: torch.Tensor, q_logits: torch.Tensor) -> tuple[list[float], list[float]]:
    """log max(p - q, 0) of each token, and q / p, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        p, q = ([Decimal(x).exp() for x in row.double().tolist()] for row in (p_logits, q_logits))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        residual = [float((a - b).ln()) if a > b else float("-inf") for a, b in zip(p, q, strict=True)]
        return residual, [float(b / a) for a, b in zip(p, q, strict=True)]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
def test_the_residual_of_fp32_logits_is_right_to_fp32(rule, near):
    if near:  # logits so small that fp32 can tell p from q where q / p = 1 - 1e-7
        p_logits = 1e-7 * torch.arange(-8, 8, dtype=torch.float32)
        q_logits = 3e-7 * torch.tensor([1.0, -1.0]).repeat(8) + 0.8 * p_logits
    else:  # q / p from 1e-12 to 1e12 around q = p
        p_logits = torch.linspace(-3.0, 3.0, 16)
        q_logits = p_logits - torch.linspace(-27.8, 27.8, 16)
    residual, ratios = exact_log_residual(p_logits, q_logits)
    assert min(abs(1.0 - ratio) for ratio in ratios) < 1e-6 if near else min(ratios) < 1e-12
    noise = _Tails(RoundNoise(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0))
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), Sampled(q_logits.view(1, 1, 16)))
    verify(draft, p_logits.expand(1, 2, 16), rule, noise)
    assert noise.scores.dtype == torch.float32
    for found, wanted in zip(noise.scores[0, 0].tolist(), residual, strict=True):
        assert found == pytest.approx(wanted, rel=2.0**-23)


def test_the_residual_of_fp64_logits_is_right_to_fp64():
    generator = torch.Generator().manual_seed(0)
    p_logits, q_logits = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    noise = _Tails(RoundNoise(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0))
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), Sampled(q_logits.view(1, 1, 12)))
    verify(draft, p_logits.expand(1, 2, 12), "rejection", noise)
    assert noise.scores.dtype == torch.float64
    assert noise.scores[0, 0].tolist() == pytest.approx(exact_log_residual(p_logits, q_logits)[0], rel=1e-12)
