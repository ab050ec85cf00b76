"""The tokens that a drafter drafts, those that the target's answers are made of, and one that they never use."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

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


def unused_token(folder: Path, tokenizer: Any, vocab_size: int) -> int:
    """A row of the target's embedding that can stand for a token to be guessed: the tokenizer's mask token, else the
    last special token, else the last token, that no text of a data folder holds.

    Raises:
        ValueError: the texts hold every token.
    """
    used = {token for path in shards(folder) for _, ids, _ in read_ids(path) for token in ids}
    named = getattr(tokenizer, "mask_token_id", None)
    special = sorted(tokenizer.added_tokens_decoder, reverse=True)
    for token in [*([] if named is None else [named]), *special, *range(vocab_size - 1, -1, -1)]:
        if token < vocab_size and token not in used:
            return token
    raise ValueError("mask_token_id: the texts hold every token of the vocabulary; name one that they need least.")
