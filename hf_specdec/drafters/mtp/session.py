"""Drafting with MTP layers: a chain from the target's last hidden state.

Entry t of layer i (see modeling.py) is written at slot t of that layer's cache. Entries whose tokens are all committed
and whose states come from the target's stay. A layer's last entries may hold drafted tokens, and past the last layer
the states are its own: all of these are written over in the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ...verification import Draft, Verdict
from ..base import Drafter, DraftSession, Signals, TargetSignals
from ..common.chain import draw_chain
from ..common.embedding import head_logits, rows_of_head, stored_embeddings
from ..common.features import MismatchCheck, TargetFeatures
from ..common.vocabulary import over_target_vocabulary
from ..request import DraftRequest
from .cache import MtpCache
from .modeling import MtpModel

_CAUSES = (
    "MTP layers of another revision of the target, a fine-tuned target whose MTP layers were not trained on, the "
    "family's row (order of the projection, state that is carried on), a quantised target"
)


class MtpDrafter(Drafter):
    """A target's MTP layers.

    Args:
        model: the layers.
        target_ids: [Vd] ids of the tokens that they draft, None for all. Less of the output head is read then, which is
            most of what a draft costs where the vocabulary is large (FR-Spec, arXiv:2502.14856).
        options: fields of SpecConfig.
    """

    method = "mtp"
    default_num_draft_tokens = 3
    option_names = ("draft_vocab",)

    def __init__(self, model: MtpModel, target_ids: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.model = model
        self.target_ids: torch.Tensor | None
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.default_num_draft_tokens = max(type(self).default_num_draft_tokens, len(model.layers))

    @property
    def signals(self) -> TargetSignals:
        return TargetSignals((self.model.num_target_layers,), pre_norm_last=self.model.family.target_state == "raw")

    def check_target(self, target: PreTrainedModel) -> None:
        theirs, model = target.config.get_text_config(), self.model
        for what, ours, wanted in (
            ("hidden size", model.hidden_size, theirs.hidden_size),
            ("vocabulary", model.vocab_size, theirs.vocab_size),
            ("number of layers", model.first_layer, theirs.num_hidden_layers),
        ):
            if ours != wanted:
                raise ValueError(f"these MTP layers were made for a {what} of {ours} and the target's is {wanted}.")
        if self.target_ids is not None:
            for layer in model.layers:
                rows_of_head(getattr(layer, "lm_head", target.get_output_embeddings()), self.target_ids[:1])
        self._check_runs(target)

    @torch.no_grad()
    def _check_runs(self, target: PreTrainedModel) -> None:
        """Run one entry: some decoder layers need more of their model than masks, positions and a cache."""
        model, layer = self.model, cast(Any, self.model.layers[0])
        state = model.reference.new_zeros(1, 1, model.state_size)
        embedded, first = state[..., : model.hidden_size], torch.zeros(1, device=state.device, dtype=torch.long)
        cache = MtpCache(model.num_cached, 1, first)
        cache.place(first, [0], 1)
        try:
            model.run(0, embedded, state, first[None], state.new_zeros(1, 1, 1, 1), cache)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            raise ValueError(
                f"MTP layers of {type(target).__name__} are not served: its {type(layer.blocks[0]).__name__} cannot be "
                f"run by itself ({type(error).__name__}: {error})."
            ) from error

    def start(self, request: DraftRequest) -> DraftSession:
        return MtpSession(self, request)


class MtpSession(DraftSession):
    """The layers' caches, and the target's states of the text."""

    def __init__(self, drafter: MtpDrafter, request: DraftRequest) -> None:
        self.model, self.request, self.rows = drafter.model, request, request.rows
        self.num_layers, self.target_ids = len(self.model.layers), drafter.target_ids
        heads: list[Any] = [getattr(layer, "lm_head", request.head) for layer in self.model.layers]
        if self.target_ids is not None:
            parts = {head: rows_of_head(head, self.target_ids) for head in heads}
            heads = [parts[head] for head in heads]
        self.heads = heads
        self.device, self.dtype = self.model.reference.device, self.model.reference.dtype
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)
        self.features = TargetFeatures(self.rows, self.model.state_size, self.device, self.dtype)
        self.cache = MtpCache(self.model.num_cached, request.max_columns, self.padding)
        self.slots = torch.arange(0, device=self.device)
        self.mismatch = MismatchCheck(self.rows, _CAUSES)

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        assert signals is not None
        is_prefill = self.features.values.shape[1] == 0
        state = signals.hidden_states[self.model.num_target_layers].flatten(2)  # streams may have an axis of their own
        self.features.add(state.to(self.device, self.dtype))
        if is_prefill:  # columns from before this call have no features
            self.cache.first = self.padding.clamp_min(self.features.first)
        self.mismatch.observe()

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        # Entries with a token that was only drafted when they were run, of layers after the first, are run again.
        missing = self.features.take(again=self.num_layers - 1)
        states = [piece.features for piece in missing]
        drafted: list[torch.Tensor] = []

        def run_layer(index: int) -> torch.Tensor:
            """[B, 1, H] what layer `index` makes of the last of its missing entries."""
            for number, piece in enumerate(missing):
                ids = self.rows.ids
                columns = (piece.columns + 1 + index).clamp_max(ids.shape[1] - 1).to(ids.device)
                tokens = ids.gather(1, columns).clamp_min(0)
                read = states[number] if self.model.family.chained else piece.features
                normed, states[number] = self._run(index, tokens, read, piece.offsets, piece.host_offsets)
            return normed[:, -1:]

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            if token is not None:
                drafted.append(token)
            if slot < self.num_layers:
                if drafted:
                    self.rows.place_draft(torch.cat(drafted, dim=1))
                return self._scores(slot, run_layer(slot))
            assert token is not None
            last, ahead = self.num_layers - 1, slot - self.num_layers - 1
            offsets, host_offsets = self.rows.lengths + ahead, [width + ahead for width in self.rows.widths]
            normed, states[-1] = self._run(last, token, states[-1][:, -1:], offsets, host_offsets)
            return self._scores(last, normed)

        draft = draw_chain(self.request, budget, verification, advance)
        for index in range(max(budget), self.num_layers):  # a short draft must not leave gaps in their caches
            run_layer(index)
        return draft

    def _run(
        self, index: int, tokens: torch.Tensor, states: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What layer `index` makes of entries (tokens [B, m], states [B, m, H]) at the rows' offsets."""
        offsets, count = offsets.to(self.device), tokens.shape[1]
        self.cache.place(offsets, host_offsets, count)
        if len(self.slots) < self.cache.view:
            self.slots = torch.arange(self.cache.capacity, device=self.device)
        keys, entries = self.slots[: self.cache.view], offsets[:, None] + self.slots[:count]
        visible = (keys <= entries[..., None]) & (keys >= self.cache.first[:, None, None])
        if (window := self.model.window(index)) is not None:
            visible &= entries[..., None] - keys < window
        # An entry in a row's padding sees itself, so that no row of the attention is empty.
        mask = (visible | (keys == entries[..., None]))[:, None]
        if self.model.config._attn_implementation == "eager":
            zeros = torch.zeros(mask.shape, device=self.device, dtype=self.dtype)
            mask = zeros.masked_fill_(~mask, torch.finfo(self.dtype).min)
        embedding: Any = getattr(self.model.layers[index], "embed_tokens", self.request.embedding)
        embedded = stored_embeddings(embedding, tokens).to(self.device, self.dtype)
        positions = (entries - self.padding[:, None] + 1 + index).clamp_min(0)  # of the tokens
        return self.model.run(index, embedded, states, positions, mask, self.cache)

    def _scores(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        """[B, m, V] fp32 logits over the target's vocabulary, on the target's device."""
        logits = head_logits(self.heads[index], normed)
        return over_target_vocabulary(logits, self.target_ids, self.request.vocab_size, self.rows.ids.device)
