"""A generate call as transformers has prepared it, at the point where it hands over to a decoding loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from ..decoding.outputs import RETURNED
from ..drafters.base import Drafter
from ..drafters.request import Source
from .encoder_decoder import source_of, text_name


@dataclass(frozen=True)
class Prepared:
    """One call.

    Args:
        model, drafter: the target, and what drafts for it.
        input_ids: [B, W] the left-padded prompts.
        processors, criteria: of the call, those that transformers adds among them.
        config: the options, with nothing left open.
        streamer: of the user, or None.
        kwargs: inputs of the model: mask, positions, the cache and the rest.
        encoder_inputs: [B, ...] what the target's encoder was given, where it has one and that is known.
    """

    model: PreTrainedModel
    drafter: Drafter
    input_ids: torch.Tensor
    processors: list[Any]
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any | None
    kwargs: dict[str, Any]
    encoder_inputs: torch.Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def width(self) -> int:
        return self.input_ids.shape[1]

    @property
    def max_width(self) -> int:
        """Columns at which every row ends; each has one new token in any case, as in plain decoding."""
        limits = [criterion.max_length for criterion in self.criteria if type(criterion) is MaxLengthCriteria]
        return max(min(limits, default=self.config.max_length), self.width + 1)

    @property
    def pad_token_id(self) -> int:
        token = self.config._pad_token_tensor
        return 0 if token is None else int(token)

    @property
    def returned(self) -> frozenset[str]:
        """Which of RETURNED the call returns."""
        if not self.config.return_dict_in_generate:
            return frozenset()
        return frozenset(name for name in RETURNED if getattr(self.config, f"output_{name}"))

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """[B, E + W] of the text; None where nothing is padded."""
        return self.kwargs.get(text_name(self.model, "attention_mask"))

    @property
    def source(self) -> Source | None:
        """What the target's encoder read and gave; None where it has none."""
        if not self.model.config.is_encoder_decoder:
            return None
        return source_of(self.encoder_inputs, self.kwargs, self.model.config.get_text_config().vocab_size)

    @property
    def earlier(self) -> int:
        """Columns before the prompt: a text in a cache whose ids were not given again, or embeddings."""
        mask = self.attention_mask
        # A mask that hides nothing has been taken away; its length has been written down.
        columns = getattr(self.config, "_mask_length", self.width) if mask is None else mask.shape[1]
        return columns - self.width
