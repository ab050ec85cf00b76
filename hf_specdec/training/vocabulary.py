"""The reduced vocabulary of a drafter: the tokens that the target's answers are made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from .shards import read_ids, shards


def most_frequent(folder: Path, size: int, vocab_size: int) -> tuple[torch.Tensor, float]:
    """The tokens that answers use most.

    Args:
        folder: a data folder.
        size: how many; the vocabulary's size keeps all.
        vocab_size: of the target.

    Returns:
        ([size] ids in ascending order, the share of all answer tokens that they make up).
    """
    counts: Counter[int] = Counter()
    for path in shards(folder):
        for _, ids, prompt_length in read_ids(path):
            counts.update(ids[prompt_length:])
    kept = [token for token, _ in counts.most_common(size)]
    covered = sum(counts[token] for token in kept) / max(counts.total(), 1)
    if len(kept) < size:  # fill up with the lowest ids, which tokenizers give to the commonest pieces
        seen = set(kept)
        kept += [token for token in range(vocab_size) if token not in seen][: size - len(kept)]
    return torch.tensor(sorted(kept)), covered
