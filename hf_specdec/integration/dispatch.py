"""The door: `model.generate(assistant_model=drafter)` for every model that generates, and for pipelines.

Three methods of GenerationMixin look for a drafter of ours among their arguments, or for the name of one, and hand over
to our loop; with any other argument they call the original unchanged. Whisper has a `generate` of its own around
theirs, which is wrapped too. What is wrapped of pipelines is in `pipelines`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin, StoppingCriteriaList
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from ..drafters.auto import drafter_of_model
from ..drafters.base import Drafter
from .compat import ASSISTANT_PARAMETERS, PIPELINE_PARAMETERS, UTILS_PARAMETERS, check_signatures
from .encoder_decoder import encoder_inputs, with_named_outputs
from .generate import check_call, is_drafter
from .paths import decode
from .pipelines import is_name, kept_drafter, wrap_init, wrap_pipeline
from .prepared import Prepared

_originals: list[tuple[Any, str, Callable]] = []  # (class or module, name, what was there)


def install() -> None:
    """Let `generate` of every transformers model, and pipelines, take drafters. Safe to call again.

    Raises:
        RuntimeError: transformers' internals have changed; nothing is installed then.
    """
    if _originals:
        return
    _check_generation()
    patches = [(GenerationMixin, name, wrap) for name, wrap in _WRAPPERS.items()] + _pipeline_patches()
    patches.append((WhisperGenerationMixin, "generate", _wrap_whisper))
    for owner, name, wrap in patches:
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, wrap(original))
    _forget_resolved_names()


def uninstall() -> None:
    """Put transformers' own methods back."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)
    _forget_resolved_names()


def is_installed() -> bool:
    return bool(_originals)


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Let one model take drafters, without touching any other. Returns the model.

    The model's class is replaced by a subclass of the same name; pickling and saving go by the original class.

    Raises:
        RuntimeError: transformers' internals have changed.
    """
    _check_generation()
    cls = type(model)
    if not isinstance(model, GenerationMixin):
        raise ValueError(f"`model` is a {cls.__name__}, which has no generate().")
    if not getattr(cls, "_hf_specdec_enabled", False):
        body: dict[str, Any] = {name: wrap(getattr(cls, name)) for name, wrap in _WRAPPERS.items()}
        if isinstance(model, WhisperGenerationMixin):
            body["generate"] = _wrap_whisper(cls.generate)
        body.update(__module__=cls.__module__, __reduce_ex__=_reduce_as(cls), _hf_specdec_enabled=True)
        model.__class__ = type(cls.__name__, (cls,), body)
    return model


class SpecGenerate:
    """A drafter for `generate(custom_generate=...)`, where nothing may be patched.

    transformers drops `streamer` on this path, so it is given here.

    Args:
        drafter: the drafter.
        streamer: as in `generate`.

    Raises:
        RuntimeError: transformers' internals have changed.
    """

    def __init__(self, drafter: Drafter, streamer: Any | None = None) -> None:
        _check_generation()
        if not is_drafter(drafter):
            raise ValueError(f"`drafter` is a {type(drafter).__name__}; give what AutoDrafter returns.")
        self.drafter, self.streamer = drafter, streamer

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        mode = generation_config.get_generation_mode()
        check_call(model, self.drafter, str(getattr(mode, "value", mode)), generation_config)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        return decode(
            Prepared(
                model,
                self.drafter,
                input_ids,
                list(logits_processor),
                stopping_criteria,
                generation_config,
                self.streamer,
                with_named_outputs(model_kwargs),
                encoder_inputs(model, inputs_tensor, len(input_ids)),
            )
        )


def _wrap_validate(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        drafter = generation_mode_kwargs.get("assistant_model")
        if is_name(drafter):  # generate passes this dictionary on to the decoding loop
            drafter = generation_mode_kwargs["assistant_model"] = kept_drafter(self, drafter)
        if drafter is not None and (isinstance(drafter, type) or not hasattr(drafter, "config")):
            given = drafter.__name__ if isinstance(drafter, type) else repr(drafter)
            raise ValueError(f"`assistant_model` is {given}; give a drafter, as AutoDrafter returns it, or a model.")
        if isinstance(drafter, PreTrainedModel) and (of_model := drafter_of_model(drafter, self)) is not None:
            drafter = generation_mode_kwargs["assistant_model"] = of_model
        if not is_drafter(drafter):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        _check_beside(generation_mode_kwargs)
        check_call(self, drafter, str(getattr(generation_mode, "value", generation_mode)), generation_config)

    return _validate_generation_mode


def _check_beside(arguments: dict[str, Any]) -> None:
    """Refuse arguments of `generate` that a drafter does not go with."""
    if arguments.get("assistant_tokenizer") is not None:
        raise ValueError("`assistant_tokenizer` is given beside a drafter; drafters share the target's tokenizer.")
    if arguments.get("synced_gpus"):
        raise ValueError("`synced_gpus` is on; drafters do not run under ZeRO-3 or FSDP generation yet.")


def _wrap_whisper(original: Callable) -> Callable:
    """Whisper's `generate` that takes drafters.

    It lets a text begin with its end where it is given an `assistant_model`, so the drafter goes in by the other door.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        if is_name(drafter):
            drafter = kept_drafter(self, drafter)
        if not is_drafter(drafter):
            return original(self, *args, **kwargs)
        _check_beside(kwargs)
        for name in ("assistant_model", "assistant_tokenizer"):
            kwargs.pop(name, None)
        call = signature.bind(self, *args, **kwargs).arguments
        config, _ = self._prepare_generation_config(call.get("generation_config"), **call.get("kwargs", {}))
        check_call(self, drafter, config.get_generation_mode().value, config)  # the other door checks after the encoder
        return original(self, *args, custom_generate=SpecGenerate(drafter, kwargs.pop("streamer", None)), **kwargs)

    return generate


