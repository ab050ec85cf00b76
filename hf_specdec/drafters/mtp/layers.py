"""The layers of modeling.py: what is around a target's decoder layers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .families import MtpFamily


class MtpLayer(nn.Module):
    """One layer.

    Args:
        decoder: the target's.
        config: its config, with entries for the MTP layers' decoder layers behind its own.
        family: the row.
        first_block, num_blocks: numbers of this layer's decoder layers.
    """

    def __init__(
        self, decoder: Any, config: PreTrainedConfig, family: MtpFamily, first_block: int, num_blocks: int
    ) -> None:
        super().__init__()
        size, last = config.hidden_size, decoder.layers[-1]
        self.hidden_first, self.first_block = family.hidden_first, first_block
        norm = final_norm_of(decoder)
        assert norm is not None
        self.embedding_norm, self.hidden_norm = norm_like(norm, size), norm_like(norm, size)
        self.projection = nn.Linear(2 * size, size, bias=False)
        numbers = range(first_block, first_block + num_blocks)
        self.blocks = nn.ModuleList(
            PlainLayer(last, config, number) if family.plain_layers else type(last)(config, number)
            for number in numbers
        )
        flag = family.final_norm
        has_final_norm = getattr(config, flag) if isinstance(flag, str) else flag
        self.final_norm = norm_like(norm, size) if has_final_norm else nn.Identity()
        self.takes = [_keyword_names(block) for block in self.blocks]

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The last block's output for embeddings [B, m, H] and states, of the states' shape.

        Args:
            inputs: those of the target's decoder layers.
        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        states = self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.through_blocks(states, inputs)

    def through_blocks(self, states: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """What the blocks make of their input."""
        for block, takes in zip(self.blocks, self.takes, strict=True):
            output = block(states, **{name: value for name, value in inputs.items() if takes is None or name in takes})
            states = output[0] if isinstance(output, tuple) else output
        return states

    def joined(self, output: torch.Tensor) -> torch.Tensor:
        """[B, m, H] the one state that the final norm takes."""
        return output


class StreamsLayer(MtpLayer):
    """A layer whose state is that of several streams, side by side: [B, m, S].

    Args:
        as for MtpLayer.
    """

    def __init__(
        self, decoder: Any, config: PreTrainedConfig, family: MtpFamily, first_block: int, num_blocks: int
    ) -> None:
        super().__init__(decoder, config, family, first_block, num_blocks)
        assert family.streams is not None
        size, self.num_streams = config.hidden_size, family.num_streams(config)
        self.apart, self.head = family.streams.apart, family.streams.head
        if not self.apart:
            self.hidden_norm = norm_like(self.embedding_norm, size * self.num_streams)
        self.embedding_projection = nn.Linear(size, size, bias=False)
        self.projection = nn.Linear(size, size, bias=False)
        self.add_module(self.head, _head_like(getattr(decoder, self.head), config))

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        streams = (-1, (self.num_streams, embedded.shape[-1]))
        normed = self.hidden_norm(states.unflatten(*streams) if self.apart else states)
        token = self.embedding_projection(self.embedding_norm(embedded))
        states = self.projection(normed if self.apart else normed.unflatten(*streams)) + token[..., None, :]
        return self.through_blocks(states if self.apart else states.flatten(2), inputs).flatten(2)

    def joined(self, output: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.head)(output.unflatten(-1, (self.num_streams, -1)) if self.apart else output)


class PlainLayer(nn.Module):
    """Attention and an MLP of a target whose own layers have more to them.

    Args:
        layer: the target's, whose parts' classes are taken, of several like parts those of the first.
        config: its config.
        index: number of the attention's place in the cache.
    """

    def __init__(self, layer: Any, config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        mlp = layer.mlps[0] if hasattr(layer, "mlps") else layer.mlp
        self.self_attn, self.mlp = type(_first(layer.self_attn))(config, index), type(mlp)(config)
        self.input_layernorm = norm_like(_first(layer.input_layernorm), config.hidden_size)
        self.post_attention_layernorm = norm_like(_first(layer.post_attention_layernorm), config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """[B, m, H]."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **inputs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def final_norm_of(decoder: Any) -> nn.Module | None:
    """The norm after a target's last layer, None where it has another name than all that are known."""
    if (mixer := getattr(decoder, "hyper_connection_mixer", None)) is not None:
        return mixer.hc_norm
    return next((getattr(decoder, name) for name in ("norm", "norm_f") if hasattr(decoder, name)), None)


def norm_like(norm: nn.Module, size: int) -> nn.Module:
    """A new norm of the target's class, which may be zero-centred."""
    eps = next(getattr(norm, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, name))
    return type(norm)(size, eps=eps)


def _head_like(head: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """A new module of the target's class that joins streams; Qwen's may also be one that puts something into them."""
    kind: Any = type(head)
    only_joins = {"use_combine": False} if "use_combine" in inspect.signature(kind).parameters else {}
    return kind(config, **only_joins)


def _keyword_names(block: nn.Module) -> frozenset[str] | None:
    """Names that a decoder layer's forward takes; None where it takes any."""
    parameters = inspect.signature(block.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def _first(part: Any) -> Any:
    return part[0] if isinstance(part, nn.ModuleList) else part
