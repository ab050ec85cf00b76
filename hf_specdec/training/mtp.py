"""Training an MTP layer for a target that has none, by training-time test over its own outputs.

The layer is DeepSeek-V3's (arXiv:2412.19437, section 2.2). It is unrolled as it will draft: at depth s row i holds the
text's token i + 1 + s and a state, at depth 0 the target's after token i, later the layer's own of row i at depth
s - 1. It learns what the target says after that token. Row i sees the rows up to i at depth 0, where the target has
been, and itself at the depths since.

Its output head is the target's, over the whole vocabulary, of which it may draft a part. The loss reads the tokens that
answers use most, and others drawn anew for each batch, each of which stands for many. So no token's score can drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from ..drafters.mtp.modeling import MtpModel
from .batches import Batch
from .eagle3 import asked_tokens, shifted
from .loop import Scores
from .losses import divergence, part_of_head


@dataclass(frozen=True)
class MtpOptions:
    """How to train the layer.

    Attributes:
        num_steps: depths to unroll.
        decay: weight of a depth against the one before it.
        num_frequent: tokens that are in every loss: the most frequent ones of the answers.
        num_negatives: other tokens in the loss of a batch, drawn anew each time.
        text_labels: learn the text's tokens, as DeepSeek-V3 does, instead of the target's law after each.
        drafts_all: draft every token, not only the frequent ones, whose part of the output head costs less to read.
    """

    num_steps: int = 3
    decay: float = 0.8
    num_frequent: int = 8192
    num_negatives: int = 2048
    text_labels: bool = False
    drafts_all: bool = False


class MtpTraining(nn.Module):
    """A layer, and all that its loss needs of the target.

    Args:
        model: one MTP layer.
        target: what it learns from; frozen.
        frequent: [F] ids of tokens that are in every loss.
        options: how.
    """

    def __init__(self, model: MtpModel, target: PreTrainedModel, frequent: torch.Tensor, options: MtpOptions) -> None:
        super().__init__()
        self.model, self.options = model, options
        embedding: Any = target.get_input_embeddings()
        head: Any = target.get_output_embeddings()
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self.frequent: torch.Tensor
        self.register_buffer("embedding", embedding.weight.detach(), persistent=False)  # [V, H]
        self.register_buffer("head", head.weight.detach(), persistent=False)  # [V, H]
        self.register_buffer("frequent", frequent, persistent=False)

    def unroll(self, batch: Batch) -> Iterator[torch.Tensor]:
        """[B, L, H] what the output head reads at each depth."""
        layer: Any = self.model.layers[0]
        states = batch.states[:, :, -1].to(layer.projection.weight.dtype)
        columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        cache = DynamicCache()  # each depth's keys and values come behind those of the depths before
        for depth in range(self.options.num_steps):
            tokens = shifted(batch.ids, depth + 1)
            embedded = F.embedding(tokens, self.embedding).to(states.dtype)
            positions = (columns + depth + 1).expand_as(tokens)
            normed, states = self.model.run(0, embedded, states, positions, self._mask(columns, depth, states), cache)
            yield normed

    def forward(self, batch: Batch) -> Scores:
        """Loss and hits of a batch; drafts start at every token of the answers.

        In training the target's law and the hits are over the tokens in the loss, otherwise over all.
        """
        options = self.options
        asked, first = asked_tokens(batch, options.num_steps)
        columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        taught = asked.flatten().nonzero().flatten()  # [N] of B x L
        answers = shifted(batch.ids, 1).flatten()[taught]
        final = batch.states[:, :, -1].flatten(0, 1)[taught]
        rows, bias = self.head, None
        if self.training:
            rows, bias, answers = part_of_head(self.head, self.frequent, answers, options.num_negatives)
        law = F.linear(final.to(rows.dtype), rows, bias)
        if options.text_labels:
            law = torch.full_like(law, -torch.inf).scatter_(1, answers[:, None], 0.0)
        hits = torch.ones(batch.ids.numel(), dtype=torch.bool, device=batch.ids.device)
        losses, num_hits, num_rows = [], [], []
        for depth, normed in enumerate(self.unroll(batch)):
            entries = taught - 1 - depth  # at depth s a row is asked about the token s + 1 further on
            read = normed.flatten(0, 1)[entries]
            apart = divergence(F.linear(read.to(rows.dtype), rows, bias), law, cross_entropy=1.0, distance=0.0)
            losses.append(apart.loss.sum() / max(len(entries), 1) * options.decay**depth)
            right = torch.zeros_like(hits)
            right[entries] = apart.best == answers
            hits = hits & right  # accepted only if all before it were
            num_hits.append(hits.sum())
            num_rows.append((asked & (columns >= first + depth)).sum())
        return Scores(torch.stack(losses).sum(), torch.stack(num_hits), torch.stack(num_rows))

    def _mask(self, columns: torch.Tensor, depth: int, states: torch.Tensor) -> torch.Tensor:
        """[1, 1, L, (depth + 1) L] what the rows see of all depths so far; a text's padding is where no row looks."""
        distance = columns[:, None] - columns
        visible = [distance >= 0] + [distance == 0] * depth
        if (window := self.model.window(0)) is not None:
            visible = [seen & (distance + depth - d < window) for d, seen in enumerate(visible)]
        mask = torch.cat(visible, dim=1)[None, None]
        if self.model.config._attn_implementation == "eager":
            zeros = torch.zeros(mask.shape, device=mask.device, dtype=states.dtype)
            return zeros.masked_fill_(~mask, torch.finfo(states.dtype).min)
        return mask
