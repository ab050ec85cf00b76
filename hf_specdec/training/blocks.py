"""Training block drafters: DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147), from blocks at many anchors.

A block stands at an anchor, a token of an answer that the target has emitted and not yet processed. Its rows see the
context before the anchor and each other, as they will when they draft, and learn what the target says at their places.
Tokens before a slot are those of the text: past the first that a draft would get wrong nothing counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..drafters.common.block_config import BlockConfig
from ..drafters.common.block_model import BlockModel
from ..drafters.dspark.modeling import DSparkHeads, DSparkModel
from .batches import Batch
from .loop import Scores
from .losses import divergence


@dataclass(frozen=True)
class BlockOptions:
    """What drafter to train, and how.

    Attributes:
        num_drafts: tokens that a block drafts.
        num_layers: decoder layers.
        intermediate_size: width of their MLPs; as in the target by default.
        num_key_value_heads: of their attention; as in the target by default.
        draft_vocab_size: tokens that it can draft: the most frequent ones of the answers.
        mask_token_id: row of the target's embedding for tokens to be guessed; by default one that no text has.
        anchor_stride: answer tokens from one anchor to the next, from a random start.
        decay: slots over which the weight of a slot falls by e.
        dpace: weigh slots by the chance of getting there instead (D-PACE, arXiv:2605.18810), smoothed by this much.
        cross_entropy: weight of the cross-entropy with the target's law.
    """

    num_drafts: int = 7
    num_layers: int = 5
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    draft_vocab_size: int = 32_000
    mask_token_id: int | None = None
    anchor_stride: int = 2
    decay: float = 4.0
    dpace: float | None = None
    cross_entropy: float = 1.0


@dataclass(frozen=True)
class DSparkOptions(BlockOptions):
    """What DSpark has beside.

    Attributes:
        distance: weight of the L1 distance from the target's law.
        markov_rank: width of the Markov head.
        markov_kind: vanilla, gated or rnn.
        confidence: weight of the confidence head's loss; 0 trains none.
        confidence_detached: whether that loss trains the confidence head only.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    markov_rank: int = 256
    markov_kind: str = "vanilla"
    confidence: float = 1.0
    confidence_detached: bool = False


