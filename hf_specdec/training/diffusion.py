"""Training a diffusion drafter: a few layers of the target that learn to fill in masks in blocks (arXiv:2503.09573).

Embedding and output head are the target's and stay. Blocks are counted from a text's first token, and a token sees its
own block and those before it. A block is trained as a draft asks for it: tokens of the text up to a random place, masks
from there to the block's end; in a share of the blocks some masks are tokens already, as after a first pass. The blocks
before it are the text's. Each mask learns the target's law at its place.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..drafters.diffusion.families import NATIVE
from .batches import Batch
from .loop import Scores
from .losses import divergence, part_of_head

_SERVED = ("llama", "qwen2", "qwen3")  # targets whose layers such a drafter is made of


@dataclass(frozen=True)
class DiffusionOptions:
    """What drafter to train, and how.

    Attributes:
        block_size: tokens of a block.
        num_layers: decoder layers, which start as the target's first ones.
        mask_token_id: row of the target's embedding for tokens to be guessed; by default one that no text has.
        num_copies: masked copies of each block in a batch.
        revealed: share of the blocks in which masks are tokens already, each with a chance drawn for the block.
        decay: masks over which the weight of a mask falls by e, from the first of its block on.
        num_frequent: tokens that are in every loss: the most frequent ones of the answers.
        num_negatives: other tokens in the loss of a batch, drawn anew each time.
    """

    block_size: int = 8
    num_layers: int = 3
    mask_token_id: int | None = None
    num_copies: int = 2
    revealed: float = 0.4
    decay: float = 4.0
    num_frequent: int = 8192
    num_negatives: int = 2048

    def __post_init__(self) -> None:
        for name in ("block_size", "num_layers", "num_copies"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; give an integer from 1 on.")
        if not 0 <= self.revealed <= 1:
            raise ValueError(f"`revealed` is {self.revealed}; give a share from 0 to 1.")


class MaskedBlocks(NamedTuple):
    """Copies of the blocks of a batch that hold tokens of answers.

    Attributes:
        columns: [B, copies, blocks, block_size] where a token stands in its text; beyond the text too.
        slots: the same shape, how far a token is behind the first mask of its block; below 0 before that.
        masked: the same shape, whether a mask stands there.
    """

    columns: torch.Tensor
    slots: torch.Tensor
    masked: torch.Tensor


class DiffusionTraining(nn.Module):
    """A drafter's layers, and all that its loss needs of the target.

    Args:
        model: the layers and their final norm, as `new_layers` makes them.
        target: what they learn from; frozen.
        frequent: [F] ids of tokens that are in every loss.
        options: how; the mask token is an id.
    """

    def __init__(
        self, model: PreTrainedModel, target: PreTrainedModel, frequent: torch.Tensor, options: DiffusionOptions
    ) -> None:
        super().__init__()
        assert options.mask_token_id is not None
        self.model, self.options, self.mask_token_id = model, options, options.mask_token_id
        embedding: Any = target.get_input_embeddings()
        head: Any = target.get_output_embeddings()
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self.frequent: torch.Tensor
        self.register_buffer("embedding", embedding.weight.detach(), persistent=False)  # [V, H]
        self.register_buffer("head", head.weight.detach(), persistent=False)  # [V, H]
        self.register_buffer("frequent", frequent, persistent=False)

    def blocks(self, batch: Batch) -> MaskedBlocks:
        """Blocks to be filled in. A draft starts with the second token of an answer.

        In training the first mask of a block is drawn; otherwise the copies have it at places of equal distance, which
        move on from block to block, and nothing behind it is revealed.
        """
        options, size, device = self.options, self.options.block_size, batch.ids.device
        earliest = batch.prompt_lengths[:, None, None] + 1
        begin = earliest // size
        count = max(int(((batch.lengths - 1) // size - begin[:, 0, 0]).max()) + 1, 1)
        numbers = begin + torch.arange(count, device=device)  # [B, 1, blocks]
        copies = torch.arange(options.num_copies, device=device)[:, None]
        if self.training:
            places = torch.randint(size, (len(batch.ids), options.num_copies, count), device=device)
        else:
            places = (numbers + copies * size // options.num_copies) % size
        first = torch.maximum(numbers * size + places, earliest)[..., None]
        columns = (numbers[..., None] * size + torch.arange(size, device=device)).expand(*places.shape, size)
        masked = columns >= first
        if self.training:
            rates = torch.rand(places.shape, device=device) * (
                torch.rand(places.shape, device=device) < options.revealed
            )
            hidden = torch.rand(columns.shape, device=device) >= rates[..., None]
            masked = masked & (hidden | (columns >= batch.lengths[:, None, None, None]))  # no token is known there
        return MaskedBlocks(columns, columns - first, masked)

    def states(self, batch: Batch, blocks: MaskedBlocks) -> torch.Tensor:
        """[B, copies, blocks, block_size, H] what the output head reads."""
        width, size, device = batch.ids.shape[1], self.options.block_size, batch.ids.device
        columns = blocks.columns.flatten(1)
        tokens = batch.ids.gather(1, columns.clamp_max(width - 1)).masked_fill(
            blocks.masked.flatten(1), self.mask_token_id
        )
        text = torch.arange(width, device=device)
        embedded = F.embedding(torch.cat([batch.ids, tokens], dim=1), self.embedding).float()
        # The text's tokens see its blocks up to their own, masked copies those before theirs and themselves.
        limits = torch.cat([(text // size + 1).expand_as(batch.ids), columns // size], dim=1)
        groups = torch.arange(columns.shape[1], device=device) // size
        own = groups[:, None] == groups
        own = torch.cat([own.new_zeros(width, len(groups)), own]).expand(len(batch.ids), -1, -1)
        return (
            self.model(
                inputs_embeds=embedded,
                attention_mask=torch.cat([text // size < limits[..., None], own], dim=2)[:, None],
                position_ids=torch.cat([text.expand_as(batch.ids), columns], dim=1),
                use_cache=False,
            )
            .last_hidden_state[:, width:]
            .unflatten(1, blocks.columns.shape[1:])
        )

    def forward(self, batch: Batch) -> Scores:
        """Loss of a batch, and hits of the slots of a block from its first mask on.

        In training the target's law and the hits are over the tokens in the loss, otherwise over all.
        """
        blocks, options = self.blocks(batch), self.options
        inside = blocks.columns < batch.lengths[:, None, None, None]
        taught = blocks.masked & inside
        read = self.states(batch, blocks)[taught]  # [M, H]
        texts = torch.arange(len(batch.ids), device=batch.ids.device)[:, None, None, None].expand_as(taught)[taught]
        columns = blocks.columns[taught]
        rows, bias, answers = self.head, None, batch.ids[texts, columns]
        if self.training:
            rows, bias, answers = part_of_head(self.head, self.frequent, answers, options.num_negatives)
        law = F.linear(batch.states[texts, columns - 1, -1].to(rows.dtype), rows, bias)
        apart = divergence(F.linear(read.to(rows.dtype), rows, bias), law, cross_entropy=1.0, distance=0.0)
        weights = torch.exp(-blocks.slots[taught] / options.decay)
        loss = (apart.loss * weights).sum() / weights.sum().clamp_min(1e-6)
        right = torch.ones_like(taught)
        right[taught] = apart.best == answers
        drafted = inside & (blocks.slots >= 0)
        right = drafted & right.cumprod(dim=-1).bool()  # accepted only if all before it were
        slots = torch.arange(options.block_size, device=batch.ids.device)
        of_slot = blocks.slots[..., None] == slots
        return Scores(
            loss,
            (of_slot & right[..., None]).sum(dim=(0, 1, 2, 3)),
            (of_slot & drafted[..., None]).sum(dim=(0, 1, 2, 3)),
        )


def check_layers(target: PreTrainedModel) -> None:
    """Refuse a target whose layers are of no class that such a drafter is loaded into.

    Raises:
        ValueError: it is of another kind, or slides, or has biases that the files have no field for.
    """
    config = target.config.get_text_config()
    if config.model_type not in _SERVED or type(config) is not NATIVE[config.model_type][0]:
        raise ValueError(
            f"target: {type(target).__name__} is of type {config.model_type!r}, and a diffusion drafter is made of the "
            f"layers of {', '.join(_SERVED)}; train 'mtp' or 'eagle3' instead."
        )
    slides = getattr(config, "use_sliding_window", False)
    biased = config.model_type != "qwen2" and (config.attention_bias or getattr(config, "mlp_bias", False))
    if slides or biased:
        raise ValueError(
            f"target: {type(target).__name__} has {'sliding windows' if slides else 'biases'}, which a diffusion "
            "drafter's files have no field for; train 'mtp' or 'eagle3' instead."
        )


def new_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Layers in fp32 that start as the target's first ones, with its final norm, and without embedding.

    Args:
        target: the model to draft for.
        num_layers: how many.

    Raises:
        ValueError: it has not so many.
    """
    decoder: Any = target.get_decoder()
    if num_layers > len(decoder.layers):
        raise ValueError(f"`num_layers` is {num_layers} and the target has {len(decoder.layers)} layers; give less.")
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    model = type(decoder)._from_config(config, attn_implementation="sdpa")  # takes a mask of any form
    model.embed_tokens = None
    for ours, theirs in zip([*model.layers, model.norm], [*decoder.layers[:num_layers], decoder.norm], strict=True):
        ours.load_state_dict(theirs.state_dict())
    return model.float()
