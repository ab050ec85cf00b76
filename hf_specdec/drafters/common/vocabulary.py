"""Logits of a drafter over the target's vocabulary."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def over_target_vocabulary(
    logits: torch.Tensor, target_ids: torch.Tensor | None, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """[..., vocab_size] fp32 logits on `device`, -inf where the drafter has no such token.

    Args:
        logits: [..., Vd] of the drafter; what lies beyond `vocab_size` is padding.
        target_ids: [Vd] target id of each; None where they are the same.
    """
    logits = logits.to(device, torch.float32)
    if target_ids is None:
        missing = max(0, vocab_size - logits.shape[-1])
        return F.pad(logits[..., :vocab_size], (0, missing), value=-torch.inf)
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return full.index_copy_(-1, target_ids.to(device), logits)
