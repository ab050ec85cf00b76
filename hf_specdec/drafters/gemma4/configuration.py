"""What a Gemma 4 assistant is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Gemma4Config:
    """Sizes and switches of an assistant.

    Args:
        hidden_size, intermediate_size, num_attention_heads, rms_norm_eps, hidden_act, attention_bias: of its decoder
            layers.
        vocab_size: of the target, and tokens that it can draft.
        target_hidden_size: width of the target's embedding and last hidden state.
        kinds: for each layer the kind of attention, and with it whose keys and values of the target the layer reads.
        head_dims, num_key_value_heads: of the keys and values of each kind.
        window: tokens that a sliding layer sees, the one that asks among them.
        num_centroids: clusters of the vocabulary; None where every token is scored.
        num_active_centroids: clusters whose tokens are scored.
        rope_config: what transformers' rotary embedding of Gemma 4 is made from.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    target_hidden_size: int
    kinds: tuple[str, ...]
    head_dims: dict[str, int]
    num_key_value_heads: dict[str, int]
    window: int
    num_centroids: int | None
    num_active_centroids: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope_config: Any = field(repr=False, compare=False)
    mlp_bias: bool = False
