"""The candidate selector of DFlash 2: which of the likeliest tokens of a row follows the token before it.

score(k) = logit(k) + sum_r A[previous]_r (P h)_r C[k]_r      for the likeliest candidates k of the row
"""

from __future__ import annotations

import torch
from torch import nn


class CandidateSelector(nn.Module):
    """Weights of the selector.

    Args:
        hidden_size: of the states h.
        num_codes: rows of the codebooks A and C, one for each token of the target.
        rank: their width.
        num_candidates: tokens of a row that can be drafted.
    """

    def __init__(self, hidden_size: int, num_codes: int, rank: int, num_candidates: int) -> None:
        super().__init__()
        self.num_candidates = num_candidates
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(num_codes, rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(torch.empty(num_codes, rank).normal_(std=0.02))

    def forward(self, states: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """[..., C] fp32, what to add to the logits of the candidates.

        Args:
            states: [..., H] of the rows, after the last norm.
            previous: [...] target ids of the tokens before.
            candidates: [..., C] target ids.
        """
        context = self.predecessor_codebook[previous].float() * self.hidden_projection(states).float()
        return (self.successor_codebook[candidates].float() * context.unsqueeze(-2)).sum(dim=-1)
