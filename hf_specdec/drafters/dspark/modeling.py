"""The DSpark network (Cheng et al. 2026, arXiv:2607.05147): a block drafter whose tokens know the one before them.

logits_k = head(h_k) + W2 f(W1[x_{k-1}], h_k)      x_0 is the anchor
c_k = sigmoid(w [h_k, W1[x_{k-1}]] + b)            chance that x_k is accepted if all before it are
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..common.block_config import BlockConfig
from ..common.block_model import BlockModel

MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkHeads:
    """What stands behind the network.

    Args:
        markov_rank: width r of the Markov head; 0 without one.
        markov_kind: "vanilla", f is W1[x] itself; "gated", h decides how much of it; "rnn", with a memory of the block.
        confidence: whether there is a confidence head.
        confidence_reads_markov: whether it reads W1[x_{k-1}] beside h_k.
        confidence_bias: whether it has a bias.
        confidence_temperatures: what its logits are divided by, slot by slot; () leaves them as they are.
    """

    markov_rank: int = 0
    markov_kind: str = "vanilla"
    confidence: bool = False
    confidence_reads_markov: bool = True
    confidence_bias: bool = True
    confidence_temperatures: tuple[float, ...] = ()


class DSparkModel(BlockModel):
    """Weights of a DSpark drafter; names as in the checkpoints.

    Args:
        config: the network.
        heads: what stands behind it.
        own_embedding: whether it has an embedding of its own; otherwise the caller passes the target's.
    """

    def __init__(self, config: BlockConfig, heads: DSparkHeads, own_embedding: bool) -> None:
        super().__init__(config, own_embedding)
        self.heads = heads
        self.markov_head = MarkovHead(config, heads) if heads.markov_rank else None
        self.confidence_head = ConfidenceHead(config, heads) if heads.confidence else None


class MarkovHead(nn.Module):
    """What the token before adds to the logits; a softcap of the logits comes before it."""

    def __init__(self, config: BlockConfig, heads: DSparkHeads) -> None:
        super().__init__()
        rank, size = heads.markov_rank, config.hidden_size
        self.kind = heads.markov_kind
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(
        self, previous: torch.Tensor, states: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([..., Vd] what to add to the logits, the memory for the next slot).

        Args:
            previous: [...] ids of the tokens before, in the target's vocabulary.
            states: [..., H] of the slots.
            memory: [..., r] of the slot before; None at the first slot, and always without "rnn".
        """
        embedded = self.markov_w1(previous)
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat([states, embedded], dim=-1))) * embedded
        elif self.kind == "rnn":
            before = torch.zeros_like(embedded) if memory is None else memory
            keep, new, out = self.joint_proj(torch.cat([before, embedded, states], dim=-1)).chunk(3, dim=-1)
            keep = torch.sigmoid(keep)
            memory = keep * before + (1 - keep) * torch.tanh(new)
            embedded = torch.tanh(out)
        return self.markov_w2(embedded), memory


class ConfidenceHead(nn.Module):
    """How sure the drafter is of a slot, from what was known before its token was drawn."""

    def __init__(self, config: BlockConfig, heads: DSparkHeads) -> None:
        super().__init__()
        self.reads_markov = heads.confidence_reads_markov and heads.markov_rank > 0
        size = config.hidden_size + (heads.markov_rank if self.reads_markov else 0)
        self.proj = nn.Linear(size, 1, bias=heads.confidence_bias)

    def forward(self, states: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """[...] logits of acceptance.

        Args:
            states: [..., H] of the slots.
            embedded: [..., r] W1 of the tokens before them, where it is read.
        """
        if self.reads_markov:
            assert embedded is not None
            states = torch.cat([states, embedded], dim=-1)
        return self.proj(states)[..., 0]
