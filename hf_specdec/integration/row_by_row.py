"""One generate call over the target's own cache: each row by itself, then joined as plain `generate` lays them out.

A row is run on exactly what `generate` prepared for it, left padding included, so models that read positions or masks
in ways of their own see what they would have seen in the batch.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import MaxTimeCriteria, logits_process

from ..config import SpecConfig
from ..decoding.loop import Call, speculate
from ..decoding.outputs import Publisher, Recorder
from ..decoding.processors import BlockProcessors
from ..decoding.ragged_model import max_positions, most_tokens_at_once
from ..decoding.rollback import unknown_layers
from ..decoding.rows import Rows
from ..metrics import RowStats, SpecStats
from ..verification import Noise, implementation
from .caches import with_growing_cache
from .compat import TOKEN_TYPES
from .encoder_decoder import from_encoder, row_of_inputs
from .generate import Generated, check_inputs, draft_request, output_of, stops_of
from .images import IMAGE_LAYER_INPUTS, features_of_row, fill_placeholders, image_layers, why_images_not_served
from .options import (
    DraftLengths,
    between_of,
    call_noise,
    control_of,
    described,
    num_draft_tokens,
    resolve,
    schedule_of,
    verification_rule,
)
from .own_probe import rollback_of
from .own_target import OwnModel, OwnTarget, ReplayGovernor, fresh_cache
from .prepared import Prepared


def generate_row_by_row(prepared: Prepared) -> Generated:
    """As `generate.generate`, where the target cannot run over ragged rows.

    Returns:
        What plain decoding returns. A streamer is given the columns of a batch once all of its rows are there.
    """
    _check(prepared)
    asked_for, prepared = prepared, with_growing_cache(prepared)
    batch_size = prepared.batch_size
    config = resolve(prepared.drafter, prepared.config)
    rule = verification_rule(prepared.drafter, prepared.config)
    kernels = implementation(config.kernels, rule, prepared.input_ids.device)
    # The first forward passes of the text come after every refusal that needs none.
    encoded = from_encoder(one_row(prepared, 0).kwargs) if prepared.model.config.is_encoder_decoder else {}
    rollback = rollback_of(prepared.model, encoded)
    noise, seed = call_noise(config, prepared.config, prepared.input_ids)
    about = described(prepared.drafter, prepared.config)
    stats = SpecStats(**about, kernels=kernels, cache=OwnTarget.cache, rollback=rollback, seed=seed)
    done: list[tuple[Call, Rows]] = []
    for b in range(batch_size):
        row = one_row(prepared, b)
        own = OwnModel(row.model, row.input_ids, row.config, dict(row.kwargs), rollback)
        target = OwnTarget(own, row.drafter.signals, row.returned)
        call, rows = _call(row, target, config, kernels, None if noise is None else Noise(noise.keys[b : b + 1]))
        row_stats = SpecStats(rows=[RowStats()])
        try:
            speculate(call, rows, row_stats)
        finally:
            call.session.close()
            target.close()
        stats.rows += row_stats.rows
        for name in ("num_forwards", "draft_time", "verify_time", "host_time"):
            setattr(stats, name, getattr(stats, name) + getattr(row_stats, name))
        stats.settings = dict(Counter(stats.settings) + Counter(row_stats.settings))
        done.append((call, rows))
        if batch_size > 1 and not call.recorder.wanted:
            target.drop()  # nothing is run again
    prepared.drafter.last_stats = stats
    texts = [rows.sequences()[0] for _, rows in done]
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=prepared.pad_token_id)
    if batch_size > 1 and prepared.streamer is not None:
        for column in sequences[:, prepared.width :].cpu().unbind(dim=1):
            prepared.streamer.put(column)
        prepared.streamer.end()
    for call, rows in done:
        _run_padding(call, rows, sequences.shape[1] - 1)
    recorder = Recorder.joined([call.recorder for call, _ in done])
    # Rows' caches were never one, and a static cache that was asked for was never filled.
    returns_cache = batch_size == 1 and prepared.config.return_dict_in_generate and prepared is asked_for
    return output_of(prepared, sequences, recorder, target.filled_cache(rows) if returns_cache else None, stats)


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


def _call(row: Prepared, target: OwnTarget, config: SpecConfig, kernels: str, noise: Noise | None) -> tuple[Call, Rows]:
    """The loop's call for a row, and the row."""
    rows = Rows(row.input_ids, row.attention_mask, row.pad_token_id)
    lengths = num_draft_tokens(row.drafter, row.config)
    if target.rollback == "stepwise":
        lengths = DraftLengths(0, 0, adaptive=False)
    if (at_once := most_tokens_at_once(row.model)) is not None:
        first, longest = (min(length, at_once - 1) for length in (lengths.first, lengths.longest))
        lengths = DraftLengths(first, longest, lengths.adaptive)
    max_columns = row.max_width + lengths.longest + 1
    processors = BlockProcessors(row.processors)
    request = draft_request(row.model, rows, row.attention_mask, processors, config, noise, max_columns, row.source)
    limit = max_positions(row.model)
    call = Call(
        target=target,
        session=row.drafter.start(request),
        processors=processors,
        # Padding takes positions where a model counts the columns of its cache.
        max_positions=None if limit is None else limit - row.width + len(rows.texts[0]),
        stops=stops_of(row),
        rule=verification_rule(row.drafter, row.config),
        kernels=kernels,
        noise=noise,
        governor=ReplayGovernor(target, rows, *lengths),
        schedule=schedule_of(config),
        publisher=Publisher(row.streamer, rows),
        recorder=Recorder(row.returned),
        completes=False,
        between=between_of(row.drafter, 1),
        control=control_of(row.drafter, config),
    )
    return call, rows


