"""Top-k followed by top-p without sorting the vocabulary.

transformers' top-p sorts all V scores, although a top-k before it has left k of them. Sorting those k gives the same
tokens: what top-k has removed has no probability and sorts before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

Warper = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fuse(warpers: Sequence[Warper]) -> list[Warper]:
    """The warpers, with each top-k and the top-p right after it as one."""
    fused: list[Warper] = []
    for warper in warpers:
        before = fused[-1] if fused else None
        if type(warper) is TopPLogitsWarper and type(before) is TopKLogitsWarper and _remove(before, warper):
            fused[-1] = TopKTopP(before, warper)
        else:
            fused.append(warper)
    return fused


def _remove(*warpers: Any) -> bool:
    """Whether they remove tokens; a filter value of one's own leaves them some probability."""
    return all(warper.filter_value == -float("inf") for warper in warpers)


class TopKTopP:
    """Top-k, then top-p, over any number of rows at once.

    Args:
        top_k, top_p: transformers' warpers.
    """

    def __init__(self, top_k: Any, top_p: Any) -> None:
        self.top_k, self.top_p = top_k, top_p

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[n, V] scores with -inf at what is removed."""
        k, size = self.top_k.top_k, scores.shape[-1]
        # On an accelerator the test for ties would wait for the device, and its sort is fast.
        if scores.device.type != "cpu" or k >= size:
            return self._one_after_the_other(ids, scores)
        values, indices = scores.topk(k + 1, dim=-1)
        if bool((values[:, k - 1] == values[:, k]).any()):  # a tie at the border: top-k keeps more than k
            return self._one_after_the_other(ids, scores)
        kept, indices = values[:, :k].flip(-1), indices[:, :k].flip(-1)
        removed = kept.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p.top_p
        removed[:, -self.top_p.min_tokens_to_keep :] = False
        border = removed[:, :-1] & ~removed[:, 1:]
        if bool((border & (kept[:, :-1] == kept[:, 1:])).any()):  # which of the equal ones goes is up to torch's sort
            return self._one_after_the_other(ids, scores)
        kept = kept.masked_fill(removed, -float("inf"))
        return torch.full_like(scores, -float("inf")).scatter_(-1, indices, kept)

    def _one_after_the_other(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.top_p(ids, self.top_k(ids, scores))
