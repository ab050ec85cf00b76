"""Forwards of a causal language model over rows of different lengths, through its public `forward`.

The target and a draft model both run on this. A forward takes m tokens per row, each row at an offset of its own, and
an explicit mask per kind of attention layer, so that sliding windows stay exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache import ATTENTION_LAYERS, RaggedCache
from .placement import input_device

_KEEP_SHARE = 0.75  # rows are dropped when at most this share is left: dropping copies the cache of the others

# Attention backends by the form of mask that they take.
_BOOLEAN_MASK = ("sdpa",)
_ADDITIVE_MASK = ("eager",)
# Fields that count the positions of a text; those of a decoder come first.
_POSITIONS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
# Model types whose own code assumes that all rows end together.
_UNSUITED = {"gpt_neo": "its attention slices a causal mask of its own, as if all rows ended at the same column"}


def why_not_ragged(model: PreTrainedModel) -> str | None:
    """Why `model` cannot run over ragged rows, as far as its source tells; None where nothing speaks against it."""
    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if config.model_type in _UNSUITED:
        return _UNSUITED[config.model_type]
    if "cache" not in parameters:
        return "its forward takes no `cache`"
    if "attention_mask" not in parameters:
        return "its forward takes no `attention_mask`"
    if "position_ids" not in parameters:
        return "its forward takes no `position_ids`, so rows of different lengths would share their positions"
    backend = config._attn_implementation
    if backend not in _BOOLEAN_MASK + _ADDITIVE_MASK:
        return f"attention backend {backend!r} takes no explicit mask; load it with attn_implementation='sdpa'"
    try:
        RaggedCache(config, max_slots=1)
    except ValueError as error:
        return str(error)
    return None


def length_limit(model: PreTrainedModel) -> tuple[int, str] | None:
    """(columns, reason): past this length a forward over several tokens differs from one-token steps.

    Some models look at the length of the whole forward, drafts included. None where no part of the config says so.
    """
    config = model.config.get_text_config()
    limits = []
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limits.append((original or config.max_position_embeddings, f"its {kind!r} rotary embedding changes there"))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append((int(config.floor_scale) - 1, "its attention temperature changes there"))
    if getattr(config, "keep_window_size", None):
        limits.append((config.keep_window_size, "its attention drops tokens by the size of a block there"))
    return min(limits, default=None)


def most_tokens_at_once(model: PreTrainedModel) -> int | None:
    """Tokens of one forward that are all sure to be computed, None where there is no limit.

    Experts of limited capacity drop what is too much for them, which one-token steps never meet.
    """
    config = model.config.get_text_config()
    share = getattr(config, "moe_eval_capacity_token_fraction", None)  # NLLB-MoE; negative for no limit in evaluation
    if share is not None and 0 < share < 1:
        return 1
    return getattr(config, "expert_capacity", None)  # SwitchTransformers


def max_positions(model: PreTrainedModel) -> int | None:
    """Positions that the model has embeddings for, None where the config names no number."""
    config = model.config.get_text_config()
    numbers = (getattr(config, name, None) for name in _POSITIONS)
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)


def attention_windows(model: PreTrainedModel) -> list[int | None]:
    """For each layer the columns that it keeps in plain decoding: its sliding window, None for all."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


