"""Pipelines: `pipeline(..., assistant_model=X)` where X is a drafter, or the name or folder of one.

transformers would load a name as a whole model with a tokenizer beside it, which drafter repositories are not. Here a
name is looked at first: what AutoDrafter knows is loaded by it, a whole model of another kind is left to transformers,
and anything else is refused.

A smaller language model becomes our `draft_model` drafter, because that serves batches, several sequences and
draft lengths, which transformers' own assisted generation does not; the text is the same. transformers keeps the pairs
that only it serves: another tokenizer than the target's, or a target or draft model that our loop does not take.

A pipeline's `token` holds for its drafter too. `revision` does not, it names a state of the target's repository; nor
does `trust_remote_code`, for a drafter never runs code of its repository.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import transformers
from transformers import PreTrainedModel

from ..drafters.auto import AutoDrafter, DrafterFormat, methods
from ..drafters.base import Drafter, UnfitDraftModel
from .generate import is_drafter
from .own_target import why_not_served

_HUB_OPTIONS = ("revision", "subfolder", "token", "local_files_only")


class DrafterName(str):
    """A name on the Hub or a folder, with options of AutoDrafter.from_pretrained."""

    options: dict[str, Any]

    def __new__(cls, name: str | os.PathLike, **options: Any) -> DrafterName:
        self = super().__new__(cls, os.fspath(name))
        self.options = options
        return self

    @functools.cached_property
    def found(self) -> DrafterFormat | None:
        """What the repository holds; None for a whole model that AutoDrafter does not know and transformers does.

        Raises:
            ValueError, OSError: neither, or it cannot be read.
        """
        name = str(self)
        if name in methods() and methods()[name].for_target is not None and not Path(name).is_dir():
            raise ValueError(
                f"`assistant_model` is {name!r}; give a drafter, as AutoDrafter.for_target(model, {name!r}) returns it."
            )
        hub = {key: value for key, value in self.options.items() if key in _HUB_OPTIONS}
        with _naming(name):
            try:
                return AutoDrafter.detect(name, **hub)
            except ValueError:
                if _is_other_model(name, hub):
                    return None
                raise

    @property
    def is_whole_model(self) -> bool:
        """Whether transformers could take it for an assistant."""
        return self.found is None or self.found.method == "draft_model"

    def load(self, target: PreTrainedModel) -> Drafter:
        """The drafter, bound to its target.

        Raises:
            UnfitDraftModel: a draft model that only transformers' own assisted generation may take.
            ValueError, OSError: it does not load, or does not fit.
        """
        with _naming(self):
            return AutoDrafter.from_pretrained(str(self), target=target, **self.options)


def is_name(assistant_model: Any) -> TypeGuard[str | os.PathLike]:
    """Whether an `assistant_model` argument is a name or a folder."""
    return isinstance(assistant_model, (str, os.PathLike))


# target -> name -> (device and dtype of the target, drafter)
_kept: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[tuple, Drafter]]] = WeakKeyDictionary()


def kept_drafter(target: PreTrainedModel, assistant_model: str | os.PathLike) -> Drafter:
    """The drafter of a name given to `generate` or to a pipeline's call: loaded once, and kept as long as the target.

    It is loaded again where the target has moved or changed its dtype since.

    Raises:
        ValueError, OSError: it is no drafter, or does not fit.
    """
    name, where = DrafterName(assistant_model), (target.device, target.dtype)
    kept = _kept.setdefault(target, {})
    if name not in kept or kept[name][0] != where:
        if name.found is None:
            raise ValueError(f"`assistant_model` is {str(name)!r}, which is no drafter; load that model and give it.")
        _check_served(target)
        kept[name] = (where, name.load(target))
    return kept[name][1]


def pipeline(
    task: str | None = None,
    model: str | PreTrainedModel | None = None,
    *,
    assistant_model: str | os.PathLike | Drafter | PreTrainedModel | None,
    assistant_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A transformers pipeline whose target and drafter are loaded together.

    Unlike `transformers.pipeline` it takes options for the drafter, and it needs no patch: where drafters are not
    installed, it enables them for this pipeline's model.

    Args:
        task, model, kwargs: of `transformers.pipeline`.
        assistant_model: a drafter, the name or folder of one, or what transformers takes.
        assistant_kwargs: of AutoDrafter.from_pretrained, beside a name: `revision`, `num_draft_tokens`, ...

    Raises:
        ValueError, OSError: the drafter cannot be found or does not fit; a name that is none is refused before the
            target is loaded.
    """
    from .dispatch import enable, is_installed

    if assistant_kwargs and not is_name(assistant_model):
        raise ValueError("`assistant_kwargs` is given beside a loaded `assistant_model`; give them when you load it.")
    tokenizer = kwargs.pop("assistant_tokenizer", None)
    assistant = _checked(assistant_model, tokenizer, **{"token": kwargs.get("token"), **(assistant_kwargs or {})})
    pipe = transformers.pipelines.pipeline(task, model, **kwargs)
    if assistant is not None:
        _give(pipe, assistant, tokenizer)
        if is_drafter(pipe.assistant_model) and not is_installed():
            enable(pipe.model)
    return pipe


