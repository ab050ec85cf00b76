"""Training an EAGLE-3 head by training-time test (Li et al. 2025, arXiv:2503.01840).

The head is unrolled over its own outputs, as it will be when it drafts. At depth s row i holds the text's token
i + 1 + s. Its feature is the head's output of row i at depth s - 1, at depth 0 the target's states of token i. It
learns what the target says after that token. It sees the rows up to i at depth 0, where the target has been, and
itself at the depths since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..drafters.eagle3.configuration import Eagle3Config
from ..drafters.eagle3.modeling import Eagle3Model
from .batches import Batch
from .loop import Scores

_SELF_ATTENTION = 2.0  # gain of the first queries and keys


@dataclass(frozen=True)
class Eagle3Options:
    """What head to train, and how far to unroll it.

    Attributes:
        draft_vocab_size: tokens that it can draft: the most frequent ones of the answers.
        intermediate_size: width of its MLP; as in the target by default.
        num_steps: depths to unroll.
        decay: weight of a depth against the one before it.
    """

    draft_vocab_size: int = 32_000
    intermediate_size: int | None = None
    num_steps: int = 4
    decay: float = 0.8


class Eagle3Training(nn.Module):
    """A head, and all that its loss needs of the target.

    Args:
        model: the head.
        target: what it learns from; frozen.
        target_ids: [Vd] target ids of the draft tokens, ascending.
        num_steps: depths to unroll.
        decay: weight of a depth against the one before it.
    """

    def __init__(
        self, model: Eagle3Model, target: PreTrainedModel, target_ids: torch.Tensor, num_steps: int, decay: float
    ) -> None:
        super().__init__()
        self.model, self.num_steps, self.decay = model, num_steps, decay
        embedding: Any = target.get_input_embeddings()
        head: Any = target.get_output_embeddings()
        draft_ids = torch.full((model.config.vocab_size,), -1)  # where the head has no such token
        draft_ids[target_ids] = torch.arange(len(target_ids))
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self.draft_ids: torch.Tensor
        self.register_buffer("embedding", embedding.weight.detach(), persistent=False)
        self.register_buffer("head", head.weight.detach()[target_ids], persistent=False)  # [Vd, H]
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def unroll(self, batch: Batch) -> Iterator[torch.Tensor]:
        """[B, L, H] the head's outputs at each depth."""
        states = batch.states.to(self.model.norm.weight.dtype)  # theirs is the target's
        features = self.model.fuse([states[:, :, i] for i in range(len(self.model.config.aux_layers))])
        columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        attention = UnrolledAttention(self.model.config)
        for depth in range(self.num_steps):
            tokens = shifted(batch.ids, depth + 1)
            embedded = F.embedding(tokens, self.embedding).to(features.dtype)
            output = self.model(embedded, features, (columns + depth).expand_as(tokens), attention)
            yield output
            features = self.model.recurrent(output)
            attention.depth += 1

    def forward(self, batch: Batch) -> Scores:
        """Loss and hits of a batch; drafts start at every token of the answers."""
        columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        asked, first = asked_tokens(batch, self.num_steps)
        answers = self.draft_ids[shifted(batch.ids, 1)]  # [B, L] what follows each token
        taught = (asked & (answers >= 0)).flatten().nonzero().flatten()  # [N] of B x L
        answers = answers.flatten()[taught]
        final = batch.states[:, :, -1].flatten(0, 1)[taught]
        labels = F.linear(final, self.head).float().softmax(dim=-1)
        hits = torch.ones(batch.ids.numel(), dtype=torch.bool, device=columns.device)
        losses, num_hits, num_rows = [], [], []
        for depth, output in enumerate(self.unroll(batch)):
            rows = taught - 1 - depth  # at depth s a row is asked about the token s + 1 further on
            logits = self.model.lm_head(self.model.norm(output.flatten(0, 1)[rows])).float()
            # Soft cross-entropy as one dot product: no copies the size of the logits.
            loss = -torch.dot(labels.flatten(), logits.log_softmax(dim=-1).flatten()) / max(len(rows), 1)
            losses.append(loss * self.decay**depth)
            right = torch.zeros_like(hits)
            right[rows] = logits.argmax(dim=-1) == answers
            hits = hits & right  # accepted only if all before it were
            num_hits.append(hits.sum())
            num_rows.append((asked & (columns >= first + depth)).sum())
        return Scores(torch.stack(losses).sum(), torch.stack(num_hits), torch.stack(num_rows))


