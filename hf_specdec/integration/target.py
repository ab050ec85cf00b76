"""The target of a call: a transformers model behind decoding's Target protocol."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache

from ..decoding.outputs import States
from ..decoding.ragged_model import RaggedModel
from ..decoding.rows import Rows
from ..decoding.shared_kv import ragged_kv
from ..drafters.base import Signals
from ..verification import Draft
from .compat import TOKEN_TYPES, new_token_types
from .images import image_layers
from .prepared import Prepared
from .probe import NotRagged
from .taps import Taps

# Inputs of a step that the loop prepares itself.
_PREPARED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache")


class RaggedTarget:
    """A causal model that verifies over a ragged cache.

    The prefill is transformers' own, on our cache; after it nothing of transformers' preparation runs again.

    Args:
        prepared: the call.
        max_columns: columns that a row can reach, drafts included.
        keeps_rows: whether rows are run to the end, although they have finished.
        returns_cache: whether `filled_cache` will be asked for.
    """

    cache = "ragged"
    rollback = "crop"

    def __init__(
        self, prepared: Prepared, max_columns: int, keeps_rows: bool = True, returns_cache: bool = True
    ) -> None:
        self.model, self.input_ids, self.generation_config = prepared.model, prepared.input_ids, prepared.config
        self.keeps_rows, self.earlier = keeps_rows, prepared.earlier
        self.states: States | None = None
        prompt_mask, max_slots = prepared.kwargs.get("attention_mask"), prepared.earlier + max_columns
        device = self.input_ids.device
        self.ragged = RaggedModel(self.model, prompt_mask, prepared.batch_size, max_slots, returns_cache, device)
        self.given: DynamicCache | StaticCache = prepared.kwargs["cache"]
        self.num_given = int(self.given.get_seq_length())
        if self.num_given:
            self.ragged.cache.load(self.given)
        self.taps = Taps(self.model, prepared.drafter.signals, prepared.returned, self.ragged.spread)
        self.model_kwargs = self.taps.inputs({**prepared.kwargs, "cache": self.ragged.cache})
        # [..., B or 1, 1] position of the first new token, and what else a step takes
        self.next_position, self.constants = self._step_inputs()

    def prefill(self) -> tuple[torch.Tensor, Signals | None]:
        output, signals = self.taps.prefill(
            lambda: self.model._prefill(self.input_ids, self.generation_config, self.model_kwargs)
        )
        if not any(layer.is_initialized for layer in self.ragged.cache.layers):
            raise ValueError(
                f"{type(self.model).__name__} has left its cache empty, as some models do that checkpoint their "
                "activations in training mode; call model.eval() first."
            )
        self.ragged.cache.begin_rows()
        self.states = self.taps.states(output)
        return self._logits(output)[:, -1:], self._with_shared_kv(signals)

    def verify(self, rows: Rows, draft: Draft) -> tuple[torch.Tensor, Signals | None]:
        if not self.keeps_rows:
            self.ragged.drop(rows.finished)
        tokens = torch.cat([rows.last_tokens(), draft.tokens.clamp_min(0)], dim=1)
        output = self._run(tokens, rows.lengths - 1, [width - 1 for width in rows.widths])
        return self._logits(output), self._with_shared_kv(self.taps.signals(output))

    def read_again(self, rows: Rows, first: int, end: int) -> torch.Tensor:
        offsets = torch.full_like(rows.lengths, first)
        return self._logits(self._run(rows.ids[:, first:end], offsets, [first] * len(rows)))

    def _run(self, tokens: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int]) -> Any:
        new = offsets - self.input_ids.shape[1]  # how far each row is past its prompt
        positions = self.next_position + new[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        slots, host_slots = offsets + self.earlier, [offset + self.earlier for offset in host_offsets]
        constants = {
            key: value.expand(-1, tokens.shape[1]) if key in TOKEN_TYPES else value
            for key, value in self.constants.items()
        }
        output = self.ragged.forward(tokens, slots, host_slots, positions, **constants)
        self.states = self.taps.states(output)
        return output

    def _with_shared_kv(self, signals: Signals | None) -> Signals | None:
        if not self.taps.wanted.shared_kv:
            return signals
        return Signals(signals.hidden_states if signals else {}, ragged_kv(self.ragged, self.earlier))

    def _logits(self, output: Any) -> torch.Tensor:
        return output.logits.to(self.input_ids.device, torch.float32)

    def filled_cache(self, rows: Rows) -> Cache:
        """The cache that `generate` was given or had made, filled as plain decoding fills it; rows end together."""
        self.ragged.restore()
        return self.ragged.cache.append_to(self.given, self.num_given, self.earlier + max(rows.widths) - 1)

    def close(self) -> None:
        """Leave the model as it was."""
        self.taps.close()

    def _step_inputs(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """The first new token's position, and what a step takes besides tokens, mask, positions and cache.

        The model prepares its inputs once for the prompt and once for the token after it. Where the second does not
        follow from the first, the model does something at each step that the loop would not.

        Raises:
            NotRagged: it does.
        """
        model, kwargs = self.model, self.model_kwargs
        has_images = kwargs.get("pixel_values") is not None or kwargs.get("cross_attention_states") is not None
        if (layers := image_layers(model)) and (has_images or any(self.given.get_seq_length(i) for i in layers)):
            raise NotRagged("its cross-attention layers keep images in the cache")
        prompt = model.prepare_inputs_for_generation(self.input_ids, is_first_iteration=True, **kwargs)
        longer = torch.nn.functional.pad(self.input_ids, (0, 1))  # with any token: nothing is run
        step_kwargs = dict(kwargs, position_ids=_one_longer(kwargs["position_ids"], step=1))
        if kwargs.get("attention_mask") is not None:
            step_kwargs["attention_mask"] = _one_longer(kwargs["attention_mask"], step=0)
        for key in TOKEN_TYPES:
            if kwargs.get(key) is not None:
                step_kwargs[key] = torch.cat([kwargs[key], new_token_types(key, kwargs[key])], dim=1)
        step = model.prepare_inputs_for_generation(
            longer, next_sequence_length=1, is_first_iteration=False, **step_kwargs
        )
        before, after = prompt.get("position_ids"), step.get("position_ids")
        if before is None or after is None or not torch.equal(before[..., -1:] + 1, after[..., -1:]):
            raise NotRagged("it makes positions of its own at every step")
        if step.get("cache") is not self.ragged.cache:
            raise NotRagged("it replaces its cache while it generates")
        constants = {key: value for key, value in step.items() if key not in _PREPARED and value is not None}
        growing = sorted(key for key, value in constants.items() if isinstance(value, torch.Tensor))
        if unknown := [key for key in growing if key not in TOKEN_TYPES or constants[key].shape[1:] != (1,)]:
            raise NotRagged(f"it takes `{unknown[0]}` at every step")
        return after[..., -1:], constants


def _one_longer(values: torch.Tensor, step: int) -> torch.Tensor:
    """[..., W + 1] with one more column, the last one plus `step`."""
    return torch.cat([values, values[..., -1:] + step], dim=-1)
