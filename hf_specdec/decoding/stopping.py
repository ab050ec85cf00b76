"""Where a text ends inside a block: tested at every token in order, as plain decoding would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

Criterion = Callable[..., torch.Tensor]
ScoresAfter = Callable[[int], tuple[torch.Tensor, ...] | None]


def no_scores(count: int) -> None:
    """What criteria are given where no scores are kept, as in plain decoding."""
    return None


class Stops:
    """The ends of the rows of a call.

    Args:
        max_width: columns (prompt and padding included) at which every row ends.
        eos_token_ids: tokens that end a row.
        criteria: any other transformers stopping criteria, (ids, scores) -> [B] bool.
    """

    def __init__(self, max_width: int, eos_token_ids: Iterable[int], criteria: Sequence[Criterion] = ()) -> None:
        self.max_width = max_width
        self.eos_token_ids = frozenset(eos_token_ids)
        self.criteria = list(criteria)

    def cut(self, tokens: list[int], width: int) -> list[int]:
        """The tokens that a row of `width` columns keeps: up to its last column and its first EOS, included."""
        tokens = tokens[: self.max_width - width]
        for i, token in enumerate(tokens):
            if token in self.eos_token_ids:
                return tokens[: i + 1]
        return tokens

    def ends(self, tokens: list[int], width: int) -> bool:
        """Whether a row that now has `width` columns and was given these (cut) tokens has ended."""
        return width >= self.max_width or (bool(tokens) and tokens[-1] in self.eos_token_ids)

    def criteria_cut(
        self, ids: torch.Tensor, widths: list[int], tokens: list[list[int]], scores_after: ScoresAfter = no_scores
    ) -> list[int | None]:
        """How many of its new tokens each row keeps by the criteria; None where none of them stops it.

        The criteria see the batch at every width at which a row has a new token, in ascending order, as in plain
        decoding. They are taken to judge each row by itself.

        Args:
            ids: the rows, new tokens included.
            widths: columns of each row before its new tokens.
            tokens: the new tokens.
            scores_after: the scores of the text after that many new tokens of the first row.
        """
        kept: list[int | None] = [None] * len(widths)
        ends = [width + len(new) for width, new in zip(widths, tokens, strict=True)]
        for width in range(min(widths) + 1, max(ends) + 1):
            open_rows = [b for b in range(len(widths)) if kept[b] is None and widths[b] < width <= ends[b]]
            if not open_rows:
                continue
            stopped = torch.zeros(len(widths), dtype=torch.bool, device=ids.device)
            for criterion in self.criteria:  # they may answer with one value for all rows
                stopped = stopped | criterion(ids[:, :width], scores_after(width - widths[0]))
            ended = stopped.tolist()
            for b in open_rows:
                if ended[b]:
                    kept[b] = width - widths[b]
        return kept
