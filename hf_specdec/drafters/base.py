"""The contract of a drafter.

A `Drafter` holds weights and options, is loaded once and shared by many calls. A `DraftSession` holds everything of
one generate call. The loop knows nothing else about drafters, and a drafter knows nothing about the loop but the rows
it drafts for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..config import SpecConfig, check_names
from ..metrics import SpecStats
from ..verification import Draft, Verdict
from .request import DraftRequest
from .signals import Signals, TargetSignals

SPECIAL_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


class UnfitDraftModel(ValueError):
    """A whole model that cannot draft for the target here, but may in transformers' own assisted generation."""


class DraftSession(ABC):
    """All state of one generate call, caches included.

    Attributes:
        effort: passes for the next draft, with drafters that take effort; the loop may change it between rounds.
    """

    effort = 1

    @abstractmethod
    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        """Draft at most `budget[b]` tokens for row b; `verification` numbers the round and keys its noise."""

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        """Learn what became of the last draft. `rows` already holds the emitted tokens."""

    def close(self) -> None:
        """Free what the call held."""


class Drafter(nn.Module, ABC):
    """Weights and options of a drafter, without any state of a call.

    Attributes:
        method: the drafter's name in the registry.
        default_num_draft_tokens: draft length when the options leave it open.
        max_num_draft_tokens: the longest draft that it can make, None where there is no limit.
        takes_effort: whether it drafts in as many passes as `SpecConfig.effort` says, and not always in one.
        option_names: options of the method beside those of SpecConfig, as its constructor or loader takes them.
        spec_config: the options; may be replaced by another SpecConfig.
        config: the target's vocabulary size and special tokens, which pipelines compare with the target's.
        last_stats: statistics of the most recent call, None before the first.
    """

    __hf_specdec__ = True  # what `generate` looks for in `assistant_model`
    method: str
    default_num_draft_tokens = 5
    max_num_draft_tokens: int | None = None
    takes_effort = False
    option_names: tuple[str, ...] = ()

    def __init__(self, spec_config: SpecConfig | None = None, **options: Any) -> None:
        super().__init__()
        self.spec_config = type(self).check_options(spec_config=spec_config, **options)
        self.config = PreTrainedConfig()
        self.generation_config = GenerationConfig()
        self.last_stats: SpecStats | None = None
        self._bound_to: tuple | None = None

    @property
    def spec_config(self) -> SpecConfig:
        """The options."""
        return self._spec_config

    @spec_config.setter
    def spec_config(self, value: SpecConfig) -> None:
        if not isinstance(value, SpecConfig):
            raise ValueError(f"`spec_config` is a {type(value).__name__}; give a SpecConfig.")
        self._check_effort(value)
        self._spec_config = value

    @classmethod
    def _check_effort(cls, config: SpecConfig) -> None:
        if config.most_effort != 1 and not cls.takes_effort:
            raise ValueError(
                f"`effort` is {config.most_effort} and a {cls.method!r} drafter cannot spend more passes on a draft; "
                "only diffusion drafters can, leave it at 1."
            )

    @classmethod
    def check_options(cls, spec_config: SpecConfig | None = None, **options: Any) -> SpecConfig:
        """The options as a SpecConfig; a method with weights asks before it reads any.

        Args:
            spec_config: options to start from.
            options: fields of SpecConfig that replace them.

        Raises:
            ValueError: a name or a value is not one of them.
        """
        if spec_config is not None and not isinstance(spec_config, SpecConfig):
            raise ValueError(f"`spec_config` is a {type(spec_config).__name__}; give a SpecConfig.")
        check_names(options, [*cls.option_names, "spec_config", *(field.name for field in fields(SpecConfig))])
        config = (spec_config or SpecConfig()).with_options(**options)
        cls._check_effort(config)
        return config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A drafter is no model to call."""
        raise TypeError(
            "a drafter is given to generate(assistant_model=drafter), or to custom_generate=SpecGenerate(drafter)."
        )

    def bind(self, target: PreTrainedModel) -> Drafter:
        """Check that this drafter can draft for `target`, and copy the ids that must agree.

        Raises:
            ValueError: it cannot; the sentence says why.
        """
        text_config = target.config.get_text_config()
        special = {name: getattr(text_config, name, None) for name in SPECIAL_TOKENS}
        if self.signals.hidden_states:
            check_decoder_only(target, self.method)
        self.check_target(target)
        self.config = PreTrainedConfig(vocab_size=text_config.vocab_size, **special)
        self._bound_to = target_fingerprint(target)
        return self

    @property
    def is_bound(self) -> bool:
        return self._bound_to is not None

    def check_bound_to(self, target: PreTrainedModel) -> None:
        """Refuse to draft for a target of another shape than the one of `bind`."""
        if self._bound_to is None:
            raise ValueError(f"this {self.method!r} drafter is not bound to a target; call drafter.bind(model) first.")
        if self._bound_to != target_fingerprint(target):
            raise ValueError(
                f"this {self.method!r} drafter is bound to another target ({_describe(self._bound_to)}) than the model "
                f"that generates ({_describe(target_fingerprint(target))}); call drafter.bind(model) with this model."
            )

    def __getattr__(self, name: str) -> Any:
        # What transformers asks of an assistant model where our dispatcher is not installed.
        if name in ("generate", "_supports_logits_to_keep"):
            raise AttributeError(
                "generate() of this model does not know drafters: call hf_specdec.install() or "
                "hf_specdec.enable(model); HF_SPECDEC_NO_INSTALL keeps the import from doing so."
            )
        return super().__getattr__(name)

    @property
    def signals(self) -> TargetSignals:
        """What the target has to give after each forward."""
        return TargetSignals()

    @property
    def gives_confidence(self) -> bool:
        """Whether its drafts carry a confidence where the options ask for a schedule."""
        return False

    @property
    def device(self) -> torch.device | None:
        """Where the weights live; None for a method without weights."""
        parameter = next(self.parameters(), None)
        return None if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype | None:
        parameter = next(self.parameters(), None)
        return None if parameter is None else parameter.dtype

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise a ValueError where this drafter cannot serve `target`."""

    @abstractmethod
    def start(self, request: DraftRequest) -> DraftSession:
        """A session for one generate call."""


def check_decoder_only(target: PreTrainedModel, method: str) -> None:
    """Refuse encoder-decoders for a method that reads a target's hidden states."""
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder, and a {method!r} drafter reads the hidden states of "
            "decoder-only targets; take AutoDrafter.for_target(model, 'lookup') or a smaller model."
        )


def target_fingerprint(target: PreTrainedModel) -> tuple:
    """What must not change between `bind` and use: class, vocabulary, hidden size, layers."""
    target = getattr(target, "_orig_mod", target)  # a compiled model generates as what was compiled,
    if hasattr(target, "get_base_model"):  # and PEFT's as the model with the adapters in it
        target = target.get_base_model()
    config = target.config.get_text_config()
    return (
        type(target).__name__,
        config.vocab_size,
        getattr(config, "hidden_size", None),
        getattr(config, "num_hidden_layers", None),
    )


def _describe(fingerprint: tuple) -> str:
    name, vocab_size, hidden_size, num_layers = fingerprint
    return f"{name}, vocabulary {vocab_size}, hidden size {hidden_size}, {num_layers} layers"
