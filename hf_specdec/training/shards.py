"""The shards of a data folder: texts with the target's hidden states along them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .decode import Text

HELD_OUT = 50  # every 50th prompt is not trained on


@dataclass
class Sequence:
    """One text of a data folder.

    Attributes:
        index: number of its prompt.
        ids: [n] token ids of prompt and answer.
        prompt_length: tokens of the prompt.
        states: [n, T, H] the hidden states kept; zeros for the last token, which no forward has processed.
    """

    index: int
    ids: torch.Tensor
    prompt_length: int
    states: torch.Tensor


def shards(folder: Path) -> list[Path]:
    """The finished shards of a data folder."""
    return sorted((folder / "shards").glob("*.safetensors"))


def read_shard(path: Path) -> Iterator[Sequence]:
    """The texts of a shard."""
    with safe_open(path, "pt") as file:
        ids, starts, states = file.get_tensor("ids"), file.get_tensor("starts").tolist(), file.get_slice("states")
        for number, (index, prompt_length) in enumerate(
            zip(file.get_tensor("indices").tolist(), file.get_tensor("prompt_lengths").tolist(), strict=True)
        ):
            first, end = starts[number], starts[number + 1]
            yield Sequence(index, ids[first:end].long(), prompt_length, states[first:end])


def read_ids(path: Path) -> list[tuple[int, list[int], int]]:
    """(index, ids, prompt length) of each text of a shard; the states stay on disk."""
    with safe_open(path, "pt") as file:
        ids, starts = file.get_tensor("ids").tolist(), file.get_tensor("starts").tolist()
        indices, lengths = file.get_tensor("indices").tolist(), file.get_tensor("prompt_lengths").tolist()
    return [(n, ids[a:b], p) for n, a, b, p in zip(indices, starts[:-1], starts[1:], lengths, strict=True)]


def write_shard(folder: Path, texts: list[Text], process: int) -> None:
    """Add a shard to a data folder, all of it or nothing."""
    sizes = torch.tensor([0] + [len(text.ids) for text in texts])
    tensors = {
        "ids": torch.tensor([token for text in texts for token in text.ids], dtype=torch.int32),
        "starts": sizes.cumsum(0).to(torch.int32),
        "prompt_lengths": torch.tensor([len(text.prompt.ids) for text in texts], dtype=torch.int32),
        "indices": torch.tensor([text.prompt.index for text in texts], dtype=torch.int32),
        "states": torch.cat([text.states for text in texts if text.states is not None]),
    }
    name = f"{min(text.prompt.index for text in texts):07d}-{process}.safetensors"
    partial = folder / "shards" / f".{name}.partial"
    save_file(tensors, partial)
    partial.replace(folder / "shards" / name)
