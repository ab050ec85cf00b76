"""Multi-token prediction layers (Gloeckle et al. 2024; DeepSeek-V3, arXiv:2412.19437, section 2.2).

Entry t of layer i holds token t + 1 + i and a state: of the target at t for layer 0, of layer i - 1 at t for the
others (of the target, too, where layers are not chained). Its output guesses token t + 2 + i. Past the last layer, that
one goes on with its own states.

    x = projection([embedding_norm(embedding), hidden_norm(state)])
    out = block(x)                      one or several of the target's own decoder layers
    logits = head(final_norm(out))      the next state is out, or final_norm(out)

Of a target with hyper-connections, state and x are several streams (DeepSeek-V4; Qwen3.8-Flash-Next):

    x[s] = embedding_projection(embedding_norm(embedding)) + projection(hidden_norm(state)[s])
    logits = head(final_norm(join(block(x))))      the next state is block(x)
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from .families import MtpFamily
from .layers import MtpLayer, StreamsLayer, final_norm_of


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
        self.state_size = self.hidden_size * family.num_streams(text)
        self.num_blocks = num_blocks(text, family)
        self.divisor: float | None = getattr(text, family.divisor_field) if family.divisor_field else None
        self.num_cached = self.first_layer + num_layers * self.num_blocks
        self.config = extended_config(text, family, num_layers)
        if not decoder._supports_sdpa:
            self.config._attn_implementation = "eager"
        kind = MtpLayer if family.streams is None else StreamsLayer
        self.layers = nn.ModuleList(
            kind(decoder, self.config, family, self.first_layer + i * self.num_blocks, self.num_blocks)
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

    @property
    def reference(self) -> torch.Tensor:
        """A weight that has the device and the dtype of the layers; norms may be kept in another one."""
        layer: Any = self.layers[0]
        return layer.projection.weight

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
        """([B, m, H] what the output head reads, [B, m, S] the states for the next layer).

        Args:
            index: of the layer.
            embedded: [B, m, H] embeddings of the entries' tokens.
            states: [B, m, S] of the target or of the layer before, S being `state_size`.
            positions: [B, m].
            mask: [B, 1, m, keys] what each entry sees, boolean or additive as the attention takes it.
            cache: holds the keys and values of earlier entries; None where the entries are all there are.
        """
        layer: Any = self.layers[index]
        inputs = {"attention_mask": mask, "position_ids": positions, "cache": cache}
        if self.rotary is not None:
            rotated = _with_keys(positions, cache) if self.family.keys_rotate else positions
            inputs["position_embeddings"] = self._rotations(embedded, rotated, layer.first_block)
        output = layer(embedded, states, **inputs)
        normed = layer.final_norm(layer.joined(output))
        carried = normed if self.family.carry == "normed" else output
        return (normed if self.divisor is None else normed / self.divisor), carried

    def _rotations(self, embedded: torch.Tensor, positions: torch.Tensor, block: int) -> Any:
        """Rotary embeddings of positions [B, n] as decoder layer `block` takes them."""
        if not self.rotary_takes_kind:
            return self.rotary(embedded, positions)
        kind = self.config.layer_types[block]
        if kind in (kinds := getattr(self.rotary, "layer_types", (kind,))):
            return self.rotary(embedded, positions, layer_type=kind)
        return {name: self.rotary(embedded, positions, layer_type=name) for name in kinds}  # the layer chooses


def _with_keys(positions: torch.Tensor, cache: Any) -> torch.Tensor:
    """[B, keys + m] positions of a cache's keys, with those of the entries [B, m] behind them."""
    if cache is None:
        return torch.cat([positions, positions], dim=1)
    first = positions[:, -1:] - cache.offsets[:, None] - positions.shape[1] + 1
    keys = first + torch.arange(cache.view, device=positions.device)
    return torch.cat([keys.clamp_min(0), positions], dim=1)


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
