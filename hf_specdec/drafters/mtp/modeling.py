"""Multi-token prediction layers (Gloeckle et al. 2024; DeepSeek-V3, arXiv:2412.19437, section 2.2).

Entry t of layer i holds token t + 1 + i and a state: of the target at t for layer 0, of layer i - 1 at t for the
others (of the target, too, where layers are not chained). Its output guesses token t + 2 + i. Past the last layer, that
one goes on with its own states.

    x = projection([embedding_norm(embedding), hidden_norm(state)])
    out = block(x)                      one or several of the target's own decoder layers
    logits = head(final_norm(out))      the next state is out, or final_norm(out)
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from .families import MtpFamily


class MtpModel(nn.Module):
    """MTP layers for a target, with random or no weights.

    Args:
        target: its decoder layers' class, norm and rotary embedding are taken; no weight is.
        family: the row that says how the layers are built.
        num_layers: MTP layers.
        own_embedding, own_head: whether each layer has an embedding or an output head of its own; otherwise the caller
            takes the target's.

    Raises:
        ValueError: the target is not made of one list of layers and a norm behind it.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        family: MtpFamily,
        num_layers: int,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        super().__init__()
        text, decoder = target.config.get_text_config(), target.get_decoder()
        if not hasattr(decoder, "layers") or final_norm_of(decoder) is None:
            raise ValueError(
                f"MTP layers are not served for {type(target).__name__}: no `layers` or no `norm` is found."
            )
        self.family, self.first_layer, self.num_target_layers = family, text.num_hidden_layers, len(decoder.layers)
        self.hidden_size, self.vocab_size = text.hidden_size, text.vocab_size
        self.num_blocks = num_blocks(text, family)
        self.divisor: float | None = getattr(text, family.divisor_field) if family.divisor_field else None
        self.num_cached = self.first_layer + num_layers * self.num_blocks
        self.config = extended_config(text, family, num_layers)
        if not decoder._supports_sdpa:
            self.config._attn_implementation = "eager"
        self.layers = nn.ModuleList(
            MtpLayer(decoder, self.config, family, self.first_layer + i * self.num_blocks, self.num_blocks)
            for i in range(num_layers)
        )
        for layer in self.layers:
            if own_embedding:
                layer.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
            if own_head:
                layer.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.rotary: Any = None
        if (rotary := getattr(decoder, "rotary_emb", None)) is not None:
            with torch.device("cpu"):  # no weight fills this in where the rest is built on the meta device
                self.rotary = type(rotary)(text)
            self.rotary_takes_kind = "layer_type" in inspect.signature(self.rotary.forward).parameters

    def window(self, index: int) -> int | None:
        """Tokens that layer `index` attends over, None for all."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            return window
        first = self.first_layer + index * self.num_blocks
        return window if any("sliding" in kind for kind in kinds[first : first + self.num_blocks]) else None

    def published_name(self, name: str) -> str:
        """The name that the family publishes a tensor by, without `model.` in front."""
        _, index, rest = name.split(".", 2)
        return self.family.published(rest, self.family.prefixes(int(index), self.first_layer, self.num_blocks))

    def run(
        self,
        index: int,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, m, H] what the output head reads, [B, m, H] the states for the next layer).

        Args:
            index: of the layer.
            embedded: [B, m, H] embeddings of the entries' tokens.
            states: [B, m, H] of the target or of the layer before.
            positions: [B, m].
            mask: [B, 1, m, keys] what each entry sees, boolean or additive as the attention takes it.
            cache: holds the keys and values of earlier entries; None where the entries are all there are.
        """
        layer: Any = self.layers[index]
        inputs = {"attention_mask": mask, "position_ids": positions, "cache": cache}
        if self.rotary is not None:
            kind = {"layer_type": self.config.layer_types[layer.first_block]} if self.rotary_takes_kind else {}
            inputs["position_embeddings"] = self.rotary(embedded, positions, **kind)
        output = layer(embedded, states, **inputs)
        normed = layer.final_norm(output)
        carried = normed if self.family.carry == "normed" else output
        return (normed if self.divisor is None else normed / self.divisor), carried


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
        """[B, m, H] the last block's output; `inputs` are those of the target's decoder layers."""
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        states = self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        for block, takes in zip(self.blocks, self.takes, strict=True):
            output = block(states, **{name: value for name, value in inputs.items() if takes is None or name in takes})
            states = output[0] if isinstance(output, tuple) else output
        return states


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


def num_blocks(config: PreTrainedConfig, family: MtpFamily) -> int:
    """Decoder layers in each MTP layer."""
    return 1 if family.blocks_field is None else len(getattr(config, family.blocks_field))


def extended_config(config: PreTrainedConfig, family: MtpFamily, num_mtp_layers: int) -> PreTrainedConfig:
    """A copy of a text config with the MTP layers' decoder layers behind the target's.

    So decoder layers keep the numbers that they have in the checkpoints, and whatever a model derives from a layer's
    number (dense or sparse, window or none) comes out as there.
    """
    extended, first = copy.deepcopy(config), config.num_hidden_layers
    num_more = num_mtp_layers * num_blocks(config, family)
    entries = dict(family.entries)
    for name, values in vars(config).items():
        if isinstance(values, list) and len(values) == first:
            given = getattr(config, f"mtp_{name}", None) or [entries.get(name, values[-1])]
            repeated = num_mtp_layers if f"mtp_{name}" == family.blocks_field else 1
            setattr(extended, name, [*values, *(given * repeated + given[-1:] * num_more)[:num_more]])
    extended.num_hidden_layers = first + num_more
    if getattr(config, "is_heterogeneous", False):  # what layers of one kind have in common
        overrides = extended._heterogeneity_spec.per_layer_overrides
        for number, kind in enumerate(extended.layer_types[first:], first):
            if (twin := config.layer_types.index(kind)) in overrides:
                overrides[number] = overrides[twin]
    extended._attn_implementation = "eager" if config._attn_implementation == "eager" else "sdpa"
    return extended


def final_norm_of(decoder: Any) -> nn.Module | None:
    """The norm after a target's last layer, None where it has another name than all that are known."""
    return next((getattr(decoder, name) for name in ("norm", "norm_f") if hasattr(decoder, name)), None)


def norm_like(norm: nn.Module, size: int) -> nn.Module:
    """A new norm of the target's class, which may be zero-centred."""
    eps = next(getattr(norm, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, name))
    return type(norm)(size, eps=eps)


def _keyword_names(block: nn.Module) -> frozenset[str] | None:
    """Names that a decoder layer's forward takes; None where it takes any."""
    parameters = inspect.signature(block.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def _first(part: Any) -> Any:
    return part[0] if isinstance(part, nn.ModuleList) else part