class RaggedModel:
    """A causal model and its cache for B rows.

    Args:
        model: a model for which `why_not_ragged` has nothing to say.
        prompt_mask: [B, W] 1 where the left-padded prompt holds text; None where nothing is padded.
        batch_size: B.
        max_slots: most slots that a row will need.
        keeps_caches: whether the caches of dropped rows are put aside for `restore`.
        device: of the forwards' inputs; by default where the model takes them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_mask: torch.Tensor | None,
        batch_size: int,
        max_slots: int,
        keeps_caches: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        device = input_device(model) if device is None else device
        self.cache = RaggedCache(self.config, max_slots)
        self.padding = None if prompt_mask is None else (prompt_mask == 0).to(device)  # [B, W] True at padding
        self.slots = torch.arange(0, device=device)
        self.additive = self.config._attn_implementation in _ADDITIVE_MASK
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            windowed = getattr(self.config, "sliding_window", None) is not None
            chunked = getattr(self.config, "attention_chunk_size", None) is not None
            kinds = ["sliding_attention" if windowed else "chunked_attention" if chunked else "full_attention"]
        self.kinds = [kind for kind in ATTENTION_LAYERS if kind in kinds]
        self.batch_size = batch_size
        self.kept: list[int] | None = None  # the rows that are still run; None for all
        self.keeps_caches = keeps_caches
        self.dropped: list[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]] = []  # rows, keys and values
        # transformers counts chunks from the first token of the text, not from the first column.
        self.chunk_starts = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        if self.padding is not None:
            self.chunk_starts = self.padding.sum(dim=-1, keepdim=True)

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Run a left-padded text of one width; [B, 1, V] logits of the next token.

        Args:
            ids, mask, position_ids: [B, W], the mask 1 at text.
        """
        keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        unpadded = self.padding is None
        output = self.model(
            input_ids=ids,
            attention_mask=None if unpadded else mask,
            position_ids=position_ids,
            cache=self.cache,
            use_cache=True,
            return_dict=True,
            **keep,
        )
        self.cache.begin_rows()
        return output.logits[:, -1:]

    def drop(self, finished: Sequence[bool]) -> None:
        """Stop running rows that have finished, as soon as enough of them have: their cache is thrown away.

        `forward` still takes and gives all rows; what it gives for dropped ones is zeros.
        """
        kept = range(self.batch_size) if self.kept is None else self.kept
        left = [b for b in kept if not finished[b]]
        if not left or len(left) > _KEEP_SHARE * len(kept):
            return
        places = [i for i, b in enumerate(kept) if not finished[b]]
        if self.keeps_caches:
            ended = [i for i, b in enumerate(kept) if finished[b]]
            self.dropped.append(([kept[i] for i in ended], self.cache.copy_rows(ended)))
        self.cache.select(places)
        index = torch.tensor(places, device=self.chunk_starts.device)
        self.chunk_starts = self.chunk_starts[index]
        self.padding = None if self.padding is None else self.padding[index]
        self.kept = left

    def restore(self) -> None:
        """Bring the caches of dropped rows back, after the last forward."""
        here = list(range(self.batch_size)) if self.kept is None else self.kept
        while self.dropped:
            rows, copies = self.dropped.pop()
            here = here + rows
            self.cache.append_rows(copies)
        if self.kept is not None:
            self.cache.select([here.index(b) for b in range(self.batch_size)])
            self.kept = None

    def forward(
        self,
        tokens: torch.Tensor,
        offsets: torch.Tensor,
        host_offsets: Sequence[int],
        position_ids: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """Run m tokens per row at the rows' offsets.

        Args:
            tokens: [B, m] token ids.
            offsets: [B] slot of each row's first token; the slots before it hold the row's text.
            host_offsets: the same on the host.
            position_ids: [B, m] (or [..., B, m]) positions for the model.
            kwargs: passed on to the model's forward; tensors among them are [B, ...].

        Returns:
            The model's output; its logits are [B, m, V].
        """
        if self.kept is not None:
            index = torch.tensor(self.kept, device=tokens.device)
            tokens, offsets = tokens[index], offsets[index]
            host_offsets = [host_offsets[b] for b in self.kept]
            if position_ids.shape[-2] == self.batch_size:
                position_ids = position_ids[..., index, :]
            kwargs = {key: value[index] if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
        self.cache.place(offsets, host_offsets, tokens.shape[1])
        output = self.model(
            input_ids=tokens,
            attention_mask=self.masks(offsets, tokens.shape[1]),
            position_ids=position_ids,
            cache=self.cache,
            use_cache=True,
            return_dict=True,
            **kwargs,
        )
        output.logits = self.spread(output.logits)
        if output.get("hidden_states") is not None:
            output.hidden_states = tuple(
                None if states is None else self.spread(states) for states in output.hidden_states
            )
        return output

    def spread(self, of_kept: torch.Tensor) -> torch.Tensor:
        """[B, ...] what a forward gave for the rows that are still run, and zeros for the others."""
        if self.kept is None:
            return of_kept
        spread = of_kept.new_zeros(self.batch_size, *of_kept.shape[1:])
        spread[torch.tensor(self.kept, device=of_kept.device)] = of_kept
        return spread

    def masks(self, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, m, slots] what each token sees; a dict by kind of layer where the model mixes them."""
        if len(self.slots) < self.cache.view:
            self.slots = torch.arange(self.cache.capacity, device=self.slots.device)
        keys = self.slots[: self.cache.view]
        queries = offsets[:, None] + self.slots[:num_tokens]  # [B, m] the tokens' own slots
        visible = keys <= queries[..., None]  # [B, m, slots]
        if self.padding is not None:
            visible[:, :, : self.padding.shape[1]] &= ~self.padding[:, None]
        masks = {kind: self._form(self._limit(kind, visible, queries, keys)) for kind in self.kinds}
        return masks if len(masks) > 1 else masks[self.kinds[0]]

    def _limit(self, kind: str, visible: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if kind == "sliding_attention":
            return visible & (queries[..., None] - keys < self.config.sliding_window)
        if kind == "chunked_attention":
            size, starts = self.config.attention_chunk_size, self.chunk_starts
            return visible & (((keys - starts) // size)[:, None] == ((queries - starts) // size)[..., None])
        return visible

    def _form(self, visible: torch.Tensor) -> torch.Tensor:
        mask = visible[:, None]
        if not self.additive:
            return mask
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
