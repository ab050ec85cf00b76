"""The EAGLE-3 network (Li et al. 2025, arXiv:2503.01840): one graph for every published format.

An entry stands for one position: the token there, and a feature of the position before it. A feature is `fc` of the
target's hidden states where the target has been, and the head's own last state where it drafts on.

    x = [norm_in(embed(token)), norm_hidden(feature)]      twice the width, the embedding first
    layer 0 attends from x; its residual stream is the feature
    logits = lm_head(norm(out))

A head that guesses a whole draft at once (P-EAGLE, arXiv:2602.01469) has a mask token and a mask feature for entries
whose token is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..common.mlp import GatedMLP
from ..common.rotary import Rotary, rotate
from .configuration import Eagle3Config

# (layer, queries [B, heads, m, head_dim], keys, values [B, kv_heads, m, head_dim]) -> mixed values, shaped as queries.
# Drafting attends over a cache and training over a whole text, so the caller says what an entry sees.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Eagle3Model(nn.Module):
    """Weights of a head; names as in the checkpoints.

    Args:
        config: the head.
        own_embedding: whether it has an embedding of its own; otherwise the caller passes the target's.
        own_head: the same for the output head.
    """

    def __init__(self, config: Eagle3Config, own_embedding: bool, own_head: bool) -> None:
        super().__init__()
        self.config = config
        size, eps, num_aux = config.hidden_size, config.rms_norm_eps, len(config.aux_layers)
        if num_aux:
            self.fc = nn.Linear(num_aux * config.target_hidden_size, size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(num_aux * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(num_aux))
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(len(config.windows)))
        self.norm = LlamaRMSNorm(size, eps)
        if own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if own_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, max(num_aux, 1) * config.target_hidden_size))
        self.rotary = Rotary(config)

    def fuse(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        """[B, m, H] features of positions that the target has processed.

        Args:
            hidden_states: one [B, m, Ht] for each of `aux_layers`, or the final normed state where there are none.
        """
        config = self.config
        if not config.aux_layers:
            return hidden_states[0]
        if config.fc_norm:
            hidden_states = [norm(states) for norm, states in zip(self.fc_norm, hidden_states, strict=True)]
        joined = torch.cat(hidden_states, dim=-1)
        return self.fc(self.input_norm(joined) if config.norm_before_fc else joined)

    def mask_feature(self) -> torch.Tensor:
        """[1, 1, H] the feature of every masked entry: what the head has in the place of the target's hidden states."""
        return self.fuse(list(self.mask_hidden.split(self.config.target_hidden_size, dim=-1)))

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """[B, m, H] the last layer's output, before the last norm.

        Args:
            embedded: [B, m, H] embeddings of the entries' tokens.
            features: [B, m, H] features of the positions before them.
            positions: [B, m].
            attend: the attention of each layer.
        """
        rotation = self.rotary(features, positions)
        states = features
        for layer in self.layers:
            states = layer(embedded, states, rotation, attend)
        return states

    def recurrent(self, output: torch.Tensor) -> torch.Tensor:
        """The feature of the next drafted position."""
        return self.norm(output) if self.config.norm_output else output


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one also takes the embedding."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.takes_embedding = index == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, eps)
        if self.takes_embedding:
            self.hidden_norm = LlamaRMSNorm(size, eps) if config.aux_layers else nn.Identity()
        self.self_attn = Eagle3Attention(config, index, 2 * size if self.takes_embedding else size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        residual = states
        if self.takes_embedding:
            normed = self.hidden_norm(states)
            residual = normed if self.norm_before_residual else states
            states = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        else:
            states = self.input_layernorm(states)
        states = residual + self.self_attn(states, rotation, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Attention(nn.Module):
    def __init__(self, config: Eagle3Config, index: int, input_size: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        shape = (*states.shape[:2], -1, self.head_dim)
        queries, keys, values = (p(states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        cos, sin = (part.unsqueeze(1) for part in rotation)
        queries, keys = (rotate(x.transpose(1, 2), cos, sin) for x in (queries, keys))
        mixed = attend(self.index, queries, keys, values.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
