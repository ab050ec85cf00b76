"""One generate call over the target's own cache: each row by itself, then joined as plain `generate` lays them out.

A row is run on exactly what `generate` prepared for it, left padding included, so models that read positions or masks
in ways of their own see what they would have seen in the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput, MaxTimeCriteria, StoppingCriteriaList, logits_process

from ..config import SpecConfig
from ..decoding.loop import Call, speculate
from ..decoding.outputs import RETURNED, Publisher, Recorder
from ..decoding.processors import BlockProcessors
from ..decoding.ragged_model import max_positions
from ..decoding.rollback import unknown_layers
from ..decoding.rows import Rows
from ..decoding.stopping import Stops
from ..drafters.base import Drafter
from ..metrics import RowStats, SpecStats
from ..verification import Noise
from .compat import TOKEN_TYPES
from .generate import (
    call_noise,
    check_inputs,
    draft_request,
    eos_token_ids,
    num_draft_tokens,
    other_criteria,
    resolve,
)
from .own_probe import rollback_of
from .own_target import OwnTarget, ReplayGovernor, fresh_cache


def generate_row_by_row(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    logits_processor: Iterable[Any],
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """As `generate.generate`, where the target cannot run over ragged rows.

    Returns:
        What plain decoding returns. A streamer is given the columns of a batch once all of its rows are there.
    """
    _check(model, drafter, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    batch_size = input_ids.shape[0]
    config = resolve(drafter, generation_config)
    rollback = rollback_of(model)  # the first forward passes, so it comes after every refusal that needs none
    noise, seed = call_noise(config, generation_config, input_ids)
    whole = _Batch(
        model, drafter, input_ids, list(logits_processor), stopping_criteria, generation_config, model_kwargs
    )
    stats = SpecStats(rule=config.rule, kernels="torch", cache=OwnTarget.cache, rollback=rollback, seed=seed)
    done: list[tuple[Call, Rows]] = []
    for b in range(batch_size):
        row_noise = None if noise is None else Noise(noise.keys[b : b + 1])
        target = whole.target(b, rollback)
        call, rows = whole.call(b, target, config, row_noise, streamer if batch_size == 1 else None)
        row_stats = SpecStats(rows=[RowStats()])
        try:
            speculate(call, rows, row_stats)
        finally:
            call.session.close()
            target.close()
        stats.rows += row_stats.rows
        for name in ("num_forwards", "draft_time", "verify_time", "host_time"):
            setattr(stats, name, getattr(stats, name) + getattr(row_stats, name))
        done.append((call, rows))
        if batch_size > 1 and not call.recorder.wanted:
            target.drop()  # nothing is run again
    drafter.last_stats = stats
    texts = [rows.sequences()[0] for _, rows in done]
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=whole.pad_token_id)
    if batch_size > 1 and streamer is not None:
        for column in sequences[:, input_ids.shape[1] :].cpu().unbind(dim=1):
            streamer.put(column)
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences
    for call, rows in done:
        _run_padding(call, rows, sequences.shape[1] - 1)
    recorder = Recorder.joined([call.recorder for call, _ in done])
    output = GenerateDecoderOnlyOutput(
        sequences=sequences,
        **{name: getattr(recorder, name) for name in RETURNED},
        cache=target.filled_cache(rows) if batch_size == 1 else None,  # the rows' caches were never one
    )
    output.specdec = stats
    return output


def _run_padding(call: Call, rows: Rows, end: int) -> None:
    """Where outputs are returned, run a row that ended before others over its padding up to column `end`, as plain
    decoding does."""
    first = rows.widths[0] - 1
    if not call.recorder.wanted or first == end:
        return
    rows.ids = nn.functional.pad(rows.sequences(), (0, end - first), value=rows.pad_token_id)
    logits = call.target.read_again(rows, first, end)
    raw_logits = logits.clone()
    scores = call.processors(logits, [first + 1], rows.ids)
    call.recorder.record_padding(raw_logits, scores, call.target.states, first, rows)


@dataclass(frozen=True)
class _Batch:
    """The arguments of `generate_row_by_row`, for its rows one by one."""

    model: PreTrainedModel
    drafter: Drafter
    input_ids: torch.Tensor
    processors: list[Any]
    criteria: StoppingCriteriaList
    config: GenerationConfig
    kwargs: dict[str, Any]

    @property
    def pad_token_id(self) -> int:
        token = self.config._pad_token_tensor
        return 0 if token is None else int(token)

    def target(self, row: int, rollback: str) -> OwnTarget:
        batch_size = self.input_ids.shape[0]
        cache = self.kwargs.get("cache") if batch_size == 1 else fresh_cache(self.model)
        return OwnTarget(
            self.model,
            self.input_ids[row : row + 1],
            self.config,
            {**row_inputs(self.kwargs, row, batch_size), "cache": cache},
            rollback,
            self.drafter.signals,
            frozenset({"hidden_states"} if _returned(self.config)["hidden_states"] else ()),
        )

    def call(
        self, row: int, target: OwnTarget, config: SpecConfig, noise: Noise | None, streamer: Any | None
    ) -> tuple[Call, Rows]:
        """The loop's call for a row, and the row."""
        prompt = self.input_ids[row : row + 1]
        mask = row_inputs(self.kwargs, row, self.input_ids.shape[0]).get("attention_mask")
        rows, width = Rows(prompt, mask, self.pad_token_id), prompt.shape[1]
        length, longest = num_draft_tokens(self.drafter, self.config) if target.rollback != "stepwise" else (0, 0)
        max_width = self.criteria.max_length or self.config.max_length
        max_columns = max(max_width, width + 1) + longest + 1
        processors = BlockProcessors([row_processor(processor, row) for processor in self.processors])
        request = draft_request(self.model, rows, mask, processors, config, noise, max_columns)
        limit = max_positions(self.model)
        call = Call(
            target=target,
            session=self.drafter.start(request),
            processors=processors,
            # Padding takes positions where a model counts the columns of its cache.
            max_positions=None if limit is None else limit - width + len(rows.texts[0]),
            stops=Stops(max_width, eos_token_ids(self.criteria), other_criteria(self.criteria)),
            rule=config.rule,
            noise=noise,
            governor=ReplayGovernor(target, rows, length, longest, adaptive=longest > length),
            publisher=Publisher(streamer, rows),
            recorder=Recorder(**_returned(self.config)),
            completes=False,
        )
        return call, rows


