"""Which way a target takes through the loop: the one place that chooses.

Ragged rows serve a whole batch at once, and are taken wherever the target's source and a self-check allow them. Other
targets keep their own cache and are served row by row; those that even that does not suit are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from ..decoding.ragged_model import why_not_ragged
from ..drafters.base import Drafter
from .generate import generate
from .probe import NotRagged
from .row_by_row import generate_row_by_row


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    logits_processor: Iterable[Any],
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode with a drafter, on the path that the target takes; arguments and result are those of `generate`."""
    call = (model, drafter, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    if why_not_ragged(model) is None:
        try:
            return generate(*call)
        except NotRagged:  # raised before anything was run or given away
            pass
    return generate_row_by_row(*call)
