"""DSpark over decoder layers of Gemma 4's kind, as DeepSpec trains it for Gemma 4 targets.

Four norms a layer, one before and one behind each part; values are normed without a weight and may be the keys'
projection itself; a layer's output is multiplied with a number of its own.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..common.block_config import BlockConfig
from ..common.block_model import Attend
from ..common.gemma4_layer import Gemma4Layer
from ..common.rotary import rotate
from .modeling import DSparkHeads, DSparkModel


class Gemma4DSparkModel(DSparkModel):
    """Weights of such a drafter; names as in the checkpoints.

    Args:
        config, heads, own_embedding: as in DSparkModel.
        values_are_keys: there is no projection of values (`attention_k_eq_v`).
    """

    def __init__(self, config: BlockConfig, heads: DSparkHeads, own_embedding: bool, values_are_keys: bool) -> None:
        super().__init__(config, heads, own_embedding)
        attentions = [Gemma4Attention(config, i, values_are_keys) for i in range(len(config.windows))]
        self.layers = nn.ModuleList(Gemma4Layer(config, config.rms_norm_eps, attention) for attention in attentions)


class Gemma4Attention(nn.Module):
    def __init__(self, config: BlockConfig, index: int, values_are_keys: bool) -> None:
        super().__init__()
        self.index, self.head_dim, self.eps = index, config.head_dim, config.rms_norm_eps
        size, bias = config.hidden_size, config.attention_bias
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(size, queries, bias=bias)
        self.k_proj = nn.Linear(size, keys, bias=bias)
        self.v_proj = None if values_are_keys else nn.Linear(size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, size, bias=config.output_bias)
        self.q_norm = LlamaRMSNorm(config.head_dim, self.eps)
        self.k_norm = LlamaRMSNorm(config.head_dim, self.eps)

    def forward(
        self,
        states: torch.Tensor,
        context: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        rows, first = states.flatten(1, 2), context.shape[1]
        everything = torch.cat([context, rows], dim=1)
        queries, keys = self._heads(self.q_proj(rows)), self._heads(self.k_proj(everything))
        values = keys if self.v_proj is None else self._heads(self.v_proj(everything))
        values = F.rms_norm(values.float(), (self.head_dim,), eps=self.eps).to(values.dtype)
        cos, sin = (part.unsqueeze(1) for part in rotation)
        queries = rotate(self.q_norm(queries), cos[:, :, first:], sin[:, :, first:])
        mixed = attend(self.index, queries, rotate(self.k_norm(keys), cos, sin), values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(states)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
