"""The rows of a generate call: their text on the device and on the host, and how far each has come."""

from __future__ import annotations

import torch

from ..verification import Draft, Verdict
from .stopping import ScoresAfter, Stops, no_scores

_HEADROOM = 256  # columns allocated beyond the prompt


class Rows:
    """B texts of different lengths in one tensor that is allocated ahead, laid out as plain `generate` lays them out.

    Args:
        input_ids: [B, W] the left-padded prompts.
        attention_mask: [B, E + W], None where nothing is padded. The first E columns are a text before the prompt that
            the target has in its cache, or as embeddings.
        pad_token_id: what fills a row after its end.

    Attributes:
        ids: [B, columns]; those from `widths[b]` on are scratch or padding.
        lengths: [B] `widths` on the device.
        widths: columns of each row that hold text or left padding.
        texts: token ids of each row without padding.
        earlier: tokens of each row before its prompt, in the cache or as embeddings.
        finished: rows that have stopped.
        drafted, accepted, emitted: of the last commit, per row; `emitted` are the tokens that reached the text.
    """

    def __init__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int) -> None:
        batch_size, width = input_ids.shape
        self.pad_token_id = pad_token_id
        self.ids = input_ids.long()
        self._columns = torch.arange(width, device=input_ids.device)
        self._reserve(width + _HEADROOM)
        self.lengths = torch.full((batch_size,), width, dtype=torch.long, device=input_ids.device)
        self.widths = [width] * batch_size
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        split = mask.shape[1] - width
        kept, self.earlier = mask[:, split:].tolist(), mask[:, :split].sum(dim=1).tolist()
        self.texts = [
            [token for token, keep in zip(prompt, keeps, strict=True) if keep]
            for prompt, keeps in zip(input_ids.tolist(), kept, strict=True)
        ]
        self.finished = [False] * batch_size
        self._placed = 0  # drafted tokens that stand in the scratch columns
        self.drafted = [0] * batch_size
        self.accepted = [0] * batch_size
        self.emitted: list[list[int]] = [[] for _ in range(batch_size)]
        padding = [width - len(text) - earlier for text, earlier in zip(self.texts, self.earlier, strict=True)]
        self._padding = torch.tensor(padding, device=input_ids.device)

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def positions(self) -> torch.Tensor:
        """[B] absolute position, without padding and with what came before, of each row's next token."""
        return self.lengths - self._padding

    def processor_widths(self, slot: int = 0) -> list[int]:
        """Columns before drafted slot `slot` of each row, for `BlockProcessors`.

        A finished row goes along at the width of the widest, so that rows in step cost one call per width.
        """
        widest = max((width for width, done in zip(self.widths, self.finished, strict=True) if not done), default=0)
        return [(widest if done else width) + slot for width, done in zip(self.widths, self.finished, strict=True)]

    def last_tokens(self, num_tokens: int = 1) -> torch.Tensor:
        """[B, num_tokens] the last tokens of each row; a shorter row repeats its first one in front."""
        columns = self.lengths[:, None] + (self._columns[:num_tokens] - num_tokens)
        return self.ids.gather(1, columns.clamp_min(0))

    def place_draft(self, tokens: torch.Tensor) -> None:
        """Write drafted tokens [B, n] into the scratch columns, where processors look for them."""
        self._placed = max(self._placed, tokens.shape[1])
        self._write(tokens.clamp_min(0))

    def commit(self, draft: Draft, verdict: Verdict, stops: Stops, scores_after: ScoresAfter = no_scores) -> None:
        """Append what a verification emitted, up to each row's stop. The one device-to-host copy of a round.

        Args:
            draft, verdict: of the round.
            stops: where rows end.
            scores_after: what a stopping criterion is given as scores after that many of the emitted tokens.

        Raises:
            ValueError: the target's scores of a row hold NaN or leave nothing to choose from.
        """
        packed = torch.cat([draft.lengths[:, None], verdict.num_accepted[:, None], verdict.tokens], dim=1).tolist()
        for b, (drafted, accepted, *tokens) in enumerate(packed):
            if self.finished[b]:
                self.drafted[b], self.accepted[b], self.emitted[b] = 0, 0, []
                continue
            if accepted < 0:
                raise ValueError(
                    f"the scores for row {b} at column {self.widths[b]} are NaN or forbid every token; "
                    "look for overflow in the models' dtypes, or for processors that contradict each other."
                )
            self.drafted[b], self.accepted[b] = drafted, accepted
            self.emitted[b] = stops.cut(tokens[: accepted + 1], self.widths[b])
        self._write_emitted(verdict.tokens)
        stopped: list[int | None] = [None] * len(self)
        if stops.criteria:
            stopped = stops.criteria_cut(self.ids, self.widths, self.emitted, scores_after)
            if any(stop is not None for stop in stopped):
                self.emitted = [new[:stop] for new, stop in zip(self.emitted, stopped, strict=True)]
                self._write_emitted(verdict.tokens)
        for b, new in enumerate(self.emitted):
            if self.finished[b]:
                continue
            self.widths[b] += len(new)
            self.texts[b].extend(new)
            self.finished[b] = stopped[b] is not None or stops.ends(new, self.widths[b])
            if self.finished[b]:  # what was drafted past the stop is not part of the statistics
                self.drafted[b] = min(self.drafted[b], len(new))
                self.accepted[b] = min(self.accepted[b], len(new))
        self.lengths, self._placed = torch.tensor(self.widths, device=self.ids.device), 0

    def sequences(self) -> torch.Tensor:
        """[B, widest row] the texts, padded after their ends."""
        return self.ids[:, : max(self.widths)].clone()

    def _write_emitted(self, tokens: torch.Tensor) -> None:
        """Write the emitted tokens at the rows' ends, and padding over what else the round left there: a draft may have
        been longer than what was verified of it."""
        counts = torch.tensor([len(new) for new in self.emitted], device=self.ids.device)
        tokens = torch.nn.functional.pad(tokens, (0, max(0, self._placed - tokens.shape[1])))
        kept = self._columns[: tokens.shape[1]] < counts[:, None]
        self._write(tokens.masked_fill(~kept, self.pad_token_id))

    def _reserve(self, num_columns: int) -> None:
        """Make room for `num_columns` columns."""
        missing = num_columns - self.ids.shape[1]
        if missing > 0:
            missing = max(missing, self.ids.shape[1])
            self.ids = torch.nn.functional.pad(self.ids, (0, missing), value=self.pad_token_id)
            self._columns = torch.arange(self.ids.shape[1], device=self.ids.device)

    def _write(self, tokens: torch.Tensor) -> None:
        self._reserve(max(self.widths) + tokens.shape[1])
        self.ids.scatter_(1, self.lengths[:, None] + self._columns[: tokens.shape[1]], tokens)
