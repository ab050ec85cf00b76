"""Passes of a masked diffusion model over canvases: texts of different lengths, with masked or drafted slots behind.

In blocks, a token sees its own block and those before it, so the keys and values of complete blocks of the text are
final and stay in the cache. Everything behind them is run anew in each pass: the end of the text, the draft, and masks
up to the end of its last block, as the model was trained. With full attention all of the text depends on the draft, so
every pass runs all of it, and `block_size` masks.

Blocks are counted from the first token of a text, without its padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...decoding.cache import RaggedCache
from ..common.embedding import head_logits, stored_embeddings
from ..common.vocabulary import over_target_vocabulary
from ..request import DraftRequest
from .config_files import CanvasConfig


class Canvases:
    """The canvases of a call's rows.

    Args:
        model: the network; its attention takes an explicit mask. Where it has no embedding or no output head, the
            target's serves.
        config: how it reads a canvas.
        request: the call.

    Attributes:
        valid: columns of each row whose keys and values are final.
    """

    def __init__(self, model: PreTrainedModel, config: CanvasConfig, request: DraftRequest) -> None:
        assert config.mask_token_id is not None
        self.mask: int = config.mask_token_id
        self.gap = 0 if config.separator is None else 1  # tokens between a text and its slots
        self.model, self.config, self.request, self.rows = model, config, request, request.rows
        self.device = model.device
        self.embedding: Any = model.get_input_embeddings() or request.embedding
        self.head: Any = model.get_output_embeddings() or request.head
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)  # [B]
        self.host_padding = self.padding.tolist()
        self.cache = RaggedCache(model.config, request.max_columns + 2 * config.block_size + 1)
        self.cache.begin_rows()
        self.valid = [max(0, padding) for padding in self.host_padding]
        barred = [id for id in config.barred if id < model.config.vocab_size]
        self.barred = torch.tensor(barred, device=self.device)

    def begin(self, num_slots: int) -> tuple[torch.Tensor, int]:
        """Start a round. ([B, n] the block of each slot, counted from that of the first, how many)."""
        device, size = self.rows.ids.device, self.config.block_size
        if self.config.full_attention:
            return torch.zeros(len(self.rows.widths), num_slots, dtype=torch.long, device=device), 1
        before = [(width - padding) % size for width, padding in zip(self.rows.widths, self.host_padding, strict=True)]
        slots = torch.arange(num_slots, device=device)
        stages = (torch.tensor(before, device=device)[:, None] + slots) // size
        running = [count for count, done in zip(before, self.rows.finished, strict=True) if not done]
        return stages, (max(running) + num_slots - 1) // size + 1

    def run(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """[B, n, V] fp32 logits of the slots over the target's vocabulary, on the device of the rows.

        Args:
            tokens: [B, n] in the slots.
            masked: [B, n] slots that hold a mask instead.
        """
        rows, config, num_slots = self.rows, self.config, tokens.shape[1]
        ends = [self._end(b, num_slots) for b in range(len(rows.widths))]
        unfinished = [b for b, done in enumerate(rows.finished) if not done]
        # The row before the first slot is run where it predicts that slot.
        missing = max(rows.widths[b] - min(self.valid[b], rows.widths[b] - config.shift) for b in unfinished)
        starts = [max(width - missing, 0) for width in rows.widths]
        count = max(ends[b] - starts[b] for b in unfinished)
        offsets = torch.tensor(starts, device=self.device)
        self.cache.place(offsets, starts, count)
        columns = offsets[:, None] + torch.arange(count, device=self.device)  # [B, m]
        canvas = tokens.masked_fill(masked, self.mask).to(self.device)
        if config.separator is not None:
            canvas = F.pad(canvas, (1, 0), value=config.separator)
        ids = self._ids(columns, columns - rows.lengths.to(self.device)[:, None], canvas)
        states = self._forward(ids, columns, torch.tensor(ends, device=self.device))
        first = rows.lengths.to(self.device) + self.gap - offsets - config.shift
        places = (first[:, None] + torch.arange(num_slots, device=self.device)).clamp_(0, count - 1)
        states = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
        if not config.full_attention:
            size = config.block_size
            self.valid = [w - (w - p) % size for w, p in zip(rows.widths, self.host_padding, strict=True)]
        logits = head_logits(self.head, states)
        logits = logits.index_fill(-1, self.barred.to(logits.device), -torch.inf)
        return over_target_vocabulary(logits, None, self.request.vocab_size, rows.ids.device)

    def _end(self, row: int, num_slots: int) -> int:
        """The column behind a row's canvas."""
        width, padding, size = self.rows.widths[row], self.host_padding[row], self.config.block_size
        if self.config.full_attention:
            return width + self.gap + max(num_slots, size)
        return padding + -(-(width + num_slots - padding) // size) * size

    def _ids(self, columns: torch.Tensor, places: torch.Tensor, canvas: torch.Tensor) -> torch.Tensor:
        """[B, m] text, then the canvas [B, n], then masks; `places` are counted from the end of the text."""
        rows, length = self.rows, canvas.shape[1]
        text = rows.ids.to(self.device).gather(1, columns.clamp_max(rows.ids.shape[1] - 1))
        text = text.clamp_max(self.model.config.vocab_size - 1)  # ids that only the target's padding has
        drafted = canvas.gather(1, places.clamp(0, length - 1))
        return torch.where(places < 0, text, torch.where(places < length, drafted, self.mask))

    def _forward(self, ids: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[B, m, H] states of the columns after the last norm."""
        keys = torch.arange(self.cache.view, device=self.device)
        visible = (keys >= self.padding[:, None]) & (keys < ends[:, None])
        visible = visible[:, None].expand(-1, columns.shape[1], -1)
        if not self.config.full_attention:
            size, first = self.config.block_size, self.padding[:, None]
            blocks = (columns - first).div(size, rounding_mode="floor")
            visible = visible & ((keys - first).div(size, rounding_mode="floor")[:, None] <= blocks[..., None])
        # Padding sees itself, for attention over nothing is NaN.
        mask = (visible | (keys == columns[..., None]))[:, None]
        return self.model.base_model(
            inputs_embeds=stored_embeddings(self.embedding, ids).to(self.device, self.model.dtype),
            attention_mask=mask,
            position_ids=(columns - self.padding[:, None]).clamp_min(0),
            cache=self.cache,
            use_cache=True,
        ).last_hidden_state