def wrap_init(original: Callable) -> Callable:
    """`Pipeline.__init__` that takes drafters and their names; models as assistants go to the original."""

    @functools.wraps(original)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        assistant = kwargs.get("assistant_model")
        if assistant is None or _is_model(assistant) or not (self._pipeline_calls_generate and model.can_generate()):
            return original(self, model, *args, **kwargs)
        tokenizer = kwargs.pop("assistant_tokenizer", None)
        assistant = _checked(kwargs.pop("assistant_model"), tokenizer)
        original(self, model, *args, **kwargs)  # moves the model to its device
        _give(self, assistant, tokenizer)

    return __init__


def wrap_pipeline(original: Callable) -> Callable:
    """`transformers.pipeline` that looks at a drafter's name before it loads the target, and lends it the token.

    Whoever imported the function before it was wrapped still gets the drafter, from `Pipeline.__init__`.
    """

    @functools.wraps(original)
    def pipeline(*args: Any, **kwargs: Any) -> Any:
        from .dispatch import is_installed

        if is_installed() and "assistant_model" in kwargs:  # this function may be held beyond uninstall()
            tokenizer = kwargs.get("assistant_tokenizer")
            kwargs["assistant_model"] = _checked(kwargs["assistant_model"], tokenizer, token=kwargs.get("token"))
        return original(*args, **kwargs)

    return pipeline


def _checked(assistant: Any, tokenizer: Any | None, **options: Any) -> Any:
    """The assistant, a name as DrafterName, after every check that needs no target."""
    if is_name(assistant):
        assistant = assistant if isinstance(assistant, DrafterName) else DrafterName(assistant, **options)
    elif assistant is None or _is_model(assistant):
        return assistant
    elif not is_drafter(assistant):
        given = assistant.__name__ if isinstance(assistant, type) else repr(assistant)
        raise ValueError(f"`assistant_model` is {given}; give a drafter, as AutoDrafter returns it, a name or a model.")
    whole = isinstance(assistant, DrafterName) and assistant.is_whole_model
    if tokenizer is not None and not whole:
        raise ValueError("`assistant_tokenizer` is given beside a drafter; drafters share the target's tokenizer.")
    return assistant


def _give(pipe: Any, assistant: Any, tokenizer: Any | None) -> None:
    """Give a pipeline its assistant.

    Raises:
        ValueError, OSError: it cannot be loaded, or does not fit.
    """
    target = pipe.model
    name = assistant if isinstance(assistant, DrafterName) else None
    if name is None:
        for_transformers = _is_model(assistant)
    else:
        only_there = tokenizer is not None or why_not_served(target) is not None
        for_transformers = name.found is None or (name.is_whole_model and only_there)
    if for_transformers:
        return _give_model(pipe, assistant, tokenizer)
    _check_served(target)
    pipe.assistant_model, pipe.assistant_tokenizer = assistant, None
    passes_on = "assistant_model" in pipe._sanitize_parameters()[1]
    if name is not None:
        try:
            pipe.assistant_model = name.load(target)
        except UnfitDraftModel as reason:
            if not passes_on:
                raise
            warnings.warn(f"{reason} transformers' own assisted generation takes it instead.", stacklevel=4)
            _give_model(pipe, name, None)
    elif assistant.is_bound:
        assistant.check_bound_to(target)
    else:
        assistant.bind(target)
    if not passes_on:
        pipe._prepare_generate_kwargs = functools.partial(_generate_kwargs_with_assistant, pipe)


def _generate_kwargs_with_assistant(pipe: Any, generate_kwargs: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A pipeline's arguments of `generate`, where transformers leaves its assistant out (image-text-to-text)."""
    prepared = type(pipe)._prepare_generate_kwargs(pipe, generate_kwargs, **overrides)
    return {"assistant_model": pipe.assistant_model, **prepared}


def _give_model(pipe: Any, assistant: Any, tokenizer: Any | None) -> None:
    """As transformers does it."""
    assistant = str(assistant) if isinstance(assistant, DrafterName) else assistant
    load = transformers.pipelines.base.load_assistant_model
    pipe.assistant_model, pipe.assistant_tokenizer = load(pipe.model, assistant, tokenizer)


def _check_served(target: PreTrainedModel) -> None:
    reason = why_not_served(target)
    if reason is not None:
        raise ValueError(
            f"`assistant_model` is a drafter, and {type(target).__name__} is not served by drafters yet: {reason}."
        )


def _is_model(assistant: Any) -> bool:
    return hasattr(assistant, "config") and not is_drafter(assistant) and not isinstance(assistant, type)


def _is_other_model(name: str, hub: dict[str, Any]) -> bool:
    """Whether a name is a whole model of transformers, but no causal one: that one AutoDrafter would know, and what
    only calls itself one is a head, or damaged."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **hub)
        return any(hasattr(transformers, kind) and kind not in CAUSAL.values() for kind in config.architectures or ())
    except Exception:  # a config fails in all ways, and AutoDrafter has said what is wrong
        return False


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors say which argument they are about."""
    try:
        yield
    except (ValueError, OSError) as error:
        kind = next(kind for kind in (UnfitDraftModel, ValueError, OSError) if isinstance(error, kind))
        raise kind(f"`assistant_model` is {str(name)!r}: {error}") from error
