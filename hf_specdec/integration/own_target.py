"""A target that keeps the cache which the model makes for itself: one row, through the model's own preparation.

It serves what cannot run over ragged rows: recurrent and convolution layers, positions taken from the cache's length,
masks of a model's own, attention backends without explicit masks. Rejected tokens are forgotten in one of three ways:

* crop: every layer can be cut back;
* replay: some layer's state cannot. The state from before a verification is kept; where not all of its draft was
  accepted, the state is put back and the accepted tokens are run again in front of the next verification's rows;
* stepwise: the model gives wrong logits for several tokens at once on a filled cache, so nothing is drafted for it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..decoding.outputs import States
from ..decoding.ragged_model import why_not_ragged
from ..decoding.rollback import Snapshot
from ..decoding.rows import Rows
from ..decoding.shared_kv import own_kv
from ..drafters.base import Signals, TargetSignals
from ..scheduling import Governor
from ..verification import Draft
from .compat import TOKEN_TYPES, new_token_types
from .encoder_decoder import text_layers, text_name
from .images import image_layers
from .taps import Taps


def why_not_own(model: PreTrainedModel) -> str | None:
    """Why `model` cannot be served over its own cache, as far as its source tells; None where nothing does."""
    if "cache" not in inspect.signature(model.forward).parameters:
        return "its forward takes no `cache`"
    return None


def why_not_served(model: PreTrainedModel) -> str | None:
    """Why no path serves `model`, as far as its source tells; None where one may."""
    reason = why_not_ragged(model)
    return reason and why_not_own(model)


class OwnModel:
    """A model, one row of text, and the model's own cache of it.

    Args:
        model: a model for which `why_not_own` has nothing to say.
        prompt: [1, W] the prompt, left padding included.
        generation_config: of the call.
        model_kwargs: what `generate` prepared for the prompt: mask, positions, the cache and the rest.
        rollback: "crop", "replay" or "stepwise".

    Attributes:
        filled: columns of the text that the cache has read, rejected drafts among them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        rollback: str,
    ) -> None:
        self.model, self.prompt, self.generation_config = model, prompt, generation_config
        self.kwargs, self.rollback = model_kwargs, rollback
        self.filled = 0
        self.snapshot: tuple[int, Snapshot] | None = None  # with the columns that it has read
        self.image_layers = image_layers(model)

    @property
    def cache(self) -> Any:
        return self.kwargs.get("cache")

    def prefill(self) -> Any:
        """Run the prompt as plain decoding does; the model's output."""
        output = self.model._prefill(self.prompt, self.generation_config, dict(self.kwargs))
        self._keep_cache(output)
        self.filled = self.prompt.shape[1]
        if self.rollback == "crop":
            self.cache.activate_past_recording()  # sliding and convolution layers keep what they might go back to
        return output

    def pending(self, num_right: int) -> int:
        """Accepted tokens that have to be run again, given that the first `num_right` columns run are the text's."""
        if self.filled == num_right or self.snapshot is None:
            return 0
        return num_right - self.snapshot[0]

    def forward(self, ids: torch.Tensor, num_drafted: int) -> Any:
        """Run what the cache has not read of a text and a draft behind it.

        Args:
            ids: [1, columns] the text, whose last token has not been run, and the draft.
            num_drafted: tokens of the draft.

        Returns:
            The model's output; its last `num_drafted + 1` positions are those of the text's last token and the draft.
        """
        self.go_back(ids.shape[1] - num_drafted - 1)
        if self.rollback == "replay" and num_drafted > 0 and self.snapshot is None:
            self.snapshot = self.filled, Snapshot(self.cache)
        output = self._run(ids, num_drafted + 1)
        self.filled = ids.shape[1]
        return output

    def go_back(self, num_right: int) -> None:
        """Forget everything that was read beyond the first `num_right` columns."""
        rejected = self.filled - num_right
        if self.rollback == "crop":
            self._crop(rejected)  # cuts back what was kept for this, too, so it is called for 0 as well
            self.filled = num_right
        elif rejected > 0:
            assert self.snapshot is not None
            self.filled, snapshot = self.snapshot
            self.kwargs["cache"] = snapshot.restore()
        else:
            self.snapshot = None

    def _crop(self, num_columns: int) -> None:
        """Cut the text's last columns off the cache."""
        if not self.image_layers:
            self.cache.crop(-num_columns)
            return
        for index, layer in enumerate(self.cache.layers):
            if index not in self.image_layers:
                layer.crop(-num_columns)

    def settle(self, ids: torch.Tensor) -> Any:
        """The cache as plain decoding leaves it after the text `ids` [1, columns]: without the last token."""
        self.go_back(ids.shape[1] - 1)
        if self.filled < ids.shape[1] - 1:
            self._run(ids[:, :-1], 1)
        if self.rollback == "crop":
            for layer in text_layers(self.cache):
                if hasattr(layer, "record_past"):
                    layer.record_past = False
        return self.cache

    def _run(self, ids: torch.Tensor, num_logits: int) -> Any:
        """One forward over the columns of `ids` that the cache has not read."""
        total, num_tokens = ids.shape[1], ids.shape[1] - self.filled
        kwargs = dict(self.kwargs)
        position_ids, attention_mask = text_name(self.model, "position_ids"), text_name(self.model, "attention_mask")
        if (positions := kwargs.get(position_ids)) is not None:
            more = torch.arange(1, total - positions.shape[-1] + 1, device=positions.device)
            more = positions[..., -1:] + more
            kwargs[position_ids] = torch.cat([positions, more], dim=-1)
        if (mask := kwargs.get(attention_mask)) is not None:
            ones = mask.new_ones(mask.shape[0], total - mask.shape[1])
            kwargs[attention_mask] = torch.cat([mask, ones], dim=-1)
        for key in TOKEN_TYPES:
            if (types := kwargs.get(key)) is not None:
                more = new_token_types(key, types).expand(-1, total - types.shape[1])
                kwargs[key] = torch.cat([types, more], dim=1)
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=num_tokens, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        output = self.model(**inputs, return_dict=True)
        self._keep_cache(output)
        return output

    def _keep_cache(self, output: Any) -> None:
        """Some models make their cache themselves, at the first forward."""
        if output.get("cache") is not None:
            self.kwargs["cache"] = output.cache


