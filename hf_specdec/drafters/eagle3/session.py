"""Drafting with an EAGLE-3 head (Li et al. 2025): a chain from the target's own hidden states.

Entry i holds token i + 1 and the feature of token i. Entries of committed tokens are made from the target's hidden
states. Where the head drafts on, its own last state takes their place, so those entries are written over as soon as
the target has been there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...decoding.cache import RaggedCache
from ...verification import Draft, Verdict
from ..base import Drafter, DraftRequest, DraftSession, RowsView, Signals, TargetSignals
from ..common.chain import draw_chain
from ..common.embedding import on_device_of, stored_embeddings, width
from .modeling import Eagle3Model, layer_config

_CHECK_AFTER = 64  # verifications
_FLOOR = 0.05  # drafts whose first token was accepted; a head on the wrong layers stays below, a weak one does not


class Eagle3Drafter(Drafter):
    """An EAGLE-3 head.

    Args:
        model: the head.
        target_ids: [Vd] target id of each token that the head can draft, None where it drafts all of them.
        layers_guessed: whether the convention of its layer ids had to be guessed.
        options: fields of SpecConfig.
    """

    method = "eagle3"
    default_num_draft_tokens = 4
    option_names = ("aux_layers", "own_embedding", "norm_output")

    def __init__(
        self, model: Eagle3Model, target_ids: torch.Tensor | None, layers_guessed: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.model = model
        self.target_ids: torch.Tensor | None
        self.register_buffer("target_ids", target_ids, persistent=False)
        self._num_target_layers = 0  # until `bind`
        if layers_guessed:
            warnings.warn(
                f"this EAGLE-3 head does not say how it counts layers; hidden states {model.config.aux_layers} are "
                "read. If acceptance is low, try aux_layers=... one lower.",
                stacklevel=2,
            )

    @property
    def signals(self) -> TargetSignals:
        layers, last = self.model.config.aux_layers, self._num_target_layers
        # A head without fc reads what the target's own head reads; the others read the residual stream.
        return TargetSignals(hidden_states=layers or (last,), pre_norm_last=last in layers)

    def check_target(self, target: PreTrainedModel) -> None:
        config, theirs = self.model.config, target.config.get_text_config()
        for what, ours, wanted in (
            ("hidden size", config.target_hidden_size, theirs.hidden_size),
            ("vocabulary", config.vocab_size, theirs.vocab_size),
        ):
            if ours != wanted:
                raise ValueError(f"this EAGLE-3 head was made for a {what} of {ours} and the target's is {wanted}.")
        if max(config.aux_layers, default=0) > theirs.num_hidden_layers:
            raise ValueError(
                f"this EAGLE-3 head reads hidden state {max(config.aux_layers)} and the target has "
                f"{theirs.num_hidden_layers} layers; it was trained for another target."
            )
        for part, name, module, size in (
            ("embedding", "embed_tokens", target.get_input_embeddings(), "embedding_dim"),
            ("output head", "lm_head", target.get_output_embeddings(), "in_features"),
        ):
            found = None if module is None else width(module, size)
            if not hasattr(self.model, name) and found != config.hidden_size:
                raise ValueError(
                    f"this EAGLE-3 head has no {part}, and the target's is {found} wide where {config.hidden_size} "
                    "is needed."
                )
        self._num_target_layers = theirs.num_hidden_layers

    def start(self, request: DraftRequest) -> DraftSession:
        return Eagle3Session(self, request)


class Eagle3Session(DraftSession):
    """The head's cache, and the features of the text.

    Attributes:
        features: [B, columns, H] feature of each column that the target has processed.
        valid: entries of each row that are made from the target's hidden states.
        first: the first entry; those before it would need hidden states from before this call.
    """

    def __init__(self, drafter: Eagle3Drafter, request: DraftRequest) -> None:
        self.drafter, self.model, self.config = drafter, drafter.model, drafter.model.config
        self.request, self.rows = request, request.rows
        self.embedding: Any = getattr(self.model, "embed_tokens", request.embedding)
        self.head: Any = getattr(self.model, "lm_head", request.head)
        self.head_dtype = self.model.norm.weight.dtype  # what the head takes
        ids = drafter.target_ids
        self.target_ids = None if ids is None else ids.to(self.rows.ids.device)
        self.device = self.model.norm.weight.device
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)
        self.cache = RaggedCache(layer_config(self.config), request.max_columns)
        self.cache.begin_rows()
        self.slots = torch.arange(0, device=self.device)
        self.features = torch.empty(len(self.rows.widths), 0, self.config.hidden_size)
        self.valid = [0] * len(self.rows.widths)
        self.first = 0
        self.judged, self.drafted, self.accepted = 0, 0, 0  # verifications, and drafts of all rows

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        """Keep the features of the columns that the target has just processed, the rejected ones among them: the next
        verification processes those columns again."""
        assert signals is not None
        wanted = self.drafter.signals.hidden_states
        if self.head is self.request.head:  # it takes the target's states; its weights' dtype says nothing if packed
            self.head_dtype = signals.hidden_states[wanted[-1]].dtype
        states = [signals.hidden_states[i].to(self.device, self.model.norm.weight.dtype) for i in wanted]
        fused = self.model.fuse(states)
        rows, count = self.rows, fused.shape[1]
        starts = [width - 1 - len(new) for width, new in zip(rows.widths, rows.emitted, strict=True)]
        if self.features.shape[1] == 0:  # the prefill: every column of the prompt that was not in a cache before
            self.first = rows.widths[0] - len(rows.emitted[0]) - count
            starts = self.valid = [self.first] * len(starts)
        self._reserve(max(starts) + count)
        columns = torch.tensor(starts, device=self.device)[:, None] + torch.arange(count, device=self.device)
        self.features.scatter_(1, columns[..., None].expand(-1, -1, fused.shape[-1]), fused)
        self._check(rows)

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        rows, state = self.rows, torch.empty(0)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            nonlocal state
            if token is None:
                state = self._catch_up()
            else:
                offsets, host_offsets = rows.lengths + slot - 2, [width + slot - 2 for width in rows.widths]
                state = self._run(token, self.model.recurrent(state), offsets, host_offsets)
            return self._scores(state)

        return draw_chain(self.request, budget, verification, advance)

    def _catch_up(self) -> torch.Tensor:
        """Run the entries that the target has made possible; [B, 1, H] the state after the last one."""
        rows = self.rows
        missing = max(w - 1 - v for w, v, done in zip(rows.widths, self.valid, rows.finished, strict=True) if not done)
        host_offsets = [max(width - 1 - missing, 0) for width in rows.widths]
        offsets = (rows.lengths - 1 - missing).clamp_min(0).to(self.device)
        columns = offsets[:, None] + torch.arange(missing, device=self.device)
        features = self.features.gather(1, columns[..., None].expand(-1, -1, self.features.shape[-1]))
        state = self._run(rows.last_tokens(missing), features, offsets, host_offsets)
        self.valid = [width - 1 for width in rows.widths]
        return state[:, -1:]

    def _run(
        self, tokens: torch.Tensor, features: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int]
    ) -> torch.Tensor:
        """[B, m, H] states after entries (tokens, features) at the rows' offsets."""
        offsets, count = offsets.to(self.device), tokens.shape[1]
        self.cache.place(offsets, host_offsets, count)
        if len(self.slots) < self.cache.view:
            self.slots = torch.arange(self.cache.capacity, device=self.device)
        keys, entries = self.slots[: self.cache.view], offsets[:, None] + self.slots[:count]
        visible = (keys <= entries[..., None]) & (keys >= self.padding.clamp_min(self.first)[:, None, None])
        # An entry in a row's padding sees itself, so that no row of the attention is empty.
        visible |= keys == entries[..., None]
        distance = entries[..., None] - keys
        windows = self.config.windows
        masks = {w: (visible if w is None else visible & (distance < w))[:, None] for w in set(windows)}

        def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.update(keys, values, index)
            mask = masks[windows[index]]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

        tokens = tokens.clamp_max(self.request.vocab_size - 1)  # the placeholder of an image may lie beyond
        embedded = stored_embeddings(self.embedding, tokens).to(device=self.device, dtype=features.dtype)
        positions = (entries - self.padding[:, None]).clamp_min(0)
        return self.model(embedded, features, positions, attend)

    def _scores(self, state: torch.Tensor) -> torch.Tensor:
        """[B, 1, V] fp32 logits over the target's vocabulary, on the target's device."""
        normed = on_device_of(self.head, self.model.norm(state).to(self.head_dtype))  # the target's may live elsewhere
        logits = self.head(normed).to(self.rows.ids.device, torch.float32)
        if self.target_ids is None:
            return logits[..., : self.request.vocab_size]
        full = logits.new_full((*logits.shape[:2], self.request.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, logits)

    def _reserve(self, num_columns: int) -> None:
        missing = num_columns - self.features.shape[1]
        if missing > 0:
            old = self.features.to(self.device, self.model.norm.weight.dtype)
            self.features = nn.functional.pad(old, (0, 0, 0, max(missing, old.shape[1], 256)))

    def _check(self, rows: RowsView) -> None:
        """Warn once when a head accepts so little that it is probably not this target's.

        First tokens count: the share of all drafted tokens would fall with the length of the drafts.
        """
        if not any(rows.drafted):
            return
        self.judged += 1
        self.drafted += sum(drafted > 0 for drafted in rows.drafted)
        self.accepted += sum(accepted > 0 for accepted in rows.accepted)
        if self.judged == _CHECK_AFTER and self.accepted < _FLOOR * self.drafted:
            warnings.warn(
                f"this drafter looks mismatched: of {self.drafted} drafts, {self.accepted} had their first token "
                "accepted. Look for, in this order: another revision of the target, the layer ids (aux_layers=...), a "
                "chat template that the head was not trained on, a quantised target.",
                stacklevel=2,
            )
