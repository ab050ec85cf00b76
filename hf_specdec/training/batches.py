"""Batches of a data folder, in an order that depends on the seed, the epoch and the number of processes only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .shards import HELD_OUT, Sequence, read_ids, read_shard, shards

_SHARDS_AT_ONCE = 6  # read together, so that texts of different shards meet in a batch


@dataclass
class Batch:
    """B texts, padded on the right to L tokens.

    Attributes:
        ids: [B, L].
        lengths, prompt_lengths: [B] tokens of the text, and of its prompt.
        states: [B, L, T, H] the hidden states of a data folder; those of a text's last token are zeros.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    states: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(value.to(device, non_blocking=True) for value in vars(self).values()))


def train_batches(
    folder: Path, max_tokens: int, seed: int, epoch: int, process: int = 0, num_processes: int = 1
) -> Iterator[Batch]:
    """One epoch, or one process's equal share of it; `max_tokens` is the size of a batch, padding included."""
    draw = random.Random(f"{seed}, {epoch}")
    paths = shards(folder)
    draw.shuffle(paths)
    for start in range(0, len(paths), _SHARDS_AT_ONCE):
        texts = [text for path in paths[start : start + _SHARDS_AT_ONCE] for text in read_shard(path)]
        texts = [text for text in texts if text.index % HELD_OUT]
        groups = _grouped(texts, max_tokens)
        draw.shuffle(groups)
        groups = groups[: len(groups) // num_processes * num_processes]  # every process takes as many steps
        yield from (_padded(group) for group in groups[process::num_processes])


def held_out_batches(folder: Path, max_tokens: int, num_texts: int) -> list[Batch]:
    """The first `num_texts` texts that are not trained on."""
    texts: list[Sequence] = []
    for path in shards(folder):
        texts += [text for text in read_shard(path) if text.index % HELD_OUT == 0]
        if len(texts) >= num_texts:
            break
    return [_padded(group) for group in _grouped(texts[:num_texts], max_tokens)]


def count_batches(folder: Path, max_tokens: int, seed: int, epoch: int, num_processes: int = 1) -> int:
    """How many batches `train_batches` yields for each process in this epoch."""
    draw = random.Random(f"{seed}, {epoch}")
    paths = shards(folder)
    draw.shuffle(paths)
    total = 0
    for start in range(0, len(paths), _SHARDS_AT_ONCE):
        entries = [entry for path in paths[start : start + _SHARDS_AT_ONCE] for entry in read_ids(path)]
        lengths = sorted(len(ids) for index, ids, _ in entries if index % HELD_OUT)
        total += sum(1 for _ in _cuts(lengths, max_tokens)) // num_processes
    return total


def _grouped(texts: list[Sequence], max_tokens: int) -> list[list[Sequence]]:
    """Texts of alike length together."""
    texts = sorted(texts, key=lambda text: len(text.ids))
    return [texts[first:end] for first, end in _cuts([len(text.ids) for text in texts], max_tokens)]


def _cuts(lengths: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Where to cut ascending lengths so that (texts x longest) stays within `max_tokens`; at least one text each."""
    first = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - first) * lengths[end] > max_tokens:
            yield first, end
            first = end


def _padded(texts: list[Sequence]) -> Batch:
    longest = max(len(text.ids) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    states = texts[0].states.new_zeros(len(texts), longest, *texts[0].states.shape[1:])
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        states[row, : len(text.ids)] = text.states
    lengths = torch.tensor([len(text.ids) for text in texts])
    return Batch(ids, lengths, torch.tensor([text.prompt_length for text in texts]), states)
