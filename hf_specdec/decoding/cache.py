"""A key-value cache whose rows have different lengths.

Slot s of a row holds column s of its text, left padding included. A forward over m tokens writes each row at an offset
of its own, and an explicit mask says what each token sees. To forget rejected tokens (statistics
call it "crop") is then to write over them: nothing is copied, and one row and many are served alike.

Memory is allocated ahead and doubled when a text outgrows it. Sliding layers keep every slot, because a row that was
rejected must be able to go back; their window is in the mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_HEADROOM = 512  # slots beyond the prompt, so that most answers need no second allocation


class RaggedCache(Cache):
    """The cache of B rows.

    Before `begin_rows` it appends, as a DynamicCache would, so that the model's own prefill fills it. Afterwards every
    forward writes at the offsets given by `place`.

    Args:
        config: the text config of the model.
        max_slots: most slots that a row will ever need; memory is only taken as the rows grow.

    Raises:
        ValueError: a layer keeps a state that cannot be written at an offset (recurrent and compressed layers).
    """

    def __init__(self, config: PreTrainedConfig, max_slots: int) -> None:
        self.max_slots = max_slots
        self.capacity = 0
        self.offsets: torch.Tensor | None = None  # [B] where the next forward writes
        self.common_offset: int | None = None  # the same on the host, where all rows agree
        self.view = 0  # slots that the next forward attends over
        types, arguments = get_layer_types_and_kwargs(config)
        foreign = sorted(set(types) - set(ATTENTION_LAYERS) - {"dummy"})
        if foreign:
            raise ValueError(f"its cache has layers of type {', '.join(foreign)}, whose rows have to be of one length")
        layers = [
            DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs) if kind == "dummy" else RaggedLayer(self)
            for kind, kwargs in zip(types, arguments, strict=True)
        ]
        super().__init__(layers=layers)

    def begin_rows(self) -> None:
        """Leave the prefill: from now on `place` says where forwards write."""
        self.view = self.common_offset = self.get_seq_length()
        self.offsets = torch.empty(0)

    def place(self, offsets: torch.Tensor, host_offsets: Sequence[int], num_tokens: int) -> None:
        """Set where the next forward over `num_tokens` tokens writes.

        Args:
            offsets: [B] first slot of each row, on the device of the layers.
            host_offsets: the same on the host.
        """
        self.offsets = offsets
        self.common_offset = host_offsets[0] if min(host_offsets) == max(host_offsets) else None
        self.view = max(host_offsets) + num_tokens
        self.reserve(self.view)

    def reserve(self, num_slots: int) -> None:
        """Make room for `num_slots` slots a row."""
        if num_slots <= self.capacity:
            return
        self.capacity = max(num_slots, min(max(num_slots + _HEADROOM, 2 * self.capacity), self.max_slots))
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                layer.grow(self.capacity)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        for layer in self._filled_layers():
            index = torch.tensor(rows, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def copy_rows(self, rows: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [len(rows), heads, capacity, head_dim] of some rows, for each layer."""
        copies = []
        for layer in self._filled_layers():
            index = torch.tensor(rows, device=layer.keys.device)
            copies.append((layer.keys[index], layer.values[index]))
        return copies

    def append_rows(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add rows that were copied before they were given up."""
        for layer, (keys, values) in zip(self._filled_layers(), copies, strict=True):
            grown = (0, 0, 0, layer.keys.shape[2] - keys.shape[2])  # more slots may have been allocated since
            layer.keys = torch.cat([layer.keys, torch.nn.functional.pad(keys, grown)])
            layer.values = torch.cat([layer.values, torch.nn.functional.pad(values, grown)])

    def _filled_layers(self) -> list[RaggedLayer]:
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer) and layer.is_initialized]

    def load(self, cache: DynamicCache | StaticCache) -> None:
        """Take over a text that was read before; sliding layers hold no more of it than their window."""
        length = int(cache.get_seq_length())  # a static cache counts on the device
        self.reserve(length)
        for layer, source in zip(self.layers, cache.layers, strict=False):
            if isinstance(layer, RaggedLayer) and source.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
                held = min(length, source.keys.shape[2])  # a static layer has more slots than tokens
                layer.keys[:, :, length - held : length] = source.keys[:, :, :held]
                layer.values[:, :, length - held : length] = source.values[:, :, :held]
                layer.filled = length

    def append_to(self, cache: Cache, first: int, end: int) -> Cache:
        """Append slots `first` to `end` to a cache of transformers, as the model would have."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RaggedLayer) and layer.is_initialized and first < end:
                cache.update(layer.keys[:, :, first:end], layer.values[:, :, first:end], index)
        return cache


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [B, heads, capacity, head_dim]."""

    is_sliding = False  # the window is in the mask, not in the storage
    is_croppable = True

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()
        self.owner = owner
        self.filled = 0  # slots written by the prefill

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not uninitialised memory: a masked slot still enters as 0 x value, and 0 x NaN is NaN.
        capacity = self.owner.capacity
        self.keys = key_states.new_zeros(*key_states.shape[:2], capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(*value_states.shape[:2], capacity, value_states.shape[-1])
        self.device = key_states.device
        self.is_initialized = True

    def __deepcopy__(self, memo: dict) -> RaggedLayer:
        """A layer of the same cache: models that loop over their layers copy the cache's (Dory)."""
        twin = RaggedLayer.__new__(RaggedLayer)
        twin.__dict__.update({k: v if k == "owner" else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return twin

    def grow(self, capacity: int) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = key_states.shape[-2]
        first: int | None
        if self.owner.offsets is None:
            first, view = self.filled, self.filled + num_tokens
            self.owner.reserve(view)
            self.filled = view
        else:
            view = self.owner.view
            # Compiled, rows in step and rows apart share one graph.
            first = None if torch.compiler.is_compiling() else self.owner.common_offset
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if first is not None:
            self.keys[:, :, first : first + num_tokens] = key_states
            self.values[:, :, first : first + num_tokens] = value_states
        else:
            assert self.owner.offsets is not None
            rows = torch.arange(key_states.shape[0], device=self.keys.device)[:, None]
            slots = self.owner.offsets.to(self.keys.device)[:, None] + torch.arange(num_tokens, device=self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :view], self.values[:, :, :view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.owner.offsets is None:
            return self.filled + query_length, 0
        return self.owner.view, 0

    def get_seq_length(self) -> int:
        if self.owner.offsets is None:
            return self.filled
        # Rows that differ have no length in common; models that would need one are not served.
        return self.owner.view if self.owner.common_offset is None else self.owner.common_offset

    def get_max_length(self) -> int:
        return self.owner.max_slots