def row_inputs(model_kwargs: dict[str, Any], row: int, batch_size: int) -> dict[str, Any]:
    """What `generate` prepared for one row of a batch."""
    if batch_size == 1:
        return dict(model_kwargs)
    kwargs = dict(model_kwargs)
    if (mask := kwargs.get("attention_mask")) is not None:
        kwargs["attention_mask"] = mask[row : row + 1]
    for key in TOKEN_TYPES:
        if (types := kwargs.get(key)) is not None:
            kwargs[key] = types[row : row + 1]
    if (positions := kwargs.get("position_ids")) is not None and positions.shape[-2] == batch_size:
        kwargs["position_ids"] = positions[..., row : row + 1, :]
    return kwargs


def row_processor(processor: Any, row: int) -> Any:
    """A processor of a batch as it treats one of its rows."""
    if isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
        allowed = partial(processor._prefix_allowed_tokens_fn, row // processor._num_beams)
        return logits_process.PrefixConstrainedLogitsProcessor(lambda _, text: allowed(text), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)  # of RepetitionPenaltyLogitsProcessor
    if isinstance(ignored, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    elif isinstance(processor, logits_process.EncoderRepetitionPenaltyLogitsProcessor):
        processor = copy.copy(processor)
        processor.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
    elif isinstance(processor, logits_process.EncoderNoRepeatNGramLogitsProcessor):
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[row : row + 1], 1
    return processor


def _returned(config: GenerationConfig) -> dict[str, Any]:
    """Which of RETURNED the call returns."""
    return {name: bool(config.return_dict_in_generate and getattr(config, f"output_{name}")) for name in RETURNED}


def _check(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    processors: Iterable[Any],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what this path cannot keep exact, before any forward pass."""
    name, batch_size = type(model).__name__, input_ids.shape[0]
    if getattr(kwargs.get("cache"), "_is_user_defined", False):
        raise ValueError(f"`cache` is yours, which is not served with {name} and a drafter yet; leave it out.")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(f"`inputs_embeds` is not served with {name} and a drafter yet; give `input_ids`.")
    check_inputs(model, drafter, input_ids, config, {**kwargs, "cache": DynamicCache()}, criteria)
    mask = kwargs.get("attention_mask")
    if mask is not None and (unknown := unknown_layers(fresh_cache(model))) and bool((mask == 0).any()):
        raise ValueError(
            f"{name} is served without padding only: its cache has layers of class {', '.join(unknown)}, which may "
            "count columns from the first one, padding included. Give rows of one length, or one row at a time."
        )
    returned = [option for option, wanted in _returned(config).items() if wanted]
    if "attentions" in returned:
        raise ValueError(f"`output_attentions` is not served with {name} and a drafter yet; leave it out.")
    if batch_size == 1:
        return
    one_row = f"with {batch_size} rows is not served with {name} and a drafter yet, because its rows are run one by one"
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in criteria):
        raise ValueError(f"`max_time` {one_row}; give one row at a time.")
    if stateful := BlockProcessors(processors).stateful:
        raise ValueError(f"{stateful[0]} {one_row}; give one row at a time.")
    prepared = ("attention_mask", "position_ids", "cache", *TOKEN_TYPES)
    others = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor) and key not in prepared]
    if others:
        raise ValueError(f"`{others[0]}` {one_row}; give one row at a time.")
