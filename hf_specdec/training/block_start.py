"""Where the training of a block drafter starts.

Two things make a random start slow. A target's hidden states have a few directions that are a thousand times as large
as the others and hardly change from token to token, so what a random `fc` makes of them is one vector nearly. And rows
learn of the newest tokens through attention only, which starts as a mean over the whole text.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..drafters.common.block_model import BlockModel
from .batches import Batch

_NEAR = (1.5, 0.75, 0.0)  # of a third of the key-value heads each: how much of queries and keys is the common part
_RIDGE = 1e-2


@torch.no_grad()
def start_well(model: BlockModel, embedding: torch.Tensor, batches: list[Batch]) -> None:
    """Whiten the hidden states, and make the first layer look at near tokens first.

    Args:
        model: a random drafter.
        embedding: [V, H] of the target.
        batches: some of the data.
    """
    states = torch.cat([_real(batch)[:, : len(model.config.aux_layers)].flatten(1) for batch in batches]).float()
    _whiten(model, states)
    tokens = torch.cat([batch.ids.flatten() for batch in batches]).unique()
    context = model.hidden_norm(model.fc(states))
    _look_near(model, context, embedding[tokens].float(), embedding[model.config.mask_token_id].float())


def _whiten(model: BlockModel, states: torch.Tensor) -> None:
    """`fc` as a random rotation after a whitening of states [N, inputs], directions beyond its outputs apart."""
    size, inputs = model.fc.weight.shape
    moment = (states.T @ states / len(states)).double()
    values, vectors = torch.linalg.eigh(moment)
    floor = values[-min(size, inputs)].clamp_min(1e-6 * values[-1])
    whitening = (vectors / (values.clamp_min(0) + floor).sqrt()) @ vectors.T
    rotation = torch.nn.init.orthogonal_(torch.empty(size, inputs)).double()
    model.fc.weight.copy_(rotation @ whitening)


def _look_near(model: BlockModel, context: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """A common part of all queries and keys: rotary embedding turns it into a score that falls with the distance."""
    layer: Any = model.layers[0]
    rows, masks = layer.input_layernorm(tokens), layer.input_layernorm(mask)
    seen = torch.cat([context, rows, masks.expand(len(rows) // 4 + 1, -1)])
    moment = seen.T @ seen / len(seen)
    ridge = _RIDGE * moment.diagonal().mean() * torch.eye(len(moment), device=moment.device)
    constant = torch.linalg.solve(moment + ridge, seen.mean(dim=0))  # its product with all of them is about 1
    config = model.config
    half = config.head_dim // 2
    common = torch.zeros(config.head_dim, device=seen.device)
    common[: max(1, half // 3)] = 1.0  # one of each pair of the fastest rotations
    common *= math.sqrt(config.head_dim) / common.norm()
    for projection, inputs, heads in (
        (layer.self_attn.q_proj, rows, config.num_attention_heads),
        (layer.self_attn.k_proj, context, config.num_key_value_heads),
    ):
        weights = projection.weight.view(heads, config.head_dim, -1)
        for head in range(heads):
            size = (inputs @ weights[head].T).square().mean().sqrt()
            share = _NEAR[head * len(_NEAR) // heads]
            weights[head] += share * size * torch.outer(common, constant)


def _real(batch: Batch) -> torch.Tensor:
    """[N, T, H] the states of a batch's tokens, without padding and last tokens."""
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return batch.states[columns < batch.lengths[:, None] - 1]