class BlockTraining(nn.Module):
    """A block drafter with its output head, and all that its loss needs of the target.

    Args:
        model: the drafter's network, a DSparkModel or the plain BlockModel of DFlash.
        target: what it learns from; frozen.
        target_ids: [Vd] target ids of the draft tokens, ascending.
        options: how.
    """

    def __init__(
        self, model: BlockModel, target: PreTrainedModel, target_ids: torch.Tensor, options: BlockOptions
    ) -> None:
        super().__init__()
        self.model, self.options = model, options
        embedding: Any = target.get_input_embeddings()
        head: Any = target.get_output_embeddings()
        rows = head.weight.detach()[target_ids]  # [Vd, H]
        self.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(rows)
        draft_ids = torch.full((model.config.vocab_size,), -1)  # where the drafter has no such token
        draft_ids[target_ids] = torch.arange(len(target_ids))
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self.draft_ids: torch.Tensor
        self.register_buffer("embedding", embedding.weight.detach(), persistent=False)
        self.register_buffer("head", rows.clone(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def states(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """[B, A, num_drafts, H] states of the slots of blocks at `anchors` [B, A]."""
        config = self.model.config
        kept = batch.states.to(self.lm_head.weight.dtype)
        context = self.model.fuse([kept[:, :, i] for i in range(len(config.aux_layers))])
        rows = torch.arange(config.block_size, device=anchors.device)
        tokens = torch.full((*anchors.shape, config.block_size), config.mask_token_id, device=anchors.device)
        tokens[..., 0] = batch.ids.gather(1, anchors)
        embedded = F.embedding(tokens, self.embedding).to(context.dtype)
        columns = torch.arange(batch.ids.shape[1], device=anchors.device).expand_as(batch.ids)
        positions = torch.cat([columns, (anchors[..., None] + rows).flatten(1)], dim=1)
        attention = BlockedAttention(config, anchors, batch.ids.shape[1])
        return self.model(embedded, context, positions, attention)[:, :, config.first_slot :]

    def forward(self, batch: Batch) -> Scores:
        """Loss and hits of a batch."""
        num_drafts = self.model.config.num_drafts
        anchors, asked = self._anchors(batch)
        states = self.states(batch, anchors)[asked]  # [N, K, H], a block a row
        columns = anchors[..., None] + torch.arange(num_drafts, device=anchors.device)  # what stands before a slot
        inside = columns < batch.lengths[:, None, None] - 1
        columns = columns.clamp_max(batch.ids.shape[1] - 2)
        texts = torch.arange(len(batch.ids), device=anchors.device)[:, None, None]
        previous, inside = batch.ids[texts, columns][asked], inside[asked]  # [N, K]
        answers = self.draft_ids[batch.ids[texts, columns + 1][asked]]
        final = batch.states[texts, columns, -1][asked].to(self.head.dtype)
        taught = inside & (answers >= 0)
        read, markov = states[taught], getattr(self.model, "markov_head", None)
        logits = self.model.cap(self.lm_head(read))
        if markov is not None:
            logits = logits + self._markov(previous, states, taught)
        distance = getattr(self.options, "distance", 0.0)
        apart = divergence(logits, F.linear(final[taught], self.head), self.options.cross_entropy, distance)
        right = torch.zeros_like(taught)
        right[taught] = apart.best == answers[taught]
        weights = self._weights(logits, apart.log_normaliser, answers, taught)
        loss = (apart.loss * weights).sum() / weights.sum().clamp_min(1e-6)
        confidence = getattr(self.model, "confidence_head", None)
        if confidence is not None and isinstance(self.options, DSparkOptions):
            embedded = None if markov is None else markov.markov_w1(previous[taught])
            if self.options.confidence_detached:
                read, embedded = read.detach(), None if embedded is None else embedded.detach()
            sure = confidence(read, embedded).float()
            missed = F.binary_cross_entropy_with_logits(sure, apart.acceptance, reduction="none")
            loss = loss + self.options.confidence * (missed * weights).sum() / weights.sum().clamp_min(1e-6)
        return Scores(loss, right.long().cumprod(dim=1).sum(dim=0), inside.sum(dim=0))

    def _anchors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, A] columns, [B, A] which of them are anchors): tokens of the answers that are not the last."""
        stride = self.options.anchor_stride
        start = int(torch.randint(stride, ())) if self.training else 0
        longest = int((batch.lengths - batch.prompt_lengths).max())
        steps = torch.arange(start, max(longest - 1, start + 1), stride, device=batch.ids.device)
        anchors = batch.prompt_lengths[:, None] + steps
        asked = anchors < batch.lengths[:, None] - 1
        return anchors.clamp_max(batch.ids.shape[1] - 1), asked

    def _markov(self, previous: torch.Tensor, states: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        """[M, Vd] what the tokens before the slots that are taught add."""
        markov: Any = self.model.markov_head
        if markov.kind != "rnn":
            return markov(previous[taught], states[taught], None)[0]
        memory, biases = None, []
        for slot in range(states.shape[1]):
            bias, memory = markov(previous[:, slot], states[:, slot], memory)
            biases.append(bias)
        return torch.stack(biases, dim=1)[taught]

    @torch.no_grad()
    def _weights(
        self, logits: torch.Tensor, log_normaliser: torch.Tensor, answers: torch.Tensor, taught: torch.Tensor
    ) -> torch.Tensor:
        """[M] how much each slot that is taught counts."""
        slots = torch.arange(answers.shape[1], device=answers.device)
        if self.options.dpace is None:
            return torch.exp(-slots / self.options.decay).expand(answers.shape)[taught]
        guessed = logits.gather(-1, answers[taught][:, None])[:, 0].float() - log_normaliser
        chance = torch.zeros(answers.shape, device=answers.device)
        chance[taught] = (1 - self.options.dpace) * guessed.exp() + self.options.dpace
        reached = chance.cumprod(dim=1)
        return reached.flip(1).cumsum(dim=1).flip(1)[taught]


class BlockedAttention:
    """What the rows of many blocks attend over: the context before their anchor, and their own block.

    Args:
        config: the drafter.
        anchors: [B, A].
        width: columns of the context.
    """

    def __init__(self, config: BlockConfig, anchors: torch.Tensor, width: int) -> None:
        self.config, self.width = config, width
        rows = torch.arange(config.block_size, device=anchors.device)
        columns = torch.arange(width, device=anchors.device)
        self.distance = (anchors[..., None] + rows).flatten(1)[..., None] - columns  # [B, A * n, width]
        self.before = (columns < anchors[..., None])[:, :, None].expand(-1, -1, len(rows), -1).flatten(1, 2)
        self.within = rows[:, None] - rows  # [n, n]

    def __call__(self, index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        config, width, size = self.config, self.width, self.config.block_size
        window, causal = config.windows[index], config.causal[index]
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        before, within = self.before, torch.ones_like(self.within, dtype=torch.bool)
        if window is not None:
            before, within = before & (self.distance < window), within & (self.within.abs() < window)
        if causal:
            within = within & (self.within >= 0)
        scale = queries.shape[-1] ** -0.5
        context = (queries @ keys[:, :, :width].transpose(-1, -2)).masked_fill(~before[:, None], -torch.inf)
        blocks = (-1, size)
        own_queries, own_keys, own_values = (
            x.unflatten(2, blocks) for x in (queries, keys[:, :, width:], values[:, :, width:])
        )
        own = (own_queries @ own_keys.transpose(-1, -2)).masked_fill(~within, -torch.inf)  # [B, heads, A, n, n]
        weights = torch.cat([context, own.flatten(2, 3)], dim=-1).float().mul(scale).softmax(dim=-1).to(queries.dtype)
        mixed = weights[..., :width] @ values[:, :, :width]
        return mixed + (weights[..., width:].unflatten(2, blocks) @ own_values).flatten(2, 3)


def new_block_drafter(
    target: PreTrainedModel,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
    options: BlockOptions,
) -> BlockModel:
    """A drafter for `target` whose layers are shaped like the target's, DSpark's or DFlash's by the kind of options.

    Args:
        target: the model to draft for.
        aux_layers: the hidden states to read (index e enters layer e).
        draft_vocab_size: Vd.
        options: what it is to be like; its mask token is an id.
    """
    assert options.mask_token_id is not None
    theirs = target.config.get_text_config()
    heads = theirs.num_attention_heads
    spark = isinstance(options, DSparkOptions)
    config = BlockConfig(
        hidden_size=theirs.hidden_size,
        intermediate_size=options.intermediate_size
        or getattr(theirs, "intermediate_size", None)
        or 4 * theirs.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=options.num_key_value_heads or getattr(theirs, "num_key_value_heads", None) or heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=theirs.hidden_size,
        aux_layers=aux_layers,
        block_size=options.num_drafts + (0 if spark else 1),
        first_slot=0 if spark else 1,
        mask_token_id=options.mask_token_id,
        windows=(None,) * options.num_layers,
        causal=(False,) * options.num_layers,
        max_position_embeddings=theirs.max_position_embeddings,
    )
    if not isinstance(options, DSparkOptions):
        return BlockModel(config, own_embedding=False).float()
    heads_of = DSparkHeads(options.markov_rank, options.markov_kind, confidence=options.confidence > 0)
    model = DSparkModel(config, heads_of, own_embedding=False).float()
    if model.markov_head is not None:
        nn.init.normal_(model.markov_head.markov_w1.weight, std=0.01)  # it starts as next to nothing
    return model
