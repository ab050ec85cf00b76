"""The network of block drafters (DFlash, Chen et al. 2026, arXiv:2602.06036; DSpark, arXiv:2607.05147).

The rows of a block are the text's last token, the anchor, and masks. They attend over themselves and over a context:
one vector for each token before the anchor, made of the target's hidden states, the same for every layer.

    context = hidden_norm(fc(hidden states))
    layer:  keys and values of [context; norm(rows)], queries of norm(rows)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .block_config import BlockConfig
from .mlp import GatedMLP
from .rotary import Rotary, rotate

# (layer, queries [B, heads, n, head_dim], keys, values [B, kv_heads, m + n, head_dim]) -> mixed values, as queries.
# The keys are those of the context, then of the rows. Drafting attends over a cache and training over a whole text, so
# the caller says what a row sees.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class BlockModel(nn.Module):
    """Weights of a block drafter without its output head; names as in the checkpoints.

    Args:
        config: the drafter.
        own_embedding: whether it has an embedding of its own; otherwise the caller passes the target's.
    """

    def __init__(self, config: BlockConfig, own_embedding: bool) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(len(config.windows)))
        self.norm = LlamaRMSNorm(size, eps)
        if own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.rotary = Rotary(config)

    def fuse(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        """[B, m, H] context of tokens that the target has processed.

        Args:
            hidden_states: one [B, m, Ht] for each of `aux_layers`.
        """
        return self.hidden_norm(self.fc(torch.cat(hidden_states, dim=-1)))

    def forward(
        self, embedded: torch.Tensor, context: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[B, blocks, n, H] states of the rows after the last norm.

        Args:
            embedded: [B, blocks, n, H] embeddings of the rows of each block.
            context: [B, m, H].
            positions: [B, m + blocks * n] of the context, then of the rows.
            attend: the attention of each layer.
        """
        rotation = self.rotary(embedded, positions)
        states = embedded * self.config.embedding_scale
        for layer in self.layers:
            states = layer(states, context, rotation, attend)
        return self.norm(states)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as the output head's product becomes them."""
        scale, cap = self.config.logit_scale, self.config.logit_cap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)


class BlockLayer(nn.Module):
    """A decoder layer over the rows of blocks."""

    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = BlockAttention(config, index)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        states: torch.Tensor,
        context: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        states = states + self.self_attn(self.input_layernorm(states), context, rotation, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class BlockAttention(nn.Module):
    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_dim, size = index, config.head_dim, config.hidden_size
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        states: torch.Tensor,
        context: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        rows = states.flatten(1, 2)
        everything = torch.cat([context, rows], dim=1)  # the context goes in as it is, without the layer's norm
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, x in ((self.q_proj, rows), (self.k_proj, everything), (self.v_proj, everything))
        )
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        cos, sin = (part.unsqueeze(1) for part in rotation)
        first = context.shape[1]
        queries, keys = rotate(queries, cos[:, :, first:], sin[:, :, first:]), rotate(keys, cos, sin)
        mixed = attend(self.index, queries, keys, values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(states)