def _wrap_candidates(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        if not is_drafter(drafter):
            return original(self, *args, **kwargs)
        from .candidates import DrafterCandidates

        return DrafterCandidates(
            self, drafter, kwargs["input_ids"], kwargs["generation_config"], kwargs["logits_processor"]
        )

    return _get_candidate_generator


def _wrap_decoding(original: Callable) -> Callable:
    @functools.wraps(original)
    def _assisted_decoding(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any | None = None,
        inputs_tensor: Any | None = None,
        assistant_model: Any | None = None,
        assistant_tokenizer: Any | None = None,
        tokenizer: Any | None = None,
        **model_kwargs: Any,
    ) -> Any:
        if assistant_model is None or not is_drafter(assistant_model):
            return original(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        return decode(
            Prepared(
                self,
                assistant_model,
                input_ids,
                list(logits_processor),
                stopping_criteria,
                generation_config,
                streamer,
                with_named_outputs(model_kwargs),
                encoder_inputs(self, inputs_tensor, len(input_ids)),
            )
        )

    return _assisted_decoding


_WRAPPERS: dict[str, Callable[[Callable], Callable]] = {
    "_validate_generation_mode": _wrap_validate,
    "_get_candidate_generator": _wrap_candidates,
    "_assisted_decoding": _wrap_decoding,
}


def _check_generation() -> None:
    check_signatures(GenerationMixin)
    check_signatures(transformers.generation.utils, UTILS_PARAMETERS)


def _pipeline_patches() -> list[tuple[Any, str, Callable[[Callable], Callable]]]:
    """(class or module, name, wrapper) of what is wrapped of pipelines."""
    try:
        from transformers import pipelines
    except Exception:  # of an image or audio library that is broken, say: then there are no pipelines to wrap
        return []
    check_signatures(pipelines.Pipeline, PIPELINE_PARAMETERS)
    check_signatures(pipelines.base, ASSISTANT_PARAMETERS)
    return [(pipelines.Pipeline, "__init__", wrap_init), (pipelines, "pipeline", wrap_pipeline)]


def _forget_resolved_names() -> None:
    """Let `transformers.pipeline` be looked up again: transformers keeps what it has resolved, and there may be two of
    it, for importing its processors replaces the module."""
    for module in (transformers, sys.modules["transformers"]):
        vars(module).pop("pipeline", None)


def _reduce_as(cls: type) -> Callable:
    """Pickle and copy an enabled model as an object of its own class."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        _, _, *state = super(type(self), self).__reduce_ex__(protocol)
        return (object.__new__, (cls,), *state)

    return __reduce_ex__