def one_row(prepared: Prepared, row: int) -> Prepared:
    """A row of a batch as a call of its own; a call of one row is that already."""
    if prepared.batch_size == 1:
        return prepared
    return replace(
        prepared,
        input_ids=prepared.input_ids[row : row + 1],
        processors=[row_processor(processor, row, prepared.batch_size) for processor in prepared.processors],
        streamer=None,
        kwargs={**row_inputs(prepared, row), "cache": fresh_cache(prepared.model)},
        encoder_inputs=None if prepared.encoder_inputs is None else prepared.encoder_inputs[row : row + 1],
    )


def row_inputs(prepared: Prepared, row: int) -> dict[str, Any]:
    """What `generate` prepared for one row of a batch."""
    if prepared.model.config.is_encoder_decoder:
        return row_of_inputs(prepared.kwargs, row, prepared.batch_size)
    kwargs = dict(prepared.kwargs)
    if (features := kwargs.get("mm_encoder_outputs")) is not None:
        kwargs["mm_encoder_outputs"] = features_of_row(prepared.model, prepared.input_ids, features, row)
    for key in _row_inputs(prepared.model):
        if (values := kwargs.get(key)) is not None:
            kwargs[key] = values[row : row + 1]
    if (positions := kwargs.get("position_ids")) is not None and positions.shape[-2] == prepared.batch_size:
        kwargs["position_ids"] = positions[..., row : row + 1, :]
    return kwargs


def row_processor(processor: Any, row: int, batch_size: int) -> Any:
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
        source = row * processor.batch_size // batch_size  # `num_return_sequences` rows have one
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[source : source + 1], 1
    return processor


def _check(prepared: Prepared) -> None:
    """Refuse what this path cannot keep exact, before any forward pass."""
    model, kwargs = prepared.model, prepared.kwargs
    name, batch_size = type(model).__name__, prepared.batch_size
    if getattr(kwargs.get("cache"), "_is_user_defined", False):
        raise ValueError(f"`cache` is yours, which is not served with {name} and a drafter yet; leave it out.")
    if kwargs.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        raise ValueError(f"`inputs_embeds` is not served with {name} and a drafter yet; give `input_ids`.")
    if image_layers(model) and (reason := why_images_not_served(kwargs)):
        raise ValueError(f"{reason} with {name} and a drafter.")
    check_inputs(prepared)
    mask = prepared.attention_mask
    if mask is not None and (unknown := unknown_layers(fresh_cache(model))) and bool((mask == 0).any()):
        raise ValueError(
            f"{name} is served without padding only: its cache has layers of class {', '.join(unknown)}, which may "
            "count columns from the first one, padding included. Give rows of one length, or one row at a time."
        )
    if "attentions" in prepared.returned:
        raise ValueError(f"`output_attentions` is not served with {name} and a drafter yet; leave it out.")
    if batch_size == 1:
        return
    one_by_one = (
        f"with {batch_size} rows is not served with {name} and a drafter yet, because its rows are run one by one"
    )
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in prepared.criteria):
        raise ValueError(f"`max_time` {one_by_one}; give one row at a time.")
    if stateful := BlockProcessors(prepared.processors).stateful:
        raise ValueError(f"{stateful[0]} {one_by_one}; give one row at a time.")
    if model.config.is_encoder_decoder:
        return  # every tensor has the rows first
    known = ("position_ids", "cache", "mm_encoder_outputs", *_row_inputs(model))
    others = [key for key, value in kwargs.items() if _holds_tensors(value) and key not in known]
    if not fill_placeholders(model, prepared.input_ids, kwargs.get("mm_encoder_outputs")):
        others.append("pixel_values")
    if others:
        raise ValueError(f"`{others[0]}` {one_by_one}; give one row at a time.")


def _row_inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """Inputs of a model that have one entry for each row."""
    return ("attention_mask", *TOKEN_TYPES, *(IMAGE_LAYER_INPUTS if image_layers(model) else ()))


def _holds_tensors(value: Any) -> bool:
    """Whether an input of the model is a tensor or a collection of some."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))
