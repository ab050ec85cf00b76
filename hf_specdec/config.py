"""How to speculate: the options of a drafter, `drafter.spec_config`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .scheduling import SLAController
from .verification.lenient import as_rule, rule_from_dict
from .verification.lenient_rule import LenientRule

_CHOICES = {
    "rule": ("auto", "match", "coupled", "rejection", "block"),
    "draft_sampling": ("auto", "greedy", "sample"),
    "governor": ("auto", "off"),
    "kernels": ("auto", "triton", "torch"),
}
_SCHEDULES = (None, "confidence", "lagged")
_NOT_YET = {
    "tree": "tree drafts",
}


@dataclass(frozen=True)
class SpecConfig:
    """Options of speculative decoding. Every one but `lenience` is lossless: it changes the time, never the law of the
    text.

    Args:
        num_draft_tokens: tokens drafted per verification. "auto" starts from the drafter's own length and lets the
            governor adapt it. `generate(num_assistant_tokens=k)` wins over this field.
        rule: how a draft is verified when sampling. "auto" is "coupled": the same seed gives the same text with any
            drafter, any draft length, and without a drafter. Greedy decoding always matches the argmax.
        draft_sampling: "greedy" drafts the drafter's most probable tokens, "sample" draws them. "auto" draws where the
            rule profits (`coupled`, `rejection`, `block`) and drafts greedily otherwise.
        governor: with `num_draft_tokens="auto"`, "auto" fits the length to what drafts gain and cost, down to none
            where they do not pay; "off" keeps the drafter's length. Costs are measured, so lengths differ between runs;
            below fp32, where a length can change a rounding, "off" makes runs repeatable.
        kernels: what verifies: "torch", or "triton", kernels for GPUs (the extra `kernels`). "auto" takes these where
            the target is on a GPU, the rule is lossless and Triton is installed, and torch elsewhere; "triton" refuses
            instead. `SpecStats.kernels` says what ran.
        seed: an integer of 64 bits, or one per row; None draws one from torch's generator. A fixed seed gives the same
            text at every call.
        schedule: which of the drafted tokens are verified, with drafters that give a confidence for each. "confidence"
            verifies as long as one more token pays, by what verifications were measured to cost; "lagged" takes the
            length that would have been best in the round before, which needs no wait for this round's confidence; a
            number from 0 to 1 stops before the first token whose confidence is below it. None verifies all of them.
            Measured costs differ between runs, and lengths with them.
        lenience: how much of the target's law may be lost for more accepted tokens. A number l above 0, at most 1,
            lets no token be more than 1 / l times as probable as under the target (greedy decoding: no token is less
            than l times as probable as the best one); 1 is `rule="rejection"`. Or one of the rules of
            `hf_specdec.lenient`. None, the default, is the only setting besides their strict ends that is lossless.
        lenient_between: (start, end), markers between which `lenience` holds, each a token id or a list of them, as for
            the thinking of a model: `tuple(tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))`. A token is
            drawn leniently if the last marker before it is the start, the prompt's included; everywhere else the text
            has the target's law. None: `lenience` holds everywhere.
        effort: passes of the drafter for a draft, with drafters that can take several (diffusion models); others refuse
            any number but 1.
        controller: chooses effort, lenience and draft length of each round from what past rounds took; leave these
            options out then. `SpecStats.settings` says how many rounds ran with which.
        tree: tree drafts, which this version does not have yet; anything but None is refused.
    """

    num_draft_tokens: int | str = "auto"
    rule: str = "auto"
    draft_sampling: str = "auto"
    effort: int = 1
    schedule: str | float | None = None
    controller: SLAController | None = None
    tree: Any = None
    lenience: float | LenientRule | None = None
    lenient_between: Any = None
    governor: str = "auto"
    kernels: str = "auto"
    seed: int | list[int] | None = None

    def __post_init__(self) -> None:
        k = self.num_draft_tokens
        if k != "auto" and (not isinstance(k, int) or isinstance(k, bool) or not 0 <= k < 1024):
            raise ValueError(f"`num_draft_tokens` is {k!r}; give 'auto' or an integer from 0 to 1023.")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")
        if not isinstance(self.effort, int) or isinstance(self.effort, bool) or self.effort < 1:
            raise ValueError(f"`effort` is {self.effort!r}; give a positive integer.")
        if self.schedule not in _SCHEDULES and not _is_threshold(self.schedule):
            raise ValueError(
                f"`schedule` is {self.schedule!r}; give 'confidence', 'lagged', a threshold from 0 to 1, or None."
            )
        for name, what in _NOT_YET.items():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)!r}; this version has no {what} yet, leave it at None."
                )
        if self.controller is not None:
            if not isinstance(self.controller, SLAController):
                raise ValueError(f"`controller` is a {type(self.controller).__name__}; give an SLAController, or None.")
            for name, default in (("effort", 1), ("num_draft_tokens", "auto"), ("lenience", None)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"`{name}` is {getattr(self, name)!r} beside a `controller`, which chooses it; leave one of "
                        "them out."
                    )
        if self.lenient_rule is not None and self.rule not in ("auto", "rejection"):
            lenient = f"`lenience` {self.lenience!r}" if self.controller is None else "a `controller` with lenience"
            raise ValueError(
                f"`rule` is {self.rule!r} beside {lenient}, which verifies by a rule of its own; leave one of them out."
            )
        if self.lenient_between is not None:
            object.__setattr__(self, "lenient_between", _markers(self.lenient_between))
            if self.controller is not None:
                may_lose, without = self.controller.allow_lenience, "a `controller` without `allow_lenience`"
            else:
                may_lose = self.lenient_rule is not None and not self.lenient_rule.is_lossless(greedy=False)
                without = f"`lenience` {self.lenience!r}"
            if not may_lose:
                raise ValueError(
                    f"`lenient_between` is {self.lenient_between!r} beside {without}, which loses nothing; allow a "
                    "loss, `lenience` below 1 for instance, or leave the markers out."
                )
        seeds = self.seed if isinstance(self.seed, list) else [self.seed]
        if self.seed is not None and not (seeds and all(map(_is_seed, seeds))):
            raise ValueError(
                f"`seed` is {self.seed!r}; give an integer of 64 bits, a list with one such integer a row, or None."
            )

    @property
    def lenient_rule(self) -> LenientRule | None:
        """The rule that `lenience` stands for; with a controller the loosest one it may take, None if lossless."""
        if self.controller is not None and self.controller.levels[-1] < 1.0:
            return as_rule(self.controller.levels[-1])
        return as_rule(self.lenience)

    @property
    def most_effort(self) -> int:
        """`effort`, or the most that a controller may ask for."""
        return self.effort if self.controller is None else max(setting.effort for setting in self.controller.order)

    def with_options(self, **options: Any) -> SpecConfig:
        """A copy with some options changed; unknown names are refused."""
        check_names(options, [field.name for field in fields(self)])
        return replace(self, **options)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> SpecConfig:
        """Read the options from a JSON object of field names and values.

        A lenient rule is an object of its name and its parameters, as `dataclasses.asdict` of a SpecConfig has it.
        """
        with open(path, encoding="utf-8") as file:
            try:
                options = json.load(file)
            except json.JSONDecodeError as error:
                raise ValueError(f"{os.fspath(path)} is not JSON: {error}.") from error
        if not isinstance(options, dict):
            raise ValueError(f"{os.fspath(path)} holds a JSON {type(options).__name__}; a SpecConfig is an object.")
        if isinstance(options.get("lenience"), dict):
            options["lenience"] = rule_from_dict(options["lenience"])
        return cls().with_options(**options)


def check_names(options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse unknown option names, with the nearest known one."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown option {name!r}{hint}; the options are {', '.join(sorted(known))}.")


def _markers(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, end) of an option `lenient_between`."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(
            f"`lenient_between` is {value!r}; give two markers, (start, end), each a token id or a list of them."
        )
    start, end = (tuple(marker) if isinstance(marker, list | tuple) else (marker,) for marker in value)
    for marker, given in zip((start, end), value, strict=True):
        if not marker or not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in marker
        ):
            raise ValueError(
                f"`lenient_between` has the marker {given!r}; give a token id, as tokenizer.convert_tokens_to_ids "
                "returns it, or a list of them."
            )
    shorter = min(len(start), len(end))
    if start[-shorter:] == end[-shorter:]:
        raise ValueError(
            f"`lenient_between` is {value!r}, and a text could end with both markers at once; give two that end apart."
        )
    return start, end


def _is_threshold(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64
