"""The DFlash 2 network (inco.ai/blog/dflash2, 2026): DFlash, convolutions in its layers and a selector behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..common.block_config import BlockConfig
from ..common.block_model import Attend, BlockLayer, BlockModel
from .convolution import DynamicConvolution, convolve
from .selector import CandidateSelector


@dataclass(frozen=True)
class DFlash2Parts:
    """Sizes of what DFlash 2 adds.

    Args:
        num_taps, group_size: of the convolutions.
        num_codes, rank, num_candidates: of the selector.
    """

    num_taps: int
    group_size: int
    num_codes: int
    rank: int
    num_candidates: int


class DFlash2Model(BlockModel):
    """Weights of a DFlash 2 drafter; names as in the checkpoints.

    Args:
        config: the network.
        parts: what DFlash 2 adds to it.
        own_embedding: whether it has an embedding of its own; otherwise the caller passes the target's.
    """

    def __init__(self, config: BlockConfig, parts: DFlash2Parts, own_embedding: bool) -> None:
        super().__init__(config, own_embedding)
        self.layers = nn.ModuleList(DFlash2Layer(config, index, parts) for index in range(len(config.windows)))
        self.candidate_selector = CandidateSelector(
            config.hidden_size, parts.num_codes, parts.rank, parts.num_candidates
        )


class DFlash2Layer(BlockLayer):
    """A decoder layer whose attention and MLP stand between convolutions."""

    def __init__(self, config: BlockConfig, index: int, parts: DFlash2Parts) -> None:
        super().__init__(config, index)
        self.attention_conv = DynamicConvolution(config.hidden_size, parts.num_taps, parts.group_size)
        self.mlp_conv = DynamicConvolution(config.hidden_size, parts.num_taps, parts.group_size)

    def forward(
        self,
        states: torch.Tensor,
        context: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        rows = self.input_layernorm(states)
        before, after = self.attention_conv.kernels(rows)
        mixed = self.self_attn(convolve(rows, before), context, rotation, attend)  # the context is not convolved
        states = states + convolve(mixed, after)
        rows = self.post_attention_layernorm(states)
        before, after = self.mlp_conv.kernels(rows)
        return states + convolve(self.mlp(convolve(rows, before)), after)
