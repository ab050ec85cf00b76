"""The MLP of a drafter's decoder layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN


class MLPSizes(Protocol):
    """What a drafter's config says about its MLPs."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def hidden_act(self) -> str: ...

    @property
    def mlp_bias(self) -> bool: ...


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); names as in the checkpoints."""

    def __init__(self, config: MLPSizes) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
