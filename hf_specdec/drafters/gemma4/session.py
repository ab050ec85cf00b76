"""Drafting with a Gemma 4 assistant: a chain that attends over what the target keeps of the text.

The assistant has no cache. What a round sees of the target's is cut by a mask to the accepted text, so a rejection
leaves nothing behind, and rows of different lengths draft together.

Where a round's queries stand is a convention. transformers takes the index of the text's last token, which the target
has not read yet; the last token that it has read is one before. Windows are counted from the last token either way, as
in the target's own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...decoding.shared_kv import shared_layers
from ...verification import Draft, Verdict
from ..base import Drafter, DraftSession, Signals, TargetSignals
from ..common.chain import draw_chain
from ..common.embedding import num_rows, on_device_of
from ..common.features import MismatchCheck
from ..common.vocabulary import over_target_vocabulary
from ..request import DraftRequest
from .configuration import SLIDING
from .modeling import Gemma4Assistant, View

_CAUSES = (
    "the assistant of another Gemma 4 model, another revision of the target, a quantised target, where its queries "
    "stand (draft_position='token_before')"
)
_POSITIONS = {"last_token": 1, "token_before": 2}  # how far they are before the next token's position


class Gemma4Drafter(Drafter):
    """A Gemma 4 assistant.

    Args:
        model: the network.
        draft_position: where the queries of a round stand: at the text's "last_token", as in transformers, or at the
            "token_before" it, the last one that the target has read.
        recommended_length: draft length that its files name, None where they do not.
        options: fields of SpecConfig.
    """

    method = "gemma4"
    default_num_draft_tokens = 4
    option_names = ("draft_position",)

    def __init__(
        self,
        model: Gemma4Assistant,
        draft_position: str = "last_token",
        recommended_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.check_position(draft_position)
        self.model, self.draft_position = model, draft_position
        if recommended_length is not None:
            self.default_num_draft_tokens = recommended_length
        self._num_target_layers = 0  # until `bind`

    @staticmethod
    def check_position(draft_position: str) -> None:
        """Refuse what is no value of `draft_position`."""
        if not isinstance(draft_position, str) or draft_position not in _POSITIONS:
            raise ValueError(f"`draft_position` is {draft_position!r}; give 'last_token' or 'token_before'.")

    @property
    def signals(self) -> TargetSignals:
        return TargetSignals(hidden_states=(self._num_target_layers,), shared_kv=True)

    def check_target(self, target: PreTrainedModel) -> None:
        config, theirs, name = self.model.config, target.config.get_text_config(), "this Gemma 4 assistant"
        if not theirs.model_type.startswith("gemma4"):
            raise ValueError(
                f"{name} drafts from what a Gemma 4 model keeps of its text, and the target is a "
                f"{type(target).__name__}; give the Gemma 4 model that it was made for."
            )
        for what, ours, wanted in (
            ("hidden size", config.target_hidden_size, theirs.hidden_size),
            ("vocabulary", config.vocab_size, theirs.vocab_size),
        ):
            if ours != wanted:
                raise ValueError(f"{name} was made for a {what} of {ours} and the target's is {wanted}.")
        layers = shared_layers(theirs)
        for kind in config.kinds:
            if kind not in layers:
                raise ValueError(f"{name} reads {kind!r} layers and the target has none.")
            heads, size = config.num_key_value_heads[kind], config.head_dims[kind]
            layer = theirs.per_layer_config[layers[kind]]
            if (heads, size) != (layer.num_key_value_heads, layer.head_dim):
                raise ValueError(
                    f"{name} reads {heads} key-value heads of size {size} in {kind!r} layers, and the target has "
                    f"{layer.num_key_value_heads} of size {layer.head_dim}; it was made for another one."
                )
        self._num_target_layers = theirs.num_hidden_layers

    def start(self, request: DraftRequest) -> DraftSession:
        return Gemma4Session(self, request)


class Gemma4Session(DraftSession):
    """What the target's last forward has left."""

    def __init__(self, drafter: Gemma4Drafter, request: DraftRequest) -> None:
        self.drafter, self.model, self.config = drafter, drafter.model, drafter.model.config
        self.request, self.rows = request, request.rows
        self.device, self.dtype = self.model.norm.weight.device, self.model.norm.weight.dtype
        self.mismatch = MismatchCheck(self.rows, _CAUSES)

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        assert signals is not None and signals.shared_kv is not None
        (states,) = signals.hidden_states.values()
        before = states.shape[1] - verdict.tokens.shape[1]  # the prompt's columns but the last one at the prefill
        last = (before + verdict.num_accepted.clamp_min(0)).to(states.device)
        self.state = states[torch.arange(len(last), device=states.device), last][:, None].to(self.device, self.dtype)
        self.shared = signals.shared_kv
        self.mismatch.observe()

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        here = None if self.shared.rows is None else torch.tensor(self.shared.rows, device=self.device)
        state = self.state if here is None else self.state[here]
        views = self._views(here)

        def advance(token: torch.Tensor | None, slot: int) -> torch.Tensor:
            nonlocal state
            embedded = self._embedded(self.rows.last_tokens() if token is None else token)
            states = self.model(embedded if here is None else embedded[here], state, views)
            state = self.model.post_projection(states)
            return self._scores(states, here)

        return draw_chain(self.request, budget, verification, advance)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, 1, H] what tokens [B, 1] enter the target's first layer as."""
        embedding: Any = self.request.embedding
        tokens = tokens.clamp_max(num_rows(embedding) - 1)  # ids beyond the table, as placeholders of images may be
        return embedding(on_device_of(embedding, tokens)).to(self.device, self.dtype)

    def _scores(self, states: torch.Tensor, here: torch.Tensor | None) -> torch.Tensor:
        """[B, 1, V] fp32 logits over the target's vocabulary, on the target's device; zeros for rows that are gone."""
        logits = self.model.logits(states)
        if here is not None:
            spread = logits.new_zeros(len(self.rows.widths), *logits.shape[1:])
            spread[here] = logits
            logits = spread
        return over_target_vocabulary(logits, None, self.request.vocab_size, self.rows.ids.device)

    def _views(self, here: torch.Tensor | None) -> dict[str, View]:
        """What each kind of layer sees: the accepted text but its last token, in the target's cache.

        Args:
            here: the rows that the cache still holds, None for all.
        """
        rows, shared = self.rows, self.shared
        last, positions = shared.earlier + rows.lengths - 1, rows.positions - _POSITIONS[self.drafter.draft_position]
        last, positions = (x.to(self.device) if here is None else x.to(self.device)[here] for x in (last, positions))
        running = [w for w, done in zip(rows.widths, rows.finished, strict=True) if not done]
        end, least = (shared.earlier + width - 1 for width in (max(running), min(running)))  # columns of last tokens
        views = {}
        for kind in set(self.config.kinds):
            layer, window = shared.layers[kind], self.config.window if kind == SLIDING else None
            first = layer.first if window is None else max(layer.first, least - window + 1)
            part = slice(first - layer.first, end - layer.first)
            keys, values = (x[:, :, part].to(self.device, self.dtype) for x in (layer.keys, layer.values))
            # Rows in step and without padding see all that was cut out for them.
            sees_all = least == end and shared.padding is None
            mask = None if sees_all else self._mask(torch.arange(first, end, device=self.device), last, window)
            rotation = self.model.rotary(self.state, positions.clamp_min(0)[:, None], kind)
            views[kind] = View(keys, values, mask, rotation)
        return views

    def _mask(self, columns: torch.Tensor, last: torch.Tensor, window: int | None) -> torch.Tensor:
        """[b, 1, 1, slots] True at the columns [slots] of accepted text before the rows' last tokens [b]."""
        visible = columns < last[:, None]
        if window is not None:
            visible &= last[:, None] - columns < window
        if (padding := self.shared.padding) is not None:
            padding = padding.to(self.device)
            holds = columns < padding.shape[1]
            visible &= ~(padding[:, columns.clamp_max(padding.shape[1] - 1)] & holds)
        # A row that has finished may see nothing, and no row of the attention must be empty.
        return (visible | ~visible.any(dim=-1, keepdim=True))[:, None, None]
