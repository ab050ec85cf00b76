"""Drafting with an EAGLE-3 head (Li et al. 2025): a chain from the target's own hidden states.

Entry i holds token i + 1 and the feature of token i. Entries of committed tokens are made from the target's hidden
states. Where the head drafts on, its own last state takes their place, or a mask that of the token and the feature
(P-EAGLE), so those entries are written over as soon as the target has been there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...decoding.cache import RaggedCache
from ...verification import Draft, Verdict
from ..base import Drafter, DraftSession, Signals, TargetSignals
from ..common.chain import Advance, draw_chain
from ..common.embedding import head_logits, num_rows, stored_embeddings, width
from ..common.features import MismatchCheck, Missing, TargetFeatures
from ..common.rotary import layer_config
from ..common.vocabulary import over_target_vocabulary
from ..request import DraftRequest
from .modeling import Eagle3Model

_CAUSES = (
    "another revision of the target, the layer ids (aux_layers=...), a chat template that the head was not trained on, "
    "a quantised target"
)


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
        if model.config.num_parallel_tokens is not None:
            self.default_num_draft_tokens = self.max_num_draft_tokens = model.config.num_parallel_tokens
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
        embedding: Any = getattr(self.model, "embed_tokens", target.get_input_embeddings())
        if config.mask_token_id is not None and config.mask_token_id >= num_rows(embedding):
            raise ValueError(
                f"this P-EAGLE head masks with token {config.mask_token_id} and the embedding has "
                f"{num_rows(embedding)} rows; it was trained for another target, or on a resized embedding."
            )
        self._num_target_layers = theirs.num_hidden_layers

    def start(self, request: DraftRequest) -> DraftSession:
        return Eagle3Session(self, request)


class Eagle3Session(DraftSession):
    """The head's cache, and the features of the text."""

    def __init__(self, drafter: Eagle3Drafter, request: DraftRequest) -> None:
        self.drafter, self.model, self.config = drafter, drafter.model, drafter.model.config
        self.request, self.rows = request, request.rows
        self.embedding: Any = getattr(self.model, "embed_tokens", request.embedding)
        self.head: Any = getattr(self.model, "lm_head", request.head)
        self.device = self.model.norm.weight.device
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)
        self.cache = RaggedCache(layer_config(self.config), request.max_columns)
        self.cache.begin_rows()
        self.slots = torch.arange(0, device=self.device)
        self.features = TargetFeatures(self.rows, self.config.hidden_size, self.device, self.model.norm.weight.dtype)
        self.mismatch = MismatchCheck(self.rows, _CAUSES)
        if self.config.mask_token_id is not None:
            self.mask_feature = self.model.mask_feature()

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        assert signals is not None
        wanted = self.drafter.signals.hidden_states
        states = [signals.hidden_states[i].to(self.device, self.model.norm.weight.dtype) for i in wanted]
        self.features.add(self.model.fuse(states))
        self.mismatch.observe()

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        is_parallel = self.config.mask_token_id is not None
        advance = self._all_at_once(max(budget)) if is_parallel else self._one_by_one()
        return draw_chain(self.request, budget, verification, advance)

    def _one_by_one(self) -> Advance:
        """A forward for each token, from the token and the state before it."""
        rows, state = self.rows, torch.empty(0)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            nonlocal state
            if token is None:
                state = self._catch_up()
            else:
                offsets, host_offsets = rows.lengths + slot - 2, [width + slot - 2 for width in rows.widths]
                state = self._run(token, self.model.recurrent(state), offsets, host_offsets)
            return self._scores(state)

        return advance

    def _all_at_once(self, num_tokens: int) -> Advance:
        """One forward for all tokens: the last entry guesses the first one, each masked entry behind it the next."""
        scores = torch.empty(0)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            nonlocal scores
            if token is None:
                scores = self._scores(self._catch_up(num_masks=num_tokens - 1))
            return scores[:, slot : slot + 1]

        return advance

    def _catch_up(self, num_masks: int = 0) -> torch.Tensor:
        """Run the entries that the target has made possible and masked ones behind them; [B, 1 + num_masks, H] the
        states after the last possible one and after the masked ones."""
        *earlier, last = self.features.take()
        for missing in earlier:
            self._run(self._tokens(missing), missing.features, missing.offsets, missing.host_offsets)
        tokens, features = self._tokens(last), last.features
        if num_masks:
            tokens = F.pad(tokens, (0, num_masks), value=self.config.mask_token_id)
            features = torch.cat([features, self.mask_feature.expand(len(features), num_masks, -1)], dim=1)
        return self._run(tokens, features, last.offsets, last.host_offsets)[:, -1 - num_masks :]

    def _tokens(self, missing: Missing) -> torch.Tensor:
        """[B, m] the tokens of entries: those after their columns."""
        return self.rows.ids.gather(1, (missing.columns + 1).to(self.rows.ids.device))

    def _run(
        self, tokens: torch.Tensor, features: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int]
    ) -> torch.Tensor:
        """[B, m, H] states after entries (tokens, features) at the rows' offsets."""
        offsets, count = offsets.to(self.device), tokens.shape[1]
        self.cache.place(offsets, host_offsets, count)
        if len(self.slots) < self.cache.view:
            self.slots = torch.arange(self.cache.capacity, device=self.device)
        keys, entries = self.slots[: self.cache.view], offsets[:, None] + self.slots[:count]
        visible = (keys <= entries[..., None]) & (keys >= self.padding.clamp_min(self.features.first)[:, None, None])
        # An entry in a row's padding sees itself, so that no row of the attention is empty.
        visible |= keys == entries[..., None]
        distance = entries[..., None] - keys
        windows = self.config.windows
        masks = {w: (visible if w is None else visible & (distance < w))[:, None] for w in set(windows)}

        def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.update(keys, values, index)
            mask = masks[windows[index]]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

        embedded = stored_embeddings(self.embedding, tokens).to(device=self.device, dtype=features.dtype)
        positions = (entries - self.padding[:, None]).clamp_min(0)
        return self.model(embedded, features, positions, attend)

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        """[B, m, V] fp32 logits over the target's vocabulary, on the target's device."""
        device, vocab_size = self.rows.ids.device, self.request.vocab_size
        logits = head_logits(self.head, self.model.norm(states))
        return over_target_vocabulary(logits, self.drafter.target_ids, vocab_size, device)
