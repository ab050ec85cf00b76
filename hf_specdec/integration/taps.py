"""What is read off a model's forwards besides its logits: what the drafter needs, and what the call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..decoding.outputs import States
from ..drafters.base import Signals, TargetSignals
from .encoder_decoder import text_name


class Taps:
    """Reads hidden states and attentions of a model.

    Args:
        model: the model.
        wanted: what the drafter needs from each forward.
        returned: what the call returns; "hidden_states" and "attentions" are read here.
        spread: what a module gave -> the same for all rows of the call, where a forward leaves some out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        wanted: TargetSignals,
        returned: frozenset[str],
        spread: Callable[[torch.Tensor], torch.Tensor] = lambda state: state,
    ) -> None:
        self.model, self.wanted, self.spread = model, wanted, spread
        self.returned = returned & {"hidden_states", "attentions"}
        self.last_state: torch.Tensor | None = None
        self.hook: Any = None

    def inputs(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a forward, with a request for what is read."""
        if not self.wanted.hidden_states or model_kwargs.get("output_hidden_states"):
            return model_kwargs
        return {**model_kwargs, "output_hidden_states": list(self.wanted.hidden_states)}

    def prefill(self, run: Callable[[], Any]) -> tuple[Any, Signals | None]:
        """Run the prompt; (output, signals of every column).

        Args:
            run: () -> output of the last forward; there are several where `prefill_chunk_size` cuts the prompt.
        """
        if self.wanted.pre_norm_last:
            self.hook = self._watch_last_layer()
        parts: list[Signals | None] = []
        keep = _in_this_thread(lambda model, inputs, output: parts.append(self.signals(output)))
        watch = self.model.register_forward_hook(keep)
        try:
            output = run()
        finally:
            watch.remove()
        return output, _joined([part for part in parts if part is not None])

    def signals(self, output: Any, num_rows: int | None = None) -> Signals | None:
        """The signals of the last `num_rows` tokens of a forward, by default of all."""
        if not self.wanted.hidden_states:
            return None
        states = {index: output.hidden_states[index] for index in self.wanted.hidden_states}
        if self.last_state is not None:
            states[self.num_layers], self.last_state = self.spread(self.last_state), None
        if num_rows is not None:
            states = {index: state[:, -num_rows:] for index, state in states.items()}
        return Signals(states)

    def states(self, output: Any, num_rows: int | None = None) -> States | None:
        """What the call returns of the last `num_rows` tokens of a forward, by default of all."""
        if not self.returned:
            return None
        hidden_states, attentions = (
            output.get(text_name(self.model, name)) if name in self.returned else None
            for name in ("hidden_states", "attentions")
        )
        if num_rows is not None and hidden_states is not None:
            hidden_states = tuple(state[:, -num_rows:] for state in hidden_states)
        if num_rows is not None and attentions is not None:
            attentions = tuple(attention[:, :, -num_rows:] for attention in attentions)
        return States(hidden_states, attentions)

    def close(self) -> None:
        """Leave the model as it was."""
        if self.hook is not None:
            self.hook.remove()

    @property
    def num_layers(self) -> int:
        return self.model.config.get_text_config().num_hidden_layers

    def _watch_last_layer(self) -> Any:
        """Keep the last layer's output of each forward: transformers gives it after the final norm only."""
        decoder = self.model.get_decoder()
        stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers]
        if not stacks:
            raise ValueError(f"{type(self.model).__name__} has no list of its layers, so the last one cannot be read.")

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self.last_state = output[0] if isinstance(output, tuple) else output

        return stacks[0][-1].register_forward_hook(_in_this_thread(keep))


def _in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, for forwards of the thread that sets it: the model may serve other calls beside this one."""
    thread = threading.get_ident()

    def guarded(*arguments: Any) -> None:
        if threading.get_ident() == thread:
            hook(*arguments)

    return guarded


def _joined(parts: list[Signals]) -> Signals | None:
    """The signals of consecutive parts of a text as one."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    indices = parts[0].hidden_states
    return Signals({index: torch.cat([part.hidden_states[index] for part in parts], dim=1) for index in indices})
