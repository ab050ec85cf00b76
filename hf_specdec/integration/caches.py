"""Which caches of transformers' a call may ask for, and which of a user's it continues and fills.

The loop always runs on a cache of its own. One of transformers' is read before the prefill and filled at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .own_target import fresh_cache
from .prepared import Prepared

_STATIC = ("static", "sliding_window", "hybrid", "hybrid_chunked")  # the last three are older names of the first
# A dummy stands for a layer that shares the cache of another.
_LAYERS: dict[type, tuple[type, ...]] = {
    DynamicCache: (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer),
    StaticCache: (StaticLayer, StaticSlidingWindowLayer, DummyLayer),
}


def check_implementation(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse kinds of cache that change the text or where it is kept.

    Raises:
        ValueError: one sentence that names the option and says what to do.
    """
    implementation = config.cache_implementation
    if implementation in (None, "dynamic") or (implementation in _STATIC and not model.config.is_encoder_decoder):
        return
    raise ValueError(
        f"`cache_implementation` is {implementation!r}; a drafter brings its own cache, which is neither offloaded nor "
        "quantised. Leave it out."
    )


def check_cache(prepared: Prepared) -> None:
    """Refuse a cache of another kind, of another text, or without room for this one."""
    cache: Any = prepared.kwargs.get("cache")
    layers = getattr(cache, "layers", ())
    kinds = {type(layer) for layer in layers}
    if type(cache) not in _LAYERS or getattr(cache, "offloading", False) or kinds - set(_LAYERS[type(cache)]):
        named = f" with {', '.join(sorted(kind.__name__ for kind in kinds))}" if kinds else ""
        raise ValueError(
            f"`cache` is a {type(cache).__name__}{named}; a drafter continues a DynamicCache or a StaticCache that is "
            "not offloaded. Give one, or leave it out."
        )
    length, width, earlier = int(cache.get_seq_length()), prepared.width, prepared.earlier
    if length and not (length == earlier or (earlier == 0 and length < width)):
        raise ValueError(
            f"`cache` holds {length} tokens beside `input_ids` of {width} and an attention mask of {width + earlier}; "
            "give the whole text's ids, or the new ones with the whole text's mask."
        )
    rows = {layer.keys.shape[0] for layer in layers if layer.is_initialized and layer.keys is not None}
    if rows - {prepared.batch_size}:
        raise ValueError(f"`cache` holds {max(rows)} rows and this call has {prepared.batch_size}; give the same rows.")
    if type(cache) is StaticCache and getattr(cache, "_is_user_defined", False):
        _check_room(cache, earlier + prepared.max_width - 1)


def _check_room(cache: StaticCache, needed: int) -> None:
    """Refuse a static cache that the longest text would overflow; the last token is not read."""
    rooms = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer) and not layer.is_sliding]
    if min(rooms, default=needed) < needed:
        raise ValueError(
            f"`cache` is a StaticCache with room for {min(rooms)} tokens and this call may fill {needed}; make it with "
            f"max_cache_len={needed}, or generate fewer tokens."
        )


def with_growing_cache(prepared: Prepared) -> Prepared:
    """The call with a cache that can be cut back and run past the last token, where a static one was asked for."""
    if not isinstance(prepared.kwargs.get("cache"), StaticCache):
        return prepared
    return replace(prepared, kwargs={**prepared.kwargs, "cache": fresh_cache(prepared.model)})
