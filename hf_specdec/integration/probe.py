"""A self-check of a target's class: do its forwards over ragged rows agree with its own one-token steps?

Source facts (`why_not_ragged`) say which models should; this says which do. It costs nine small forwards, once per
model, dtype and attention backend, and never touches torch's global random state.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from ..decoding.placement import input_device
from ..decoding.ragged_model import RaggedModel
from .images import text_ids

_LENGTHS = (3, 6)  # prompt tokens of the two rows
_STEPS = 4
_ACCEPTED = (1, 3)  # tokens of the first round that turn out right
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict] = weakref.WeakKeyDictionary()
_checking = threading.RLock()


class NotRagged(ValueError):
    """A target that cannot run over ragged rows, although its source does not say so."""


def check_ragged(model: PreTrainedModel) -> None:
    """Refuse a target whose ragged forwards are wrong.

    Raises:
        NotRagged: they fail, or differ from its own one-token steps by more than rounding.
        ValueError: its logits are NaN.
    """
    if model.training:  # dropout would differ between any two forwards
        return
    verdicts, key = _verdicts.setdefault(model, {}), configuration(model)
    if key not in verdicts:
        try:
            with uncompiled():
                verdicts[key] = measure(model)
        except torch.OutOfMemoryError:
            raise
        except Exception as cause:  # a model's own code may fail in any way on masks that it does not expect
            verdicts[key] = f"its forward over rows of different lengths fails ({type(cause).__name__}: {cause})"
    if isinstance(verdicts[key], str):
        raise NotRagged(verdicts[key])
    error, allowed = verdicts[key]
    if math.isnan(error):
        raise ValueError(
            f"{type(model).__name__} gives NaN logits in {model.dtype}; look at its weights and its dtype."
        )
    if error > allowed:
        raise NotRagged(
            f"its logits over rows of different lengths differ from its own one-token steps by {error:.1e} of their "
            f"spread ({allowed:.1e} is rounding)"
        )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run a self-check without compiling anything: its shapes come once and would cost a graph each.

    torch.compile has one stance for all threads, so checks take turns: one that ends inside another would leave it
    changed.
    """
    with _checking, torch.compiler.set_stance("force_eager"):
        yield


def configuration(model: PreTrainedModel) -> tuple:
    """What a model's verdict depends on, beside the model."""
    return model.dtype, model.config.get_text_config()._attn_implementation


@torch.no_grad()
def measure(model: PreTrainedModel) -> tuple[float, float]:
    """(error, allowed error) of ragged logits against one-token steps, in units of the logits' standard deviation."""
    device, width = input_device(model), max(_LENGTHS)
    vocab_size = model.config.get_text_config().vocab_size
    ids = text_ids(model, 2, width + _STEPS)
    padding = torch.tensor([width - length for length in _LENGTHS], device=device)[:, None]
    columns = torch.arange(width + _STEPS, device=device)
    mask, positions = (columns >= padding).long(), (columns - padding).clamp_min(0)

    cache = DynamicCache(config=model.config.get_text_config())
    steps = []
    for start, end in [(0, width), *((width + i, width + i + 1) for i in range(_STEPS))]:
        output = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            cache=cache,
            use_cache=True,
        )
        steps.append(output.logits[:, -1].float())
    expected = torch.stack(steps, dim=1)  # [2, steps + 1, V] after each column from width - 1 on
    whole = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    noise = distance(whole[:, width - 1 :].float(), expected)

    ragged = RaggedModel(model, mask[:, :width], 2, width + 2 * _STEPS)
    logits = ragged.prefill(ids[:, :width], mask[:, :width], positions[:, :width]).float()
    errors = [[distance(logits[b], expected[b, :1])] for b in range(2)]
    wrong = (ids[:, width : width + _STEPS] + 1) % vocab_size
    right = torch.arange(_STEPS, device=device) < torch.tensor(_ACCEPTED, device=device)[:, None]
    first = torch.where(right, ids[:, width : width + _STEPS], wrong)
    rows = torch.arange(2, device=device)[:, None]
    for accepted, tokens in (((0, 0), first), (_ACCEPTED, None)):
        done = torch.tensor(accepted, device=device)[:, None]
        count = _STEPS - max(accepted)
        taken = done + torch.arange(count, device=device)  # [2, count] columns after the prompt
        tokens = ids[rows, width + taken] if tokens is None else tokens
        offsets = width + done[:, 0]
        host_offsets = [width + a for a in accepted]
        logits = ragged.forward(tokens, offsets, host_offsets, positions[rows, width + taken]).logits.float()
        valid = [min(a, tokens.shape[1]) if max(accepted) == 0 else tokens.shape[1] for a in _ACCEPTED]
        for b, n in enumerate(valid):
            errors[b].append(distance(logits[b, :n], expected[b, 1 + accepted[b] : 1 + accepted[b] + n]))
    return in_spreads([torch.cat(row) for row in errors], noise, expected.std(), model.dtype)


def in_spreads(
    by_row: list[torch.Tensor], noise: torch.Tensor, spread: torch.Tensor, dtype: torch.dtype, floor: float = 1e-3
) -> tuple[float, float]:
    """(error, allowed error) of a measurement, in units of the logits' standard deviation.

    Args:
        by_row: for each row [m] the distances of its positions' logits from one-token steps.
        noise: [B, n] distances of the steps from a forward over the whole text.
        spread: [] standard deviation of the logits.
        dtype: of the model.
        floor: least error that is allowed in fp32.
    """
    if dtype in (torch.float32, torch.float64):
        error, noise_level, cap = max(row.max() for row in by_row), noise.max(), 1e-2
    else:  # rounding may send single tokens to other experts; a wrong mask or position moves most of a row's
        error, noise_level = max(row.median() for row in by_row), noise.median(dim=1).values.max()
        floor, cap = 0.2, 0.5
    # A class whose steps disagree with its own whole texts gets no licence to disagree with the steps.
    return float(error / spread), max(floor, min(8 * float(noise_level / spread), cap))


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """[..., m] largest difference of each position's logits [..., m, V]."""
    return (ours - theirs).abs().amax(dim=-1)
