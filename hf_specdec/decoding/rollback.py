"""What a cache of transformers held at one point, to go back to.

Attention layers append, so going back is to cut off what came later. Recurrent and convolution layers fold every token
into a state that they write over: the state is copied, and put back. transformers itself can crop attention and, with
`activate_past_recording`, convolution layers to any point; of caches with a recurrent state it says `is_croppable`
False, and those are what this is for.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

_KNOWN_LAYERS = (
    DummyLayer,
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_STATES = ("conv_states", "recurrent_states")


def unknown_layers(cache: Any) -> list[str]:
    """The classes of a cache's layers that are not transformers' common ones, whose ways are not known here."""
    return sorted({type(layer).__name__ for layer in getattr(cache, "layers", ()) if type(layer) not in _KNOWN_LAYERS})


class Snapshot:
    """A point in a cache's life.

    Args:
        cache: any cache; those with layers of their own class are copied as a whole.
    """

    def __init__(self, cache: Any) -> None:
        self.cache, self.copy = cache, None
        self.layers: list[_LayerSnapshot] | None = None
        if type(cache) is DynamicCache and not unknown_layers(cache):
            self.layers = [_LayerSnapshot(layer) for layer in cache.layers]
        else:
            self.copy = copy.deepcopy(cache)

    def restore(self) -> Any:
        """The cache as it was. May be asked for again after other forwards."""
        if self.layers is None:
            return copy.deepcopy(self.copy)
        for layer in self.layers:
            layer.restore()
        return self.cache


class _LayerSnapshot:
    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.length = 0
        self.window: tuple[torch.Tensor, torch.Tensor] | None = None
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            self.length = layer.get_seq_length()
            if isinstance(layer, DynamicSlidingWindowLayer):  # it forgets what leaves the window, so keep that
                self.window = layer.keys, layer.values  # replaced by every update, never written into
        self.states: list[tuple[str, int, torch.Tensor]] = []
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = [(name, index, state) for name in _STATES for index, state in getattr(layer, name).items()]
            self.states = [(name, index, state.clone()) for name, index, state in states if state is not None]

    def restore(self) -> None:
        layer = self.layer
        for name, index, state in self.states:
            getattr(layer, name)[index].copy_(state)  # in place, for their addresses are meant to stay
        if self.window is not None:
            layer.keys, layer.values = self.window
            layer.cumulative_length = self.length
        elif isinstance(layer, DynamicIndexedLayer):
            layer.crop(self.length - layer.get_seq_length())
        elif isinstance(layer, DynamicLayer) and layer.is_initialized:
            DynamicLayer.crop(layer, self.length - layer.get_seq_length())
