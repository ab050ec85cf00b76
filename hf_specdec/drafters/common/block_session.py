"""Drafting a block at once: what DFlash and DSpark share of a call.

Cache slots hold the context of the text up to its last token, the anchor. The rows of a block are written behind it
and written over by the context of the next round, so a rejection leaves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ...decoding.cache import RaggedCache
from ...verification import Verdict
from ..base import DraftSession, Signals
from ..request import DraftRequest
from .block_drafter import BlockDrafter
from .embedding import stored_embeddings
from .features import MismatchCheck, Missing, TargetFeatures
from .rotary import layer_config


class BlockSession(DraftSession):
    """The context of a call's rows, and blocks behind it.

    Args:
        drafter: the drafter.
        request: the call.
        causes: of a mismatch, the likeliest first.
    """

    def __init__(self, drafter: BlockDrafter, request: DraftRequest, causes: str) -> None:
        self.drafter, self.model, self.request, self.rows = drafter, drafter.model, request, request.rows
        self.config = self.model.config
        self.embedding: Any = getattr(self.model, "embed_tokens", request.embedding)
        self.device, self.dtype = self.model.norm.weight.device, self.model.norm.weight.dtype
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)
        self.cache = RaggedCache(layer_config(self.config), request.max_columns + self.config.block_size)
        self.cache.begin_rows()
        self.slots = torch.arange(0, device=self.device)
        self.features = TargetFeatures(self.rows, self.config.hidden_size, self.device, self.dtype)
        self.mismatch = MismatchCheck(self.rows, causes)
        self.first_rows: torch.Tensor | None = None  # what the last block said of the next token
        masks = torch.full((len(self.rows.widths), self.config.block_size - 1), self.config.mask_token_id)
        self.masks = masks.to(self.rows.ids.device)

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        assert signals is not None
        states = [signals.hidden_states[i].to(self.device, self.dtype) for i in self.config.aux_layers]
        self.features.add(self.model.fuse(states))
        self.mismatch.observe()
        if self.first_rows is not None:
            is_live = [bool(new) for new in self.rows.emitted]
            self.drafter.first_row_check.observe(self.first_rows, verdict.tokens[:, 0], is_live)
            self.first_rows = None

    def run_block(self) -> torch.Tensor:
        """[B, num_drafts, H] states of the rows that guess, after the last norm."""
        return self.run_rows()[:, self.config.first_slot :]

    def run_rows(self) -> torch.Tensor:
        """[B, block_size, H] states of all rows of a block, after the last norm."""
        for missing in self.features.take():  # all but the last one for the context that they leave
            states = self._run(missing)
        if self.drafter.first_row_check.is_open and states.shape[1] > 1:
            self.first_rows = self.drafter.scatter(self.next_token_logits(states[:, :2]), self.request)
        return states

    def next_token_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[B, 2, Vd] what the first two rows of a block, states [B, 2, H], say of the next token if asked for it."""
        return self.drafter.logits(states, self.request)

    def _run(self, missing: Missing) -> torch.Tensor:
        """[B, block_size, H] states of a block behind the missing columns."""
        num_rows = self.config.block_size
        self.cache.place(missing.offsets, missing.host_offsets, missing.num_columns + num_rows)
        if len(self.slots) < self.cache.view:
            self.slots = torch.arange(self.cache.capacity, device=self.device)
        tokens = torch.cat([self.rows.last_tokens(), self.masks], dim=1)
        embedded = stored_embeddings(self.embedding, tokens).to(self.device, self.dtype)
        columns = missing.offsets[:, None] + self.slots[: missing.num_columns + num_rows]
        positions = (columns - self.padding[:, None]).clamp_min(0)
        attend = self._attention(columns[:, missing.num_columns :])
        return self.model(embedded[:, None], missing.features, positions, attend)[:, 0]

    def _attention(self, rows: torch.Tensor) -> Any:
        """What the rows at columns [B, n] of the texts see of the cache."""
        keys, windows, causal = self.slots[: self.cache.view], self.config.windows, self.config.causal
        distance = rows[..., None] - keys
        first = self.padding.clamp_min(self.features.first)[:, None, None]
        seen = (keys >= first) & (keys <= rows[:, -1:, None]) | (distance == 0)
        masks = {}
        for window, is_causal in set(zip(windows, causal, strict=True)):
            mask = seen
            if window is not None and self.config.windows_from_anchor:
                mask = seen & (distance[:, :1] <= window)
            elif window is not None:
                mask = seen & (distance.abs() < window)
            masks[window, is_causal] = (mask & (distance >= 0) if is_causal else mask)[:, None]

        def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.update(keys, values, index)
            mask, scale = masks[windows[index], causal[index]], self.config.attention_scale
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)

        return attend
