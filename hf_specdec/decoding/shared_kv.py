"""Keys and values that a target keeps of its text, for a drafter that attends over them in the place of its own."""

from __future__ import annotations

import torch
from transformers import Cache, PreTrainedConfig

from ..drafters.signals import SharedKV, SharedLayer
from .ragged_model import RaggedModel


def shared_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Kind of attention -> the last layer of that kind with keys and values of its own.

    Args:
        config: the text config of a target; layers that reuse another's keys and values (`kv_sharing_modes`) have none.
    """
    modes = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    kinds = enumerate(zip(config.layer_types, modes, strict=True))
    return {kind: index for index, (kind, mode) in kinds if mode != "reuse"}


def ragged_kv(ragged: RaggedModel, earlier: int) -> SharedKV:
    """What a ragged cache holds after a forward; its slots are columns.

    Args:
        ragged: the target.
        earlier: columns before the prompt.
    """
    layers, view = {}, ragged.cache.view
    for kind, index in shared_layers(ragged.config).items():
        keys, values = _filled(ragged.cache, index)
        layers[kind] = SharedLayer(keys[:, :, :view], values[:, :, :view], first=0)
    return SharedKV(layers, ragged.padding, earlier, ragged.kept)


def own_kv(cache: Cache, config: PreTrainedConfig, filled: int, prompt_mask: torch.Tensor | None) -> SharedKV:
    """What transformers' cache of one row holds; of a sliding layer that is the last columns.

    Args:
        cache: the cache.
        config: the text config of its model.
        filled: columns that the cache has read.
        prompt_mask: [1, W] 1 where the prompt holds text, None where nothing is padded.
    """
    layers = {}
    for kind, index in shared_layers(config).items():
        keys, values = _filled(cache, index)
        layers[kind] = SharedLayer(keys, values, first=filled - keys.shape[2])
    return SharedKV(layers, None if prompt_mask is None else prompt_mask == 0)


def _filled(cache: Cache, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    layer = cache.layers[index]
    assert layer.keys is not None and layer.values is not None  # a forward has been there
    return layer.keys, layer.values