class OwnTarget:
    """decoding's Target over an OwnModel.

    Args:
        own: the model with its row.
        wanted: what the drafter needs from each forward.
        returned: what the call returns.
    """

    cache = "own"

    def __init__(self, own: OwnModel, wanted: TargetSignals, returned: frozenset[str] = frozenset()) -> None:
        self.own, self.rollback, self.device = own, own.rollback, own.prompt.device
        self.taps = Taps(own.model, wanted, returned)
        own.kwargs = self.taps.inputs(own.kwargs)
        self.states: States | None = None

    def prefill(self) -> tuple[torch.Tensor, Signals | None]:
        output, signals = self.taps.prefill(self.own.prefill)
        self.states = self.taps.states(output)
        return self._logits(output, 1), self._with_shared_kv(signals)

    def verify(self, rows: Rows, draft: Draft) -> tuple[torch.Tensor, Signals | None]:
        ids = torch.cat([self._text(rows), draft.tokens.clamp_min(0)], dim=1)
        num_rows = draft.num_slots + 1
        output = self.own.forward(ids, draft.num_slots)
        self.states = self.taps.states(output, num_rows)
        return self._logits(output, num_rows), self._with_shared_kv(self.taps.signals(output, num_rows))

    def read_again(self, rows: Rows, first: int, end: int) -> torch.Tensor:
        at_once = 1 if self.rollback == "stepwise" else end - first
        logits, states = [], []
        for column in range(first, end, at_once):
            output = self.own.forward(rows.ids[:, : column + at_once], at_once - 1)
            logits.append(self._logits(output, at_once))
            states.append(self.taps.states(output, at_once))
        self.states = _in_a_row(states)
        return torch.cat(logits, dim=1)

    def pending(self, rows: Rows) -> int:
        """Accepted tokens that the next verification has to run again."""
        return self.own.pending(rows.widths[0] - 1)

    def filled_cache(self, rows: Rows) -> Any:
        """The cache as plain decoding leaves it."""
        return self.own.settle(self._text(rows))

    def close(self) -> None:
        """Leave the model as it was."""
        self.taps.close()

    def drop(self) -> None:
        """Free the cache; nothing can be run afterwards."""
        self.own.kwargs["cache"] = self.own.snapshot = None

    def _with_shared_kv(self, signals: Signals | None) -> Signals | None:
        if not self.taps.wanted.shared_kv:
            return signals
        own, mask = self.own, self.own.kwargs.get("attention_mask")
        shared = own_kv(own.cache, own.model.config.get_text_config(), own.filled, mask)
        return Signals(signals.hidden_states if signals else {}, shared)

    @staticmethod
    def _text(rows: Rows) -> torch.Tensor:
        return rows.ids[:, : rows.widths[0]]

    def _logits(self, output: Any, num_rows: int) -> torch.Tensor:
        return output.logits[:, -num_rows:].to(self.device, torch.float32)


def _in_a_row(parts: list[States | None]) -> States | None:
    """The hidden states of consecutive forwards as of one."""
    layers = [part.hidden_states for part in parts if part is not None and part.hidden_states is not None]
    return States(tuple(torch.cat(layer, dim=1) for layer in zip(*layers, strict=True)), None) if layers else None


class ReplayGovernor(Governor):
    """Draft lengths where accepted tokens may have to be run again.

    Pending tokens would pile up while drafts go on being rejected. Beyond `max_tokens` of them, one round goes without
    a draft: it runs them, emits a token and leaves nothing pending. So no forward has more than
    `max_tokens` pending rows, the last token and `max_tokens` drafted ones.

    Args:
        target, rows: of the call.
        num_tokens, max_tokens, adaptive: as in Governor.
    """

    def __init__(self, target: OwnTarget, rows: Rows, num_tokens: int, max_tokens: int, adaptive: bool) -> None:
        super().__init__(num_tokens, max_tokens, adaptive)
        self.target, self.rows, self.forced = target, rows, False

    def next_length(self) -> int:
        self.forced = self.target.pending(self.rows) > self.max_tokens
        return 0 if self.forced else super().next_length()

    def observe(self, drafted: list[int], accepted: list[int], draft_time: float, verify_time: float) -> None:
        if not self.forced:  # such a round costs more than a plain step, and says nothing about one
            super().observe(drafted, accepted, draft_time, verify_time)


def fresh_cache(model: PreTrainedModel) -> Any:
    """The cache that `generate` would make for one row; None where the model makes its own."""
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, 1, max_cache_length=0)
    return kwargs.get("cache")