class UnrolledAttention:
    """What the rows of a training-time test attend over.

    Depth 0 is causal. At depth s a row sees the rows up to its own at depth 0, and itself at depths 1 to s: in a draft
    those are the tokens drafted before it. A text's padding is on its right, where no row looks.
    """

    def __init__(self, config: Eagle3Config) -> None:
        self.config, self.depth = config, 0
        self.keys: list[list[torch.Tensor]] = [[] for _ in config.windows]
        self.values: list[list[torch.Tensor]] = [[] for _ in config.windows]

    def __call__(self, index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        groups = queries.shape[1] // keys.shape[1]
        self.keys[index].append(keys.repeat_interleave(groups, dim=1))
        self.values[index].append(values.repeat_interleave(groups, dim=1))
        all_keys, all_values, window = self.keys[index], self.values[index], self.config.windows[index]
        if self.depth == 0 and window is None:
            return F.scaled_dot_product_attention(queries, all_keys[0], all_values[0], is_causal=True)
        rows = torch.arange(queries.shape[2], device=queries.device)
        distance = rows[:, None] - rows
        hidden = distance < 0
        if window is not None:
            hidden = hidden | (distance + self.depth >= window)
        scale = queries.shape[-1] ** -0.5
        scores = (queries @ all_keys[0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        depths = [d for d in range(1, self.depth + 1) if window is None or self.depth - d < window]
        own = [(queries * all_keys[depth]).sum(dim=-1, keepdim=True) for depth in depths]
        weights = torch.cat([scores, *own], dim=-1).float().mul(scale).softmax(dim=-1).to(queries.dtype)
        width = len(rows)
        mixed = weights[..., :width] @ all_values[0]
        for column, depth in enumerate(depths, start=width):
            mixed = mixed + weights[..., column, None] * all_values[depth]
        return mixed


def check_target(target: PreTrainedModel) -> None:
    """Refuse a target whose logits are more than its output head makes of its final state: they are what is learnt.

    Raises:
        ValueError: it scales or caps its logits, or has no final state to start from.
    """
    ids = torch.arange(3, 11, device=target.device)[None]
    with torch.no_grad():
        output = target(ids, output_hidden_states=True)
    head: Any = target.get_output_embeddings()
    plain = F.linear(output.hidden_states[-1], head.weight)
    tolerance = 0.05 if target.dtype in (torch.float16, torch.bfloat16) else 1e-3
    if not torch.allclose(plain.float(), output.logits.float(), rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"target: the logits of {type(target).__name__} are not its output head times its final state (it scales "
            "or caps them, or adds a bias), which training does not serve yet."
        )


def new_head(
    target: PreTrainedModel, aux_layers: tuple[int, ...], target_ids: torch.Tensor, intermediate_size: int | None = None
) -> Eagle3Model:
    """A head for `target`, shaped like one of its layers, whose output head starts from the target's.

    Args:
        target: the model to draft for.
        aux_layers: the hidden states to read (index e enters layer e).
        target_ids: [Vd] the tokens to draft, ascending.
        intermediate_size: width of the MLP, the target's by default.
    """
    theirs = target.config.get_text_config()
    heads = theirs.num_attention_heads
    config = Eagle3Config(
        hidden_size=theirs.hidden_size,
        intermediate_size=intermediate_size or getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(theirs, "num_key_value_heads", None) or heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=len(target_ids),
        target_hidden_size=theirs.hidden_size,
        aux_layers=aux_layers,
        fc_norm=True,
        norm_output=True,
        max_position_embeddings=theirs.max_position_embeddings,
    )
    model = Eagle3Model(config, own_embedding=False, own_head=True).float()
    head: Any = target.get_output_embeddings()
    first: Any = model.layers[0].self_attn
    with torch.no_grad():
        model.lm_head.weight.copy_(head.weight[target_ids])
        # The newest token enters through the attention only, which would start as a mean over the whole text and take
        # long to find it. Equal queries and keys make every entry look at itself first.
        keys = first.k_proj.weight.view(config.num_key_value_heads, -1, first.k_proj.in_features).mul_(_SELF_ATTENTION)
        first.q_proj.weight.copy_(keys.repeat_interleave(heads // config.num_key_value_heads, dim=0).flatten(0, 1))
    return model


def asked_tokens(batch: Batch, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, L] tokens after which the target was asked, [B, 1] the first of them); a draft starts with the second token
    of an answer, and `num_steps` tokens are before each."""
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    first = batch.prompt_lengths[:, None].clamp_min(num_steps)
    return (columns >= first) & (columns < batch.lengths[:, None] - 1), first


def shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """[B, L, ...] row i holds row i + count; what lies beyond the end repeats the last."""
    width = values.shape[1]
    return values[:, torch.arange(count, width + count, device=values.device).clamp_max(width - 1)]
