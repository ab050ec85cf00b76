"""Rotary embedding of a drafter's layers, and those layers as transformers' cache and formulas want to hear of them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class LayerSizes(Protocol):
    """What a drafter's config says about its attention layers; `windows` has an entry for each."""

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    @property
    def rope_parameters(self) -> dict[str, Any]: ...

    @property
    def max_position_embeddings(self) -> int: ...


class Rotary(nn.Module):
    """Rotary embedding by transformers' formulas, at any length and without memory of the texts before."""

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.config = layer_config(config)
        self.dynamic = config.rope_parameters["rope_type"] == "dynamic"
        with torch.device("cpu"):  # no weight fills this in where the rest is built on the meta device
            embedding = LlamaRotaryEmbedding(self.config)
        self.scaling: float = embedding.attention_scaling
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", embedding.inv_freq, persistent=False)

    def forward(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, m, head_dim] of positions [B, m], in the dtype of `states`."""
        inv_freq = self.inv_freq
        if self.dynamic:  # the base grows with the row's length
            lengths = positions.amax(dim=-1)[:, None, None] + 1
            inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](self.config, positions.device, seq_len=lengths)
        angles = positions[..., None].float() * inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(states.dtype), (angles.sin() * self.scaling).to(states.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def layer_config(config: LayerSizes) -> LlamaConfig:
    """What transformers' rotary embedding and our cache need to know, as a config of theirs."""
    return LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,  # theirs has to be a multiple of the heads
        num_hidden_layers=len(config.windows),
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
