"""Making a drafter's confidence mean what it says: sequential temperature scaling.

Cheng et al. 2026 (arXiv:2607.05147). The chance that the first k tokens are all accepted is a product of k
confidences, so errors of the first slots would grow along the block. Temperatures are therefore chosen slot by slot,
each with those before it already fixed.
"""

from __future__ import annotations

import torch

_TEMPERATURES = [0.25 * 20.0 ** (i / 80) for i in range(81)]  # 0.25 to 5
_NUM_BINS = 20


def calibration_error(predicted: torch.Tensor, happened: torch.Tensor) -> float:
    """Expected calibration error: how far a prediction is from how often it came true, on average over equal bins.

    Args:
        predicted: [N] probabilities.
        happened: [N] bool.
    """
    bins = (predicted * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    gaps = torch.zeros(_NUM_BINS, dtype=torch.float64).index_add_(0, bins, predicted.double() - happened.double())
    return float(gaps.abs().sum() / max(len(predicted), 1))


def prefix_errors(logits: torch.Tensor, accepted: torch.Tensor, temperatures: tuple[float, ...]) -> list[float]:
    """Expected calibration error of "the first k drafted tokens are accepted", for each k.

    Args:
        logits: [N, n] of the confidence head in N rounds; NaN where a slot was not judged.
        accepted: [N] tokens.
        temperatures: [n].
    """
    scaled = torch.sigmoid(logits.double() / torch.tensor(temperatures, dtype=torch.float64)).cumprod(dim=1)
    errors = []
    for slot, judged in enumerate((~logits.isnan()).unbind(dim=1)):
        errors.append(calibration_error(scaled[judged, slot], accepted[judged] > slot))
    return errors


def sequential_temperatures(logits: torch.Tensor, accepted: torch.Tensor) -> tuple[float, ...]:
    """The temperature of each slot, from rounds whose whole block was verified.

    Args:
        logits, accepted: as in `prefix_errors`.
    """
    found: list[float] = []
    reach = torch.ones(len(logits), dtype=torch.float64)
    for slot, column in enumerate(logits.double().unbind(dim=1)):
        judged, happened = ~column.isnan(), accepted > slot
        if not bool(judged.any()):
            found.append(1.0)
            continue
        errors = [
            calibration_error((reach * torch.sigmoid(column / t))[judged], happened[judged]) for t in _TEMPERATURES
        ]
        found.append(_TEMPERATURES[min(range(len(errors)), key=errors.__getitem__)])
        reach = reach * torch.sigmoid(column / found[-1])
    return tuple(found)
