"""A drafter's vocabulary and the target's: whether they are one, which part is drafted, and logits over the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

_MOST_PADDING_ROWS, _MOST_PADDING_SHARE = 1024, 0.1


def same_but_for_padding(a: int, b: int) -> bool:
    """Whether vocabularies of these sizes may be one: embeddings of a family differ by the padding of their rows."""
    return abs(a - b) <= min(_MOST_PADDING_ROWS, _MOST_PADDING_SHARE * max(a, b))


def checked_draft_vocab(draft_vocab: int | Sequence[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[Vd] ascending ids of the tokens that may be drafted.

    Args:
        draft_vocab: the ids, or how many of the lowest ones, which tokenizers give to the commonest pieces.
        vocab_size: of the target.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(draft_vocab, int) and not isinstance(draft_vocab, bool) and 0 < draft_vocab <= vocab_size:
        return torch.arange(draft_vocab)
    if isinstance(draft_vocab, Sequence | torch.Tensor) and not isinstance(draft_vocab, str):
        try:
            ids = torch.as_tensor(draft_vocab)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.empty(0)
        if ids.dim() == 1 and len(ids) and not ids.is_floating_point() and ids.dtype != torch.bool:
            ids = ids.cpu().long().unique()
            if int(ids[0]) >= 0 and int(ids[-1]) < vocab_size:
                return ids
    shown = repr(draft_vocab)
    raise ValueError(
        f"`draft_vocab` is {shown if len(shown) <= 40 else shown[:37] + '...'}; it is a number of tokens or their ids, "
        f"of the target's {vocab_size}."
    )


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
