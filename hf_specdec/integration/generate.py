"""One generate call: the checks before any forward pass, the loop, and transformers' output object."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeGuard

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    MaxLengthCriteria,
)

from ..config import SpecConfig
from ..decoding.loop import Call, speculate
from ..decoding.outputs import RETURNED, Publisher, Recorder
from ..decoding.processors import BlockProcessors
from ..decoding.ragged_model import attention_windows, length_limit, max_positions
from ..decoding.rows import Rows
from ..decoding.stopping import Stops
from ..drafters.base import Drafter
from ..drafters.request import DraftRequest, Source
from ..metrics import RowStats, SpecStats
from ..scheduling import Governor
from ..verification import Noise, implementation
from ..verification.lenient_rule import GREEDY_RULES
from .caches import check_cache, check_implementation
from .encoder_decoder import dictionary
from .options import (
    between_of,
    call_noise,
    control_of,
    described,
    num_draft_tokens,
    resolve,
    schedule_of,
    verification_rule,
)
from .own_target import why_not_served
from .prepared import Prepared
from .probe import check_ragged
from .target import RaggedTarget

# Generation options that another way of assisted decoding owns, or that are lossy.
_FOREIGN_OPTIONS = {
    "assistant_ensemble_weight": "give the drafter SpecConfig(lenience=hf_specdec.lenient.Ensemble(weight)) instead",
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

Generated: TypeAlias = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | torch.Tensor  # what a call may return


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
    if config.compile_config is not None:
        warnings.warn(
            "`compile_config` has no effect beside a drafter; compile the model itself, for instance by "
            "model.forward = torch.compile(model.forward, dynamic=True).",
            stacklevel=2,
        )
    for option, what in _FOREIGN_OPTIONS.items():
        if getattr(config, option, None):
            raise ValueError(f"`{option}` is {getattr(config, option)!r} beside a drafter: {what}.")
    if model.config.is_encoder_decoder and config.return_dict_in_generate and config.output_attentions:
        raise ValueError(
            f"`output_attentions` is not served with {type(model).__name__}, an encoder-decoder, and a drafter yet; "
            "leave it out."
        )
    if config.use_cache is False:
        raise ValueError("`use_cache` is False; speculative decoding needs the cache, leave it on.")
    check_implementation(model, config)
    reason = why_not_served(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} is not served by drafters yet: {reason}.")
    drafter.check_bound_to(model)
    if drafter.spec_config.schedule is not None and not drafter.gives_confidence:
        raise ValueError(
            f"`schedule` is {drafter.spec_config.schedule!r} and this {drafter.method!r} drafter gives no confidence "
            "to schedule by; leave it at None."
        )
    lenient = drafter.spec_config.lenient_rule
    if lenient is not None and not (config.do_sample or lenient.serves_greedy or lenient.is_lossless(greedy=True)):
        raise ValueError(f"`lenience` is {lenient!r}, a rule for sampling; greedy decoding takes {GREEDY_RULES}.")
    vocab_size = model.config.get_text_config().vocab_size
    for marker in drafter.spec_config.lenient_between or ():
        if max(marker) >= vocab_size:
            raise ValueError(
                f"`lenient_between` has token {max(marker)} and {type(model).__name__} a vocabulary of {vocab_size}; "
                "take the ids of this model's tokenizer."
            )
    num_draft_tokens(drafter, config)


def check_inputs(prepared: Prepared) -> None:
    """Refuse inputs that no path serves, before the prefill."""
    model, drafter, criteria = prepared.model, prepared.drafter, prepared.criteria
    name, batch_size = type(model).__name__, prepared.batch_size
    if prepared.kwargs.get("inputs_embeds") is not None:
        if drafter.signals.hidden_states:
            raise ValueError(
                f"`inputs_embeds` is not served with a {drafter.method!r} drafter, which reads the prompt's tokens; "
                "give `input_ids`."
            )
    else:
        _check_ids(prepared)
    limit = length_limit(model)
    if limit is not None:
        most = limit[0] - num_draft_tokens(drafter, prepared.config).longest - prepared.earlier
        if prepared.max_width > most:
            raise ValueError(
                f"`max_length` is {prepared.max_width}; {name} is served up to {most} tokens, because {limit[1]}."
            )
    if batch_size > 1 and other_criteria(criteria) and not eos_token_ids(criteria):
        raise ValueError(
            f"{batch_size} rows with stopping criteria but without an `eos_token_id` are not served with a drafter "
            "yet; set an eos_token_id or use one row."
        )
    seed = drafter.spec_config.seed
    if isinstance(seed, list) and len(seed) != batch_size:
        raise ValueError(f"`seed` lists {len(seed)} seeds for {batch_size} rows; give one seed a row, or one integer.")


def _check_ids(prepared: Prepared) -> None:
    """Refuse ids that are no batch of texts, and a mask of other texts."""
    ids, earlier = prepared.input_ids, prepared.earlier
    cache: Any = prepared.kwargs.get("cache")
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(f"`input_ids` has shape {list(ids.shape)}; give at least one row of at least one token.")
    continues = getattr(cache, "_is_user_defined", False) and int(cache.get_seq_length()) > 0
    if earlier < 0 or (earlier > 0 and not continues):
        raise ValueError(
            f"`attention_mask` has {prepared.width + earlier} columns for `input_ids` of {prepared.width}; give one "
            "for each token, or the `cache` that holds the tokens before them."
        )


def generate(prepared: Prepared) -> Generated:
    """Decode a batch with a drafter, over ragged rows.

    Returns:
        What plain decoding returns. A dictionary output carries the statistics as `specdec`; they are also left in
        `drafter.last_stats`.

    Raises:
        NotRagged: the target has to take another path; nothing has been run or given away then.
    """
    check_inputs(prepared)
    check_cache(prepared)
    model, drafter, input_ids, earlier = prepared.model, prepared.drafter, prepared.input_ids, prepared.earlier
    batch_size, returned = prepared.batch_size, prepared.returned
    config = resolve(drafter, prepared.config)
    rule = verification_rule(drafter, prepared.config)
    kernels = implementation(config.kernels, rule, input_ids.device)
    lengths = num_draft_tokens(drafter, prepared.config)
    max_columns = prepared.max_width + lengths.longest + 1
    processors = BlockProcessors(prepared.processors)
    if batch_size > 1 and returned and processors.stateful:
        raise ValueError(
            f"`output_{min(returned)}` with {batch_size} rows is not served with {processors.stateful[0]} and a "
            "drafter yet; leave it off or use one row."
        )
    attention_mask = prepared.attention_mask
    if attention_mask is None and earlier:
        attention_mask = input_ids.new_ones(batch_size, earlier + prepared.width)
    rows = Rows(input_ids, attention_mask, prepared.pad_token_id)
    recorder = Recorder(returned, windows=attention_windows(model), earlier=earlier)
    returns_dict = bool(prepared.config.return_dict_in_generate)
    # The padding of rows that end before others is part of what is returned, and of a cache that is the user's.
    completes = bool(returned) or getattr(prepared.kwargs.get("cache"), "_is_user_defined", False)
    target = RaggedTarget(prepared, max_columns, keeps_rows=completes, returns_cache=completes or returns_dict)
    check_ragged(model)  # the first forward passes, so it comes after every refusal that needs none
    noise, seed = call_noise(config, prepared.config, input_ids)
    stats = SpecStats(
        rows=[RowStats() for _ in range(batch_size)],
        **described(drafter, prepared.config),
        kernels=kernels,
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
        stops=stops_of(prepared),
        rule=rule,
        kernels=kernels,
        noise=noise,
        governor=Governor(*lengths),
        schedule=schedule_of(config),
        publisher=Publisher(prepared.streamer, rows),
        recorder=recorder,
        completes=completes,
        between=between_of(drafter, batch_size),
        control=control_of(drafter, config),
    )
    try:
        speculate(call, rows, stats)
    finally:
        call.session.close()
        target.close()
    drafter.last_stats = stats
    # Rows that ended apart have no common cache, unless they were completed with padding.
    in_step = min(rows.widths) == max(rows.widths)
    cache = target.filled_cache(rows) if completes or (returns_dict and in_step) else None
    return output_of(prepared, rows.sequences(), recorder, cache, stats)


def output_of(
    prepared: Prepared, sequences: torch.Tensor, recorder: Recorder, cache: Any, stats: SpecStats
) -> Generated:
    """What the call returns: the sequences, or a dictionary with what was asked for and the statistics."""
    if not prepared.config.return_dict_in_generate:
        return sequences
    output: GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput
    if prepared.model.config.is_encoder_decoder:
        output = dictionary(sequences, recorder, cache, prepared.kwargs["encoder_outputs"], prepared.returned)
    else:
        recorded = {name: getattr(recorder, name) for name in RETURNED}
        output = GenerateDecoderOnlyOutput(sequences=sequences, **recorded, cache=cache)
    output.specdec = stats
    return output


def stops_of(prepared: Prepared) -> Stops:
    """Where the rows of a call end."""
    return Stops(prepared.max_width, eos_token_ids(prepared.criteria), other_criteria(prepared.criteria))


def draft_request(
    model: PreTrainedModel,
    rows: Rows,
    attention_mask: torch.Tensor | None,
    processors: BlockProcessors,
    config: SpecConfig,
    noise: Noise | None,
    max_columns: int,
    source: Source | None = None,
) -> DraftRequest:
    """What a session is told about the call; the arguments are those of DraftRequest."""
    return DraftRequest(
        rows=rows,
        attention_mask=attention_mask,
        embedding=None if model.config.is_encoder_decoder else model.get_input_embeddings(),
        head=model.get_output_embeddings(),
        process=lambda scores, slot: processors(scores, rows.processor_widths(slot), rows.ids),
        processors_read_ids=processors.read_ids,
        config=config,
        vocab_size=model.config.get_text_config().vocab_size,
        noise=noise,
        max_columns=max_columns,
        source=source,
    )


def eos_token_ids(criteria: Iterable[Any]) -> list[int]:
    """The tokens that end a row."""
    return [token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist()]


def other_criteria(criteria: Iterable[Any]) -> list[Any]:
    """The stopping criteria beside an eos and the length."""
    return [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
