"""One generate call: the checks before any forward pass, the loop, and transformers' output object."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..config import SpecConfig
from ..decoding.loop import Call, speculate
from ..decoding.outputs import RETURNED, Publisher, Recorder
from ..decoding.processors import BlockProcessors
from ..decoding.ragged_model import attention_windows, length_limit, max_positions
from ..decoding.rows import Rows
from ..decoding.stopping import Stops
from ..drafters.base import Drafter, DraftRequest
from ..metrics import RowStats, SpecStats
from ..scheduling import Governor
from ..verification import Noise
from .compat import DEFAULT_NUM_ASSISTANT_TOKENS
from .own_target import why_not_served
from .probe import check_ragged
from .target import RaggedTarget

# Generation options that another way of assisted decoding owns, or that are lossy.
_FOREIGN_OPTIONS = {
    "assistant_ensemble_weight": "it changes the law of the text, which a drafter keeps",
    "prompt_lookup_num_tokens": "take AutoDrafter.for_target(model, 'lookup') as the drafter instead",
    "use_mtp": "give either a drafter or use_mtp",
    "assistant_early_exit": "give either a drafter or assistant_early_exit",
    "dola_layers": "a drafter serves greedy decoding and sampling",
}
# Options of transformers' own assistants, with what it fills in.
_WITHOUT_EFFECT = {
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}
_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)  # a dummy stands for a layer that shares


def is_drafter(assistant_model: Any) -> TypeGuard[Drafter]:
    """Whether an `assistant_model` argument is a drafter of ours."""
    return getattr(type(assistant_model), "__hf_specdec__", False) is True


def check_call(model: PreTrainedModel, drafter: Drafter, mode: str, config: GenerationConfig) -> None:
    """Refuse what cannot be served, before anything is prepared.

    Args:
        model: the target.
        drafter: the drafter.
        mode: transformers' generation mode: "assisted_generation", "beam_search", ...
        config: the options of the call.

    Raises:
        ValueError: one sentence that names the option and says what to do.
    """
    if config.num_beams is not None and config.num_beams > 1:
        raise ValueError(f"`num_beams` is {config.num_beams}; a drafter serves greedy decoding and sampling, use 1.")
    if mode not in ("assisted_generation", "greedy_search", "sample"):
        raise ValueError(f"generation mode {mode!r} takes no drafter; a drafter serves greedy decoding and sampling.")
    for option, default in _WITHOUT_EFFECT.items():
        if getattr(config, option, None) not in (None, default):
            warnings.warn(f"`{option}` belongs to transformers' own assistants and has no effect here.", stacklevel=2)
    for option, what in _FOREIGN_OPTIONS.items():
        if getattr(config, option, None):
            raise ValueError(f"`{option}` is {getattr(config, option)!r} beside a drafter: {what}.")
    if config.use_cache is False:
        raise ValueError("`use_cache` is False; speculative decoding needs the cache, leave it on.")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"`cache_implementation` is {config.cache_implementation!r}; a drafter brings its own cache, leave it out."
        )
    reason = why_not_served(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} is not served by drafters yet: {reason}.")
    drafter.check_bound_to(model)
    num_draft_tokens(drafter, config)


def check_inputs(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    kwargs: dict[str, Any],
    criteria: Any,
) -> None:
    """Refuse inputs that cannot be served, before the prefill."""
    name = type(model).__name__
    if kwargs.get("inputs_embeds") is not None:
        if drafter.signals.hidden_states:
            raise ValueError(
                f"`inputs_embeds` is not served with a {drafter.method!r} drafter, which reads the prompt's tokens; "
                "give `input_ids`."
            )
    elif input_ids.shape[1] == 0:
        raise ValueError("`input_ids` is empty; give at least one token.")
    earlier = num_earlier(input_ids, config, kwargs)
    _check_cache(input_ids, kwargs, earlier)
    limit = length_limit(model)
    if limit is not None:
        most = limit[0] - num_draft_tokens(drafter, config)[1] - earlier
        if criteria.max_length > most:
            raise ValueError(
                f"`max_length` is {criteria.max_length}; {name} is served up to {most} tokens, because {limit[1]}."
            )
    batch_size = input_ids.shape[0]
    if batch_size > 1 and other_criteria(criteria) and not eos_token_ids(criteria):
        raise ValueError(
            f"{batch_size} rows with stopping criteria but without an `eos_token_id` are not served with a drafter "
            "yet; set an eos_token_id or use one row."
        )
    seed = drafter.spec_config.seed
    if isinstance(seed, list) and len(seed) != batch_size:
        raise ValueError(f"`seed` lists {len(seed)} seeds for {batch_size} rows; give one seed a row, or one integer.")


def num_earlier(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Columns before the prompt: a text in a cache whose ids were not given again, or embeddings."""
    mask = model_kwargs.get("attention_mask")
    # A mask that hides nothing has been taken away; its length has been written down.
    columns = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return columns - input_ids.shape[1]


