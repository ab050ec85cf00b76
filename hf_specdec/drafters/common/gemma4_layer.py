"""The frame of Gemma 4's decoder layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .mlp import GatedMLP, MLPSizes


class Gemma4Layer(nn.Module):
    """A norm before and one behind each part, and a number that multiplies the output; names as in the checkpoints.

    Args:
        sizes: of the MLP.
        eps: of the norms.
        attention: (normed states, what else the layer is given) -> mixed states.
    """

    def __init__(self, sizes: MLPSizes, eps: float, attention: nn.Module) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.pre_feedforward_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = GatedMLP(sizes)
        self.post_feedforward_layernorm = LlamaRMSNorm(size, eps)
        self.layer_scalar: torch.Tensor
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, states: torch.Tensor, *context: Any) -> torch.Tensor:
        mixed = self.self_attn(self.input_layernorm(states), *context)
        states = states + self.post_attention_layernorm(mixed)
        states = states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        return states * self.layer_scalar
