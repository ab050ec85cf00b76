"""The network of a Gemma 4 assistant.

It has no keys and values of its own: a layer's queries attend over those that the target keeps of the text, in the
target's last layer of the same kind. All tokens of a draft are asked from one position.

    x = pre_projection [embedding of the last token, state]     both of the target's width
    h = norm(layers(x))
    logits = head(h);  next state = post_projection(h)

The first state is the target's last hidden state, after its final norm, of the token before the last one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..common.gemma4_layer import Gemma4Layer
from ..common.rotary import rotate
from .configuration import Gemma4Config


class View(NamedTuple):
    """What the layers of one kind see in a round.

    Attributes:
        keys, values: [B, kv_heads, slots, head_dim] of the target.
        mask: [B, 1, 1, slots] True at the slots that count; None where all do.
        rotation: cosines and sines [B, 1, head_dim] of the queries' position.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    rotation: tuple[torch.Tensor, torch.Tensor]


class Gemma4Assistant(nn.Module):
    """Weights of an assistant; names as in the checkpoints, without `model.`."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.pre_projection = nn.Linear(2 * config.target_hidden_size, size, bias=False)
        attentions = [SharedAttention(config, kind) for kind in config.kinds]
        self.layers = nn.ModuleList(Gemma4Layer(config, config.rms_norm_eps, attention) for attention in attentions)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.post_projection = nn.Linear(size, config.target_hidden_size, bias=False)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        if config.num_centroids is not None:
            self.masked_embedding = CentroidHead(config, config.num_centroids)
        with torch.device("cpu"):  # no weight fills this in where the rest is built on the meta device
            self.rotary = Gemma4TextRotaryEmbedding(config.rope_config)

    def forward(self, embedded: torch.Tensor, state: torch.Tensor, views: dict[str, View]) -> torch.Tensor:
        """[B, 1, H] what the head and `post_projection` read.

        Args:
            embedded, state: [B, 1, target's width] of the last token, and of what is before it.
            views: by kind of layer.
        """
        states = self.pre_projection(torch.cat([embedded, state], dim=-1))
        for kind, layer in zip(self.config.kinds, self.layers, strict=True):
            states = layer(states, views[kind])
        return self.norm(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[B, 1, V] of states [B, 1, H]; -inf at tokens that are not scored."""
        if self.config.num_centroids is None:
            return self.lm_head(states)
        return self.masked_embedding(states, self.lm_head.weight)


class SharedAttention(nn.Module):
    """Queries over the target's keys and values.

    Args:
        config: the assistant.
        kind: of the layer.
    """

    def __init__(self, config: Gemma4Config, kind: str) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_heads = config.head_dims[kind], config.num_key_value_heads[kind]
        width, bias = config.num_attention_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(self, states: torch.Tensor, view: View) -> torch.Tensor:
        queries = self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim)))  # [B, 1, heads, head_dim]
        queries = rotate(queries, *(part.unsqueeze(2) for part in view.rotation))
        # One token asks, so the heads that share a key take the place of tokens: keys need not be repeated for them.
        queries = queries.squeeze(1).unflatten(1, (self.num_key_value_heads, -1))
        mixed = F.scaled_dot_product_attention(queries, view.keys, view.values, attn_mask=view.mask, scale=1.0)
        return self.o_proj(mixed.flatten(1)[:, None])


class CentroidHead(nn.Module):
    """Scores the tokens of the clusters that promise most, instead of all.

    Args:
        config: the assistant.
        num_centroids: clusters, all of one size.
    """

    def __init__(self, config: Gemma4Config, num_centroids: int) -> None:
        super().__init__()
        self.num_active = config.num_active_centroids
        self.centroids = nn.Linear(config.hidden_size, num_centroids, bias=False)
        self.token_ordering: Any
        self.register_buffer("token_ordering", torch.empty(config.vocab_size, dtype=torch.long))

    def forward(self, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """[B, 1, V] logits of states [B, 1, H] for an output head [V, H]; -inf outside of the clusters."""
        active = self.centroids(states).topk(self.num_active, dim=-1).indices
        members = self.token_ordering.view(self.centroids.out_features, -1)
        ids = members[active].flatten(-2)  # [B, 1, candidates]
        scores = (head[ids] @ states[..., None]).squeeze(-1)
        return scores.new_full((*states.shape[:-1], len(head)), -torch.inf).scatter(-1, ids, scores)
