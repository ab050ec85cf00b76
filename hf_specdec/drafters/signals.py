"""What a drafter asks of each target forward, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class TargetSignals:
    """What a drafter needs from each target forward.

    Args:
        hidden_states: indices into transformers' `hidden_states` tuple: 0 is the embedding's output and i the output
            of layer i - 1. The last one, as transformers gives it, has gone through the final norm.
        pre_norm_last: give the last one as it was before the final norm.
        shared_kv: show the keys and values that the target keeps of its text.
    """

    hidden_states: tuple[int, ...] = ()
    pre_norm_last: bool = False
    shared_kv: bool = False


class SharedLayer(NamedTuple):
    """Keys and values of one attention layer.

    Attributes:
        keys, values: [b, heads, slots, head_dim].
        first: the column that the first slot stands for.
    """

    keys: torch.Tensor
    values: torch.Tensor
    first: int


@dataclass(frozen=True)
class SharedKV:
    """What the target keeps of its text. Columns before the prompt count here, and rejected tokens may still be there.

    Args:
        layers: kind of attention -> the last layer of that kind with keys and values of its own; views of the target's
            cache, good until its next forward.
        padding: [b, P] True where one of the first columns holds no text; None where all of them do.
        earlier: columns before the prompt.
        rows: which rows of the call are here, None for all.
    """

    layers: dict[str, SharedLayer]
    padding: torch.Tensor | None
    earlier: int = 0
    rows: list[int] | None = None


@dataclass(frozen=True)
class Signals:
    """What a target forward gave, for the rows of its verdict.

    Args:
        hidden_states: index -> [B, m, H], one entry for each input row of the forward: the whole (left-padded) prompt
            at the prefill, then the last committed token followed by the drafted ones.
        shared_kv: the target's keys and values after the forward, where they were asked for.
    """

    hidden_states: dict[int, torch.Tensor]
    shared_kv: SharedKV | None = None
