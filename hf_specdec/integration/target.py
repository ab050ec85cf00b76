"""The target of a call: a transformers model behind decoding's Target protocol."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..decoding.ragged_model import RaggedModel
from ..decoding.rows import Rows
from ..drafters.base import Signals, TargetSignals
from ..verification import Draft

# Inputs of a step that the loop prepares itself.
_PREPARED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache")


class RaggedTarget:
    """A causal model that verifies over a ragged cache.

    The prefill is transformers' own, on our cache; after it nothing of transformers' preparation runs again.

    Args:
        model: the target.
        input_ids: [B, W] the left-padded prompts.
        generation_config, model_kwargs: as `generate` prepared them.
        wanted: what the drafter needs from each forward.
        max_columns: columns that a row can reach, drafts included.
    """

    cache = "ragged"
    rollback = "crop"

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        wanted: TargetSignals,
        max_columns: int,
    ) -> None:
        self.model, self.input_ids, self.generation_config = model, input_ids, generation_config
        self.wanted = wanted
        prompt_mask = model_kwargs.get("attention_mask")
        self.ragged = RaggedModel(model, prompt_mask, input_ids.shape[0], max_columns)
        self.model_kwargs = {**model_kwargs, "cache": self.ragged.cache}
        if wanted.hidden_states:
            self.model_kwargs["output_hidden_states"] = list(wanted.hidden_states)
        self.next_position = model_kwargs["position_ids"][..., -1:] + 1  # [..., B or 1, 1] of the first new token
        self.constants: dict[str, Any] = {}
        self.steps = torch.arange(max_columns, device=input_ids.device)

    def prefill(self) -> tuple[torch.Tensor, Signals | None]:
        output = GenerationMixin._prefill(self.model, self.input_ids, self.generation_config, self.model_kwargs)
        self.ragged.cache.begin_rows()
        self.constants = self._step_constants()
        return self._logits(output)[:, -1:], self._signals(output)

    def verify(self, rows: Rows, draft: Draft) -> tuple[torch.Tensor, Signals | None]:
        tokens = torch.cat([rows.last_tokens(), draft.tokens.clamp_min(0)], dim=1)
        offsets = rows.lengths - 1
        new = offsets - self.input_ids.shape[1]  # how far each row is past its prompt
        positions = self.next_position + new[:, None] + self.steps[: tokens.shape[1]]
        host_offsets = [width - 1 for width in rows.widths]
        output = self.ragged.forward(tokens, offsets, host_offsets, positions, **self.constants)
        return self._logits(output), self._signals(output)

    def _logits(self, output: Any) -> torch.Tensor:
        return output.logits.to(self.input_ids.device, torch.float32)

    def _signals(self, output: Any) -> Signals | None:
        if not self.wanted.hidden_states:
            return None
        return Signals({index: output.hidden_states[index] for index in self.wanted.hidden_states})

    def _step_constants(self) -> dict[str, Any]:
        """What the model wants at every step besides tokens, mask, positions and cache.

        Raises:
            ValueError: it wants a tensor, which would have to grow with the rows.
        """
        prepared = self.model.prepare_inputs_for_generation(
            self.input_ids, next_sequence_length=1, is_first_iteration=False, **self.model_kwargs
        )
        constants = {k: v for k, v in prepared.items() if k not in _PREPARED and v is not None}
        growing = sorted(name for name, value in constants.items() if isinstance(value, torch.Tensor))
        if growing:
            raise ValueError(
                f"{type(self.model).__name__} wants `{growing[0]}` at every step, which is not served yet."
            )
        return constants
