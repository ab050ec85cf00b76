"""Calibrated confidences come true as often as they say."""

import pytest
import torch

from hf_specdec.scheduling.calibration import calibration_error, prefix_errors, sequential_temperatures

NUM_ROUNDS, NUM_SLOTS = 20_000, 7


def rounds(overconfident: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [N, n] of a head that exaggerates by a factor, accepted tokens [N])."""
    generator = torch.Generator().manual_seed(seed)
    true = 0.8 + torch.randn(NUM_ROUNDS, NUM_SLOTS, generator=generator)
    passes = torch.rand(true.shape, generator=generator) < torch.sigmoid(true)
    return overconfident * true, passes.long().cumprod(dim=1).sum(dim=1)


def test_the_error_is_that_of_the_bins():
    predicted = torch.tensor([0.02, 0.04, 0.91, 0.93, 1.0])
    happened = torch.tensor([False, True, True, True, True])
    assert calibration_error(predicted, happened) == pytest.approx((0.94 + 0.16 + 0.0) / 5)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_an_overconfident_heads_error_falls_as_the_paper_says(factor):
    logits, accepted = rounds(factor)
    raw = prefix_errors(logits, accepted, (1.0,) * NUM_SLOTS)
    temperatures = sequential_temperatures(logits, accepted)
    unseen = prefix_errors(*rounds(factor, seed=1), temperatures)
    assert max(raw) > 0.08
    assert max(unseen) < 0.03 and all(after < before for after, before in zip(unseen, raw, strict=True))
    assert temperatures[0] == pytest.approx(factor, rel=0.1)


def test_a_head_that_is_right_is_left_alone():
    temperatures = sequential_temperatures(*rounds(1.0))
    assert all(0.7 < t < 1.4 for t in temperatures)


def test_one_temperature_for_all_slots_would_not_do():
    """Negative control: slots that exaggerate differently need temperatures of their own."""
    logits, accepted = rounds(1.0)
    logits = logits * torch.tensor([3.0, 0.5, 3.0, 0.5, 3.0, 0.5, 3.0])
    each = sequential_temperatures(logits, accepted)
    assert each[0] > 2.0 and each[1] < 0.8
    shared = prefix_errors(logits, accepted, (each[0],) * NUM_SLOTS)
    assert max(shared) > 0.05 > max(prefix_errors(logits, accepted, each))


def test_slots_that_were_not_judged_do_not_count():
    logits, accepted = rounds(2.5)
    whole = sequential_temperatures(logits, accepted)
    wrong = torch.randn(5000, NUM_SLOTS)
    wrong[:, 3:] = torch.nan
    logits, accepted = torch.cat([logits, logits[:5000].where(~wrong.isnan(), torch.nan)]), torch.cat([accepted] * 2)
    mixed = sequential_temperatures(logits, accepted[: len(logits)])
    assert mixed[3:] == pytest.approx(whole[3:], rel=0.15)
    assert sequential_temperatures(torch.full((4, 2), torch.nan), torch.zeros(4)) == (1.0, 1.0)
