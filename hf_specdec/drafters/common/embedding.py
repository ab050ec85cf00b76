"""Reading a target's embedding and output head, whatever has been done to their weights.

Weights may be packed (quantised), offloaded, or wrapped by adapters, so modules are called where that is possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...decoding.placement import present_weight

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stored_embeddings(embedding: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[..., H] embeddings of tokens [...] as they are stored: some targets scale or norm theirs on the way out.

    Ids beyond the table, as placeholders of images may be, get its last row.
    """
    tokens = tokens.clamp_max(num_rows(embedding) - 1)
    weight: Any = embedding.weight
    is_plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype in _PLAIN
    if not is_plain or hasattr(embedding, "base_layer"):  # packed, or with an adapter beside it
        return embedding(on_device_of(embedding, tokens))
    with present_weight(embedding) as table:
        return F.embedding(tokens.to(table.device), table)


def head_logits(head: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """[..., V] what an output head makes of states [..., H], on its own device."""
    weight: Any = head.weight
    dtype = weight.dtype if weight.dtype in _PLAIN else states.dtype  # that of packed weights says nothing
    return head(on_device_of(head, states.to(dtype)))


def rows_of_head(head: nn.Module, ids: torch.Tensor) -> nn.Module:
    """An output head for tokens `ids` [Vd] alone, with a copy of their rows.

    Raises:
        ValueError: the head's weights cannot be taken apart.
    """
    bias: Any = getattr(head, "bias", None)
    with present_weight(head) as weight:
        is_plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype in _PLAIN
        if not is_plain or hasattr(head, "base_layer"):
            raise ValueError(
                "`draft_vocab` takes a part of the output head, and this one is quantised or has an adapter; leave it "
                "at None."
            )
        rows = weight.detach()[ids.to(weight.device)]
    part = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
    part.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias.detach()[ids.to(bias.device)], requires_grad=False)
    return part


def on_device_of(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the module's weight is; a module whose weight is offloaded fetches its inputs itself."""
    weight: Any = module.weight
    return tensor if weight.is_meta else tensor.to(weight.device)


def num_rows(embedding: nn.Module) -> int:
    """Ids that an embedding has rows for."""
    weight: Any = embedding.weight
    return getattr(embedding, "num_embeddings", weight.shape[0])


def width(module: nn.Module, name: str) -> int:
    """Size of the states that an embedding gives (`embedding_dim`) or an output head takes (`in_features`).

    Packed weights have other shapes, and adapters go without the attribute.
    """
    weight: Any = module.weight
    return getattr(module, name, weight.shape[-1])
