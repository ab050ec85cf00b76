"""What a drafter hands to the verifier, and what the verifier hands back.

A draft is only as good as its law: the truth about how its tokens were drawn. A rule that is told the wrong law emits
text that is not the target's, and nothing crashes.

Shapes: B rows, n drafted slots, V the target's vocabulary, C the drafter's candidates. A slot past a row's length
holds -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OneHot:
    """The draft is a function of what the verifier already knows: q(d) = 1 at every slot."""


@dataclass(frozen=True)
class Sampled:
    """The draft was drawn from exactly these distributions, after the drafter's own processing.

    Args:
        logits: [B, n, C] log-weights; q = softmax(logits) over the C candidates.
        ids: target ids of the candidates: None (C is the target's vocabulary), [C] (a reduced vocabulary) or
            [B, n, C] (candidates that differ by slot). Ids are distinct within a slot.
        one_hot: [B, n] bool, slots whose token was not drawn but computed (q = 1 at the token).
        lse: [B, n] log-sum-exp of `logits`, where the drafter has it already.
        shared_noise: the draws used the target's own noise stream (`coupled`); `rejection` and `block` refuse these,
            because their accept tests would look at noise that the draft has already seen.
    """

    logits: torch.Tensor
    ids: torch.Tensor | None = None
    one_hot: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    shared_noise: bool = False

    def probs(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, n, C] q over the candidates."""
        if self.lse is None:
            return self.logits.to(dtype).softmax(dim=-1)
        return (self.logits.to(dtype) - self.lse.to(dtype).unsqueeze(-1)).exp()

    def first(self, num_slots: int) -> Sampled:
        """The laws of the first slots."""
        ids = self.ids if self.ids is None or self.ids.dim() == 1 else self.ids[:, :num_slots]
        one_hot = None if self.one_hot is None else self.one_hot[:, :num_slots]
        lse = None if self.lse is None else self.lse[:, :num_slots]
        return Sampled(self.logits[:, :num_slots], ids, one_hot, lse, self.shared_noise)

    def target_ids(self) -> torch.Tensor | None:
        """[B, n, C] target ids of the candidates, None when they are the vocabulary itself."""
        return None if self.ids is None else self.ids.expand(self.logits.shape)


def law_over_vocabulary(
    law: OneHot | Sampled, tokens: torch.Tensor, vocab_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, n, V] q over the target's vocabulary; any values past a row's length.

    Args:
        law: of the tokens.
        tokens: [B, n] drafted tokens, -1 pads.
    """
    tokens = tokens.clamp_min(0).unsqueeze(-1)
    zeros = torch.zeros(*tokens.shape[:-1], vocab_size, dtype=dtype, device=tokens.device)
    if isinstance(law, OneHot):
        return zeros.scatter(-1, tokens, 1.0)
    q, ids = law.probs(dtype), law.target_ids()
    if ids is not None:
        q = zeros.scatter(-1, ids, q)
    if law.one_hot is not None:
        q = torch.where(law.one_hot.unsqueeze(-1), zeros.scatter(-1, tokens, 1.0), q)
    return q


@dataclass(frozen=True)
class Draft:
    """Drafted tokens and how they were drawn.

    Args:
        tokens: [B, n] target ids, -1 past a row's length.
        lengths: [B] drafted tokens per row, 0..n.
        law: how the tokens were drawn.
        parents: None for a chain; for a tree [n] or [B, n], the index of each node's parent node, -1 for the root (the
            last committed token). A parent stands before its children, and siblings are distinct tokens.
        confidence: [B, n] the drafter's own estimate that a slot is accepted given that the slots before it are. It
            may depend on the tokens before a slot and never on the slot's own: lengths are decided with it.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    law: OneHot | Sampled
    parents: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    @staticmethod
    def empty(batch_size: int, device: torch.device) -> Draft:
        """A draft of no tokens: its verification is a plain step."""
        zeros = torch.zeros(batch_size, dtype=torch.long, device=device)
        return Draft(zeros.new_empty(batch_size, 0), zeros, OneHot())

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[1]

    def depths(self) -> torch.Tensor:
        """[B, n] depth of each node of a tree, the root's children at 1."""
        assert self.parents is not None
        parents = self.parents.expand_as(self.tokens)
        depths = torch.ones_like(parents)
        for i in range(parents.shape[1]):
            parent = parents[:, i]
            depths[:, i] = torch.where(parent < 0, 1, 1 + depths.gather(1, parent.clamp_min(0)[:, None])[:, 0])
        return depths

    def cut(self, lengths: torch.Tensor, num_slots: int) -> Draft:
        """The first tokens of each row of a chain.

        Args:
            lengths: [B] how many.
            num_slots: the largest of them, on the host.
        """
        within = torch.arange(num_slots, device=self.tokens.device) < lengths[:, None]
        law, confidence = self.law, self.confidence
        if isinstance(law, Sampled):
            law = law.first(num_slots)
        confidence = None if confidence is None else confidence[:, :num_slots]
        return Draft(self.tokens[:, :num_slots].masked_fill(~within, -1), lengths, law, confidence=confidence)


@dataclass(frozen=True)
class Verdict:
    """What a verification decided.

    Args:
        num_accepted: [B] accepted drafted tokens; -1 marks a row whose scores (the target's, or the drafter's where
            they decide) hold NaN, nothing to choose from, or an infinite weight to draw. Such a row emits nothing,
            and whoever reads the verdict on the host must raise.
        tokens: [B, n + 1] the emitted tokens, the accepted ones and one more; -1 pads.
        path: for a tree [B, n] the accepted nodes in order, -1 pads; None for a chain.
        tv, kl: of a lenient rule, [B, n + 1] how far the law h of each emitted token was from the target's p: TV(h, p)
            and KL(h || p) in nats. Entries past the emitted tokens mean nothing.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None = None
    tv: torch.Tensor | None = None
    kl: torch.Tensor | None = None
