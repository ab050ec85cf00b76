"""Decoding many texts at once with one model, keeping the states that drafters are trained on.

A finished row is refilled with the next prompt, so that forwards are over a full batch. The states of a token are
those of the forward that processed it: nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedModel

from ..decoding.cache import RaggedLayer
from ..decoding.ragged_model import RaggedModel, why_not_ragged

_LOOP_CHECK = 16  # steps between two looks for loops
_REFILL = 8  # rows that wait for prompts before a prefill runs


@dataclass
class Prompt:
    """What to decode from.

    Attributes:
        index: the caller's number for it.
        ids: token ids, not empty.
        temperature: 0 for greedy.
        max_new_tokens: most tokens to add.
    """

    index: int
    ids: list[int]
    temperature: float
    max_new_tokens: int


@dataclass
class Text:
    """A decoded text.

    Attributes:
        prompt: where it started.
        ids: prompt and answer, n tokens.
        ended: whether the model ended it with one of its eos tokens, which is then the last id.
        looped: whether it was cut because it went round in circles.
        states: [n, T, H] the hidden states asked for, on the CPU; zeros for the last token, which no forward has
            processed. None where none were asked for.
    """

    prompt: Prompt
    ids: list[int]
    ended: bool = False
    looped: bool = False
    states: torch.Tensor | None = None

    @property
    def answer(self) -> list[int]:
        return self.ids[len(self.prompt.ids) :]


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Iterator[Prompt],
    *,
    num_rows: int,
    max_length: int,
    eos: set[int],
    hidden_states: tuple[int, ...] = (),
    seed: int = 0,
) -> Iterator[Text]:
    """Texts in the order in which they end.

    Args:
        model: a causal model whose rows may have different lengths.
        prompts: taken as rows become free; each shorter than `max_length`.
        num_rows: texts decoded side by side.
        max_length: most tokens of a text, its prompt included.
        eos: ids that end a text.
        hidden_states: which to keep; index e is the residual stream entering layer e, and the number of layers is the
            final state after the last norm.
        seed: of the sampling.

    Raises:
        ValueError: the model cannot run over rows of different lengths, or a prompt is too long.
    """
    if reason := why_not_ragged(model):
        raise ValueError(f"target: {type(model).__name__} cannot decode rows of different lengths: {reason}.")
    rows = _Rows(model, num_rows, max_length, eos, hidden_states, seed)
    while rows.refill(prompts):
        yield from rows.take_finished()
        rows.step()


class _Rows:
    """The texts in progress; a row without one stands still at length 1."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int,
        max_length: int,
        eos: set[int],
        hidden_states: tuple[int, ...],
        seed: int,
    ) -> None:
        device = model.device
        self.model, self.max_length, self.eos, self.hidden_states = model, max_length, eos, hidden_states
        self.wanted = {"output_hidden_states": list(hidden_states)} if hidden_states else {}
        self.batch = RaggedModel(model, None, num_rows, max_length)
        self.batch.cache.begin_rows()
        width = len(hidden_states), model.config.get_text_config().hidden_size
        self.states = torch.zeros(num_rows, max_length, *width, dtype=model.dtype, device=device)
        self.texts: list[Text | None] = [None] * num_rows
        self.last = torch.zeros(num_rows, 1, dtype=torch.long, device=device)  # [B, 1] token to process next
        self.lengths = [1] * num_rows
        self.temperatures = torch.zeros(num_rows, device=device)
        self.noise = torch.Generator(device).manual_seed(seed)
        self.num_steps = 0

    def refill(self, prompts: Iterator[Prompt]) -> bool:
        """Start new texts where enough rows are free; whether any text is in progress."""
        free = [row for row, text in enumerate(self.texts) if text is None]
        if len(free) >= min(_REFILL, len(self.texts)):
            new = list(islice(prompts, len(free)))
            new.sort(key=lambda prompt: len(prompt.ids))  # alike lengths share a prefill: little padding
            for start in range(0, len(new), _REFILL):
                part = new[start : start + _REFILL]
                self._prefill(part, free[start : start + len(part)])
        return any(text is not None for text in self.texts)

    def take_finished(self) -> Iterator[Text]:
        """The texts that are over; their rows become free."""
        for row, text in enumerate(self.texts):
            if text is None or not self._is_over(text):
                continue
            if self.hidden_states:
                text.states = self.states[row, : len(text.ids)].to("cpu", copy=True)  # the row is used again
                text.states[-1] = 0
            self.texts[row], self.lengths[row] = None, 1
            yield text

    def step(self) -> None:
        """One more token for each text."""
        if all(text is None for text in self.texts):
            return
        self.num_steps += 1
        offsets = torch.tensor(self.lengths, device=self.model.device) - 1
        host_offsets = [length - 1 for length in self.lengths]
        output = self.batch.forward(self.last, offsets, host_offsets, offsets[:, None], **self.wanted)
        if self.hidden_states:
            kept = torch.stack([output.hidden_states[i][:, 0] for i in self.hidden_states], dim=1)
            self.states[torch.arange(len(offsets), device=offsets.device), offsets] = kept
        self.last = self._choose(output.logits[:, -1], self.temperatures)
        for row, (text, token) in enumerate(zip(self.texts, self.last.flatten().tolist(), strict=True)):
            if text is not None:
                text.ids.append(token)
                self.lengths[row] += 1

    def _prefill(self, prompts: list[Prompt], rows: list[int]) -> None:
        """Start `prompts` in `rows`.

        They are padded on the right: a causal model's tokens do not see what comes after them, and the slots of the
        padding are written over as the row grows.
        """
        device, longest = self.model.device, max(len(prompt.ids) for prompt in prompts)
        if longest >= self.max_length:
            raise ValueError(f"prompts: one has {longest} tokens, and max_length={self.max_length} leaves it no room.")
        part = RaggedModel(self.model, None, len(prompts), longest)
        ids = torch.tensor([prompt.ids + [0] * (longest - len(prompt.ids)) for prompt in prompts], device=device)
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        output = self.model(
            input_ids=ids, position_ids=positions, cache=part.cache, use_cache=True, return_dict=True, **self.wanted
        )
        self.batch.cache.reserve(longest)
        for source, layer in zip(part.cache.layers, self.batch.cache.layers, strict=True):
            if not isinstance(layer, RaggedLayer):
                continue
            if not layer.is_initialized:
                shape = (len(self.texts), source.keys.shape[1], 0, source.keys.shape[3])
                layer.lazy_initialization(source.keys.new_empty(shape), source.values.new_empty(shape))
            layer.keys[rows, :, :longest] = source.keys[:, :, :longest]
            layer.values[rows, :, :longest] = source.values[:, :, :longest]
        if self.hidden_states:
            self.states[rows, :longest] = torch.stack([output.hidden_states[i] for i in self.hidden_states], dim=2)
        ends = torch.tensor([len(prompt.ids) - 1 for prompt in prompts], device=device)
        self.temperatures[rows] = torch.tensor([prompt.temperature for prompt in prompts], device=device)
        logits = output.logits[torch.arange(len(prompts), device=device), ends]
        self.last[rows] = self._choose(logits, self.temperatures[rows])
        for row, prompt, token in zip(rows, prompts, self.last[rows].flatten().tolist(), strict=True):
            self.texts[row], self.lengths[row] = Text(prompt, [*prompt.ids, token]), len(prompt.ids) + 1

    def _choose(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[B, 1] tokens from logits [B, V]: argmax(logits / T + Gumbel noise) is a draw. No noise at T = 0."""
        tokens = logits.argmax(dim=-1)
        drawn = temperatures.nonzero().flatten()
        if len(drawn):
            scores = logits[drawn].float() / temperatures[drawn, None]
            noise = torch.empty_like(scores).exponential_(generator=self.noise)
            tokens[drawn] = (scores - noise.log_()).argmax(dim=-1)
        return tokens[:, None]

    def _is_over(self, text: Text) -> bool:
        text.ended = text.ids[-1] in self.eos
        if text.ended or len(text.answer) >= text.prompt.max_new_tokens or len(text.ids) >= self.max_length:
            return True
        if self.num_steps % _LOOP_CHECK == 0 and (end := loop_end(text.answer)) is not None:
            del text.ids[len(text.prompt.ids) + end :]
            text.looped = True
        return text.looped


def loop_end(ids: list[int], max_period: int = 48, min_repeats: int = 3) -> int | None:
    """Where the second round of a loop that `ids` ends with is over; None where it ends with no loop.

    A loop is a period of at most `max_period` tokens that is repeated at least `min_repeats` times and over at least
    24 tokens.
    """
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        span = max(period * min_repeats, 24)
        if len(ids) < span or any(ids[-i] != ids[-i - period] for i in range(1, span - period + 1)):
            continue
        start = len(ids) - span
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        return start + 2 * period
    return None
