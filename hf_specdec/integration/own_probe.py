"""How a target without ragged rows forgets rejected tokens: its own cache says what it can, a self-check what works.

Three small rounds, one with a draft that is right in part and two with drafts that are right, are compared with the
model's own one-token steps, once per model, dtype and attention backend.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .encoder_decoder import text_name
from .images import text_ids
from .own_target import OwnModel, fresh_cache, why_not_own
from .probe import configuration, distance, in_spreads, uncompiled

_PROMPT = 6
_ROUNDS = ((4, 2), (3, 3), (2, 2))  # drafted tokens, and how many of them are right
_FLOOR = 5e-5  # a recurrent state that is lost moves the logits of a small random model little
# Model types whose layers use their state for single tokens only: lost, it may go unnoticed in bf16.
_ONE_AT_A_TIME = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict] = weakref.WeakKeyDictionary()


def rollback_of(model: PreTrainedModel, encoded: Mapping[str, Any] | None = None) -> str:
    """How the model forgets: by "crop", by "replay", or "stepwise", where blocks give other logits than single tokens.

    Args:
        encoded: what comes from the encoder of an encoder-decoder, of one row of the call.

    Raises:
        ValueError: the model cannot be served over its own cache; the sentence says why.
    """
    name = type(model).__name__
    verdicts, key = _verdicts.setdefault(model, {}), configuration(model)
    if key not in verdicts:
        if reason := why_not_own(model):
            raise ValueError(f"{name} is not served by drafters: {reason}.")
        if model.training:
            raise ValueError(f"{name} is in training mode, where no two forwards agree; call model.eval() first.")
        with uncompiled():
            verdicts[key], why = _choose(model, encoded or {})
        if verdicts[key] == "stepwise":
            warnings.warn(f"{name} generates without drafts, one token a step: {why}.", stacklevel=2)
    return verdicts[key]


def _choose(model: PreTrainedModel, encoded: Mapping[str, Any]) -> tuple[str, str]:
    """(rollback, why it is not a better one)."""
    total = _PROMPT + sum(right + 1 for _, right in _ROUNDS)
    ids = text_ids(model, 1, total)
    if model.config.get_text_config().model_type in _ONE_AT_A_TIME:
        return "stepwise", "its recurrent layers use their state for single tokens only"
    try:
        expected, can_crop = _steps(model, ids, encoded)
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:
        raise ValueError(
            f"{type(model).__name__} is not served by drafters: the self-check runs it on random text, which fails "
            f"({type(cause).__name__}: {cause})."
        ) from cause
    if bool(expected.isnan().any()):
        raise ValueError(
            f"{type(model).__name__} gives NaN logits in {model.dtype}; look at its weights and its dtype."
        )
    noise = _noise(model, ids, encoded, expected)
    why = ""
    for rollback in ("crop", "replay") if can_crop else ("replay",):
        try:
            error, allowed = measure(model, rollback, ids, encoded, expected, noise)
        except torch.OutOfMemoryError:
            raise
        except Exception as cause:  # a model's own code may fail in any way on blocks that it does not expect
            why = why or f"its forward over several tokens at once fails ({type(cause).__name__}: {cause})"
            continue
        if not math.isnan(error) and error <= allowed:
            return rollback, why
        why = why or (
            f"its logits over several tokens at once differ from its own one-token steps by {error:.1e} of their "
            f"spread ({allowed:.1e} is rounding)"
        )
    return "stepwise", why


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    rollback: str,
    ids: torch.Tensor,
    encoded: Mapping[str, Any],
    expected: torch.Tensor,
    noise: torch.Tensor,
) -> tuple[float, float]:
    """(error, allowed error) of blocks with rejected drafts, in units of the logits' standard deviation.

    Args:
        rollback: "crop" or "replay".
        ids: [1, columns] a text.
        encoded: as in `rollback_of`.
        expected: [1, columns - prompt + 1, V] logits of one-token steps from the prompt's last token on.
        noise: as in `in_spreads`.
    """
    own = _start(model, ids, encoded, rollback)
    logits = own.prefill().logits[:, -1:].float()
    errors, columns = [distance(logits[0], expected[0, :1])], _PROMPT
    vocab_size = model.config.get_text_config().vocab_size
    for drafted, right in _ROUNDS:
        columns += 1  # the token that the last round emitted
        text = ids[:, : columns + drafted].clone()
        text[:, columns + right :] = (text[:, columns + right :] + 1) % vocab_size
        logits = own.forward(text, drafted).logits[:, -drafted - 1 :].float()
        first = columns - _PROMPT
        errors.append(distance(logits[0, : right + 1], expected[0, first : first + right + 1]))
        columns += right
    return in_spreads([torch.cat(errors)], noise, expected.std(), model.dtype, floor=_FLOOR)


@torch.no_grad()
def _steps(model: PreTrainedModel, ids: torch.Tensor, encoded: Mapping[str, Any]) -> tuple[torch.Tensor, bool]:
    """([1, columns - prompt + 1, V] logits of one-token steps, whether all layers of the cache say they can crop)."""
    own = _start(model, ids, encoded, "stepwise")
    steps = [own.prefill().logits[:, -1:]]
    can_crop = getattr(own.cache, "is_croppable", False) is True
    steps += [own.forward(ids[:, : column + 1], 0).logits[:, -1:] for column in range(_PROMPT, ids.shape[1])]
    return torch.cat(steps, dim=1).float(), can_crop


@torch.no_grad()
def _noise(
    model: PreTrainedModel, ids: torch.Tensor, encoded: Mapping[str, Any], expected: torch.Tensor
) -> torch.Tensor:
    """[1, m] how far the steps are from a forward over the whole text; zeros where that is not to be had."""
    try:
        whole = model(**{text_name(model, "input_ids"): ids}, **encoded, use_cache=False).logits
        return distance(whole[:, _PROMPT - 1 :].float(), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # then only the floor counts
        return expected.new_zeros(1, 1)


def _start(model: PreTrainedModel, ids: torch.Tensor, encoded: Mapping[str, Any], rollback: str) -> OwnModel:
    """One row of `ids` with the inputs that `generate` would prepare for a prompt."""

    kwargs: dict[str, Any] = {"use_cache": True, "cache": fresh_cache(model), **encoded}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters and not model.config.is_encoder_decoder:
        kwargs["position_ids"] = torch.arange(_PROMPT, device=ids.device)[None]
    if "logits_to_keep" in parameters:
        kwargs["logits_to_keep"] = 1
    return OwnModel(model, ids[:, :_PROMPT], GenerationConfig(), kwargs, rollback)