def _check_cache(input_ids: torch.Tensor, model_kwargs: dict[str, Any], earlier: int) -> None:
    """Refuse caches of other kinds than transformers' dynamic one, and of lengths that do not fit the prompt."""
    cache: Any = model_kwargs.get("cache")
    kinds = {type(layer) for layer in getattr(cache, "layers", ())}
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or kinds - set(_CACHE_LAYERS):
        layers = f" with {', '.join(sorted(kind.__name__ for kind in kinds))}" if kinds else ""
        raise ValueError(
            f"`cache` is a {type(cache).__name__}{layers}; a drafter continues a DynamicCache that is not offloaded. "
            "Give one, or leave it out."
        )
    length, width = cache.get_seq_length(), input_ids.shape[1]
    if length and not (length == earlier or (earlier == 0 and length < width)):
        raise ValueError(
            f"`cache` holds {length} tokens beside `input_ids` of {width} and an attention mask of {width + earlier}; "
            "give the whole text's ids, or the new ones with the whole text's mask."
        )


def generate(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    logits_processor: Iterable[Any],
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode with a drafter, from the point where `generate` hands over to its decoding loop.

    Returns:
        What plain decoding returns. A dictionary output carries the statistics as `specdec`; they are also left in
        `drafter.last_stats`.

    Raises:
        NotRagged: the target has to take another path; nothing has been run or given away then.
    """
    check_inputs(model, drafter, input_ids, generation_config, model_kwargs, stopping_criteria)
    batch_size, width = input_ids.shape
    config = resolve(drafter, generation_config)
    length, longest = num_draft_tokens(drafter, generation_config)
    max_width = stopping_criteria.max_length or generation_config.max_length
    max_columns = max(max_width, width + 1) + longest + 1

    earlier = num_earlier(input_ids, generation_config, model_kwargs)
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None and earlier:
        attention_mask = input_ids.new_ones(batch_size, earlier + width)
    pad_token = generation_config._pad_token_tensor
    rows = Rows(input_ids, attention_mask, 0 if pad_token is None else int(pad_token))
    processors = BlockProcessors(logits_processor)
    returns_dict = generation_config.return_dict_in_generate
    recorder = Recorder(
        **{name: bool(returns_dict and getattr(generation_config, f"output_{name}")) for name in RETURNED},
        windows=attention_windows(model),
        earlier=earlier,
    )
    if batch_size > 1 and recorder.wanted and processors.stateful:
        raise ValueError(
            f"`output_{min(recorder.wanted)}` with {batch_size} rows is not served with {processors.stateful[0]} and a "
            "drafter yet; leave it off or use one row."
        )
    # The padding of rows that end before others is part of what is returned, and of a cache that is the user's.
    completes = bool(recorder.wanted) or getattr(model_kwargs.get("cache"), "_is_user_defined", False)
    target = RaggedTarget(
        model,
        input_ids,
        generation_config,
        model_kwargs,
        earlier,
        drafter.signals,
        max_columns,
        keeps_rows=completes,
        returns_cache=completes or bool(returns_dict),
        returned=recorder.wanted & {"hidden_states", "attentions"},
    )
    check_ragged(model)  # the first forward passes, so it comes after every refusal that needs none
    noise, seed = call_noise(config, generation_config, input_ids)
    stats = SpecStats(
        rows=[RowStats() for _ in range(batch_size)],
        rule=config.rule,
        kernels="torch",
        cache=target.cache,
        rollback=target.rollback,
        seed=seed,
    )
    own_mask = None if attention_mask is None else attention_mask[:, earlier:]
    request = draft_request(model, rows, own_mask, processors, config, noise, max_columns)
    call = Call(
        target=target,
        session=drafter.start(request),
        processors=processors,
        max_positions=max_positions(model),
        stops=Stops(max_width, eos_token_ids(stopping_criteria), other_criteria(stopping_criteria)),
        rule=config.rule,
        noise=noise,
        governor=Governor(length, longest, adaptive=longest > length),
        publisher=Publisher(streamer, rows),
        recorder=recorder,
        completes=completes,
    )
    try:
        speculate(call, rows, stats)
    finally:
        call.session.close()
        target.close()
    drafter.last_stats = stats
    sequences = rows.sequences()
    # Rows that ended apart have no common cache, unless they were completed with padding.
    in_step = min(rows.widths) == max(rows.widths)
    cache = target.filled_cache(rows) if completes or (returns_dict and in_step) else None
    if not returns_dict:
        return sequences
    output = GenerateDecoderOnlyOutput(
        sequences=sequences,
        **{name: getattr(recorder, name) for name in RETURNED},
        cache=cache,
    )
    output.specdec = stats
    return output


def draft_request(
    model: PreTrainedModel,
    rows: Rows,
    attention_mask: torch.Tensor | None,
    processors: BlockProcessors,
    config: SpecConfig,
    noise: Noise | None,
    max_columns: int,
) -> DraftRequest:
    """What a session is told about the call; the arguments are those of DraftRequest."""
    return DraftRequest(
        rows=rows,
        attention_mask=attention_mask,
        embedding=model.get_input_embeddings(),
        head=model.get_output_embeddings(),
        process=lambda scores, slot: processors(scores, rows.processor_widths(slot), rows.ids),
        processors_read_ids=processors.read_ids,
        config=config,
        vocab_size=model.config.get_text_config().vocab_size,
        noise=noise,
        max_columns=max_columns,
    )


def call_noise(
    config: SpecConfig, generation_config: GenerationConfig, input_ids: torch.Tensor
) -> tuple[Noise | None, int | list[int] | None]:
    """The noise of a sampling call and its seed, drawn from torch's generator where none is given."""
    if not generation_config.do_sample:
        return None, None
    seed = config.seed if config.seed is not None else int(torch.randint(2**63 - 1, ()))
    return Noise.from_seed(seed, input_ids.shape[0], input_ids.device), seed


def resolve(drafter: Drafter, generation_config: GenerationConfig) -> SpecConfig:
    """The drafter's options with "auto" resolved for this call."""
    config = drafter.spec_config
    if not generation_config.do_sample:
        return replace(config, rule="match", draft_sampling="greedy")
    rule = "coupled" if config.rule == "auto" else config.rule
    sampling = config.draft_sampling
    if sampling == "auto":
        sampling = "greedy" if rule == "match" else "sample"
    return replace(config, rule=rule, draft_sampling=sampling)


def num_draft_tokens(drafter: Drafter, generation_config: GenerationConfig) -> tuple[int, int]:
    """(length to start with, longest length); they differ where the governor may adapt.

    `generate(num_assistant_tokens=k)` wins. transformers fills in 20 where nothing was given, so 20 counts as unset.
    """
    k = getattr(generation_config, "num_assistant_tokens", None)
    if k is not None and k != DEFAULT_NUM_ASSISTANT_TOKENS:
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k < 1024:
            raise ValueError(f"`num_assistant_tokens` is {k!r}; give an integer from 0 to 1023.")
        return k, k
    config = drafter.spec_config
    if config.num_draft_tokens != "auto":
        return int(config.num_draft_tokens), int(config.num_draft_tokens)
    length = drafter.default_num_draft_tokens
    return length, length if config.governor == "off" else 2 * length


def eos_token_ids(criteria: Iterable[Any]) -> list[int]:
    """The tokens that end a row."""
    return [token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist()]


def other_criteria(criteria: Iterable[Any]) -> list[Any]:
    """The stopping criteria beside an eos and the length."""
    return [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
