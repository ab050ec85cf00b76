"""What a session is told of its call: the rows to draft for, what an encoder read, and the target's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..config import SpecConfig
from ..verification import Noise


class RowsView(Protocol):
    """The rows of a call as a session sees them; `decoding.rows.Rows` in the loop.

    Attributes:
        ids: [B, capacity] the text with its left padding, on the target's device; scratch from `widths[b]` on.
        lengths: [B] `widths` on the device.
        widths: columns of each row that hold text or left padding.
        texts: token ids of each row without padding; the lists grow in place.
        finished: rows that have stopped; what is drafted for them is ignored.
        drafted, accepted, emitted: of the last verification, how many tokens were drafted and accepted, and the tokens
            that reached the text.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    widths: list[int]
    texts: list[list[int]]
    finished: list[bool]
    drafted: list[int]
    accepted: list[int]
    emitted: list[list[int]]

    @property
    def positions(self) -> torch.Tensor:
        """[B] absolute position, without padding, of each row's next token."""
        ...

    def last_tokens(self, num_tokens: int = 1) -> torch.Tensor:
        """[B, num_tokens] the last tokens of each row."""
        ...

    def place_draft(self, tokens: torch.Tensor) -> None:
        """Write drafted tokens [B, n] behind the rows, where `DraftRequest.process` looks for them."""
        ...


@dataclass(frozen=True)
class Source:
    """What the encoder of an encoder-decoder read and gave, for the rows of a call.

    Args:
        ids: token ids of each row without padding; None where it reads no tokens of the texts' vocabulary.
        inputs: [B, ...] its main input; None where only its outputs were given.
        attention_mask: [B, S] of the inputs, None where nothing is padded.
        outputs: its output, with `last_hidden_state` [B, S', H].
    """

    ids: list[list[int]] | None
    inputs: torch.Tensor | None
    attention_mask: torch.Tensor | None
    outputs: Any


@dataclass(frozen=True)
class DraftRequest:
    """What a session is told at its start.

    Args:
        rows: the rows, kept up to date by the loop.
        attention_mask: [B, W] of the prompt, None where nothing is padded.
        embedding, head: the target's input embedding (None for an encoder-decoder) and output head (None where it has
            none).
        process: (scores [B, 1, V], slot) -> scores [B, 1, V], the call's processors for drafted slot `slot`; may
            overwrite its argument. The tokens of the slots before it are read from where `rows.place_draft` put them.
        processors_read_ids: whether `process` looks at them at all.
        config: the options, with nothing left at "auto" but `num_draft_tokens`.
        vocab_size: V of the target.
        noise: the call's noise; None in greedy decoding.
        max_columns: columns that a row can reach, its drafts included.
        source: what the encoder of an encoder-decoder read and gave; None for other targets.
    """

    rows: RowsView
    attention_mask: torch.Tensor | None
    embedding: nn.Module | None
    head: nn.Module | None
    process: Callable[[torch.Tensor, int], torch.Tensor]
    processors_read_ids: bool
    config: SpecConfig
    vocab_size: int
    noise: Noise | None
    max_columns: int
    source: Source | None = None
