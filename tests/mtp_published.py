"""What the fixtures of MTP families have in common: layers with drawn weights, and names that several share."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from tiny import EOS, PAD, VOCAB_SIZE, randomise
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

SIZE = 64
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


@dataclass
class Layer:
    """An MTP layer as the reference computes it.

    Args:
        norms: weights "embedding", "hidden" and "final", each what the normed state is multiplied with; without
            "final" there is no such norm.
        projection: [H, 2 H].
        blocks: the target's decoder layers.
        join: [n, S H] streams -> [n, H] the state that the final norm takes; None where there is one stream.
    """

    norms: dict[str, torch.Tensor]
    projection: torch.Tensor
    blocks: list[nn.Module]
    join: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass
class Published:
    """A tiny target and its MTP layers.

    Args:
        config: of the target.
        layers: the MTP layers.
        tensors: the same by their published names.
        carry: "normed" or "raw".
        target_state: the same of what the first layer reads.
        hidden_first: order of the projection.
        chained: whether each layer reads the states of the one before it, otherwise those of the target.
        window: tokens that each layer attends over, None for all.
        kind: kind of the layers for a rotary embedding that takes one.
        auto: class that makes the target.
        divisor: what the output head's input is divided by.
        num_streams: S, states that make up one token's.
        streams_apart: whether decoder layers take them along an axis of their own.
    """

    config: PreTrainedConfig
    layers: list[Layer]
    tensors: dict[str, torch.Tensor]
    carry: str = "normed"
    target_state: str = "normed"
    hidden_first: bool = False
    chained: bool = True
    window: int | None = None
    kind: str | None = None
    auto: Any = AutoModelForCausalLM
    divisor: float = 1.0
    num_streams: int = 1
    streams_apart: bool = False


def random_layer(seed: int, blocks: list[nn.Module], final: bool = True) -> Layer:
    """A layer around blocks, whose weights are drawn here as well."""
    generator = torch.Generator().manual_seed(seed)
    for number, block in enumerate(blocks):
        randomise(block, seed + 100 * number)
    names = ("embedding", "hidden", "final") if final else ("embedding", "hidden")
    norms = {name: 1 + 0.3 * torch.randn(SIZE, generator=generator) for name in names}
    return Layer(norms, 0.15 * torch.randn(SIZE, 2 * SIZE, generator=generator), blocks)


def block_of(config: PreTrainedConfig, name: str, index: int = 0, **changes: object) -> nn.Module:
    """A decoder layer of the target's module, called `name`, from its config with changes."""
    fields = {key: value for key, value in config.to_dict().items() if key not in changes}
    config = type(config)(**fields, **changes)
    config._attn_implementation = config._experts_implementation = "eager"
    module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return getattr(module, name)(config, index).eval()


class PlainBlock(nn.Module):
    """A decoder layer of attention and an MLP, each behind a norm."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: torch.Tensor, **inputs: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **inputs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with those of experts one by one, as checkpoints have them."""
    apart = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                stem = f"{name.removesuffix('gate_up_proj')}{number}."
                apart[stem + "gate_proj.weight"], apart[stem + "up_proj.weight"] = gate, up
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            stem, _, kind = name.rpartition(".")
            apart |= {f"{stem}.{number}.{kind}.weight": expert for number, expert in enumerate(tensor)}
        else:
            apart[name] = tensor
    return apart


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}


def deepseek_names(layer: Layer, index: int) -> dict[str, torch.Tensor]:
    """The names of DeepSeek-V3, GLM-4 and others, with `index` counted on from the target's layers."""
    prefix = f"model.layers.{index}."
    tensors = {
        "enorm.weight": layer.norms["embedding"],
        "hnorm.weight": layer.norms["hidden"],
        "eh_proj.weight": layer.projection,
        "shared_head.norm.weight": layer.norms["final"],
        **per_expert(layer.blocks[0].state_dict()),
    }
    return under(prefix, tensors)


def qwen_names(layer: Layer) -> dict[str, torch.Tensor]:
    """The names of Qwen3-Next and later; norms are stored as their distance from one."""
    tensors = {
        "fc.weight": layer.projection,
        "pre_fc_norm_embedding.weight": layer.norms["embedding"] - 1,
        "pre_fc_norm_hidden.weight": layer.norms["hidden"] - 1,
        "norm.weight": layer.norms["final"] - 1,
        **under("layers.0.", per_expert(layer.blocks[0].state_dict())),
    }
    return under("mtp.", tensors)
