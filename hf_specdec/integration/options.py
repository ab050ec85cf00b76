"""A drafter's options as a generate call resolves them: rule, noise, draft lengths, schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from ..config import SpecConfig
from ..decoding.control import Control
from ..decoding.markers import Between
from ..drafters.base import Drafter
from ..scheduling import Schedule
from ..verification import LenientRule, Noise
from ..verification.lenient import Lenience
from .compat import DEFAULT_NUM_ASSISTANT_TOKENS


def call_noise(
    config: SpecConfig, generation_config: GenerationConfig, input_ids: torch.Tensor
) -> tuple[Noise | None, int | list[int] | None]:
    """The noise of a sampling call and its seed, drawn from torch's generator where none is given."""
    if not generation_config.do_sample:
        return None, None
    seed = config.seed if config.seed is not None else int(torch.randint(2**63 - 1, ()))
    return Noise.from_seed(seed, input_ids.shape[0], input_ids.device), seed


def resolve(drafter: Drafter, generation_config: GenerationConfig) -> SpecConfig:
    """The drafter's options with "auto" resolved for this call, as its sessions need them: without what only the
    verification reads, and with the most effort that a controller may ask for."""
    asked = drafter.spec_config
    config = replace(asked, lenience=None, lenient_between=None, controller=None, effort=asked.most_effort)
    if not generation_config.do_sample:
        return replace(config, rule="match", draft_sampling="greedy")
    rule = config.rule
    if rule == "auto":
        rule = "coupled" if asked.lenient_rule is None else "rejection"  # lenient rules take its drafts and its noise
    sampling = config.draft_sampling
    if sampling == "auto":
        sampling = "greedy" if rule == "match" else "sample"
    return replace(config, rule=rule, draft_sampling=sampling)


def verification_rule(drafter: Drafter, generation_config: GenerationConfig) -> str | LenientRule:
    """What verifies the drafts of this call; the loosest rule that a controller may take."""
    lenient = drafter.spec_config.lenient_rule
    if lenient is None or lenient.is_lossless(greedy=not generation_config.do_sample):
        return resolve(drafter, generation_config).rule
    return lenient


def described(drafter: Drafter, generation_config: GenerationConfig) -> dict[str, Any]:
    """What statistics say about the rule of this call."""
    config, greedy = drafter.spec_config, not generation_config.do_sample
    rule = verification_rule(drafter, generation_config)
    if isinstance(rule, str):
        return {"rule": rule}
    name, bound = repr(rule), rule.bound(greedy)
    if config.controller is not None:
        lenient = [repr(Lenience(level)) for level in config.controller.levels if level < 1.0]
        name = " or ".join([resolve(drafter, generation_config).rule, *lenient])
    if config.lenient_between is not None:
        start, end = (" ".join(map(str, marker)) for marker in config.lenient_between)
        name = f"{name} between tokens {start} and {end}"
        bound = f"{bound} between the markers, {'the best token' if greedy else 'h = p'} elsewhere"
    return {"rule": name, "lossless": False, "bound": bound}


def between_of(drafter: Drafter, num_rows: int) -> Between | None:
    """Where a lenient rule holds in the rows of a call."""
    if drafter.spec_config.lenient_between is None:
        return None
    start, end = drafter.spec_config.lenient_between
    return Between(start, end, num_rows)


def control_of(drafter: Drafter, config: SpecConfig) -> Control | None:
    """What carries a controller's settings into a call, whose options are resolved to `config`."""
    controller = drafter.spec_config.controller
    return None if controller is None else Control(controller, config.rule)


def schedule_of(config: SpecConfig) -> Schedule | None:
    """What cuts the drafts of a call; each row that is run by itself has its own."""
    return None if config.schedule is None else Schedule(config.schedule)


class DraftLengths(NamedTuple):
    """How many tokens a call drafts.

    Attributes:
        first: in the first round.
        longest: ever.
        adaptive: whether the governor may change it.
    """

    first: int
    longest: int
    adaptive: bool


def num_draft_tokens(drafter: Drafter, generation_config: GenerationConfig) -> DraftLengths:
    """Draft lengths of a call; a controller shortens them round by round.

    `generate(num_assistant_tokens=k)` wins. transformers fills in 20 where nothing was given, so 20 counts as unset.
    """
    k, config = getattr(generation_config, "num_assistant_tokens", None), drafter.spec_config
    if k is not None and k != DEFAULT_NUM_ASSISTANT_TOKENS:
        if config.controller is not None:
            raise ValueError(f"`num_assistant_tokens` is {k!r} beside a `controller`, which chooses it; leave it out.")
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k < 1024:
            raise ValueError(f"`num_assistant_tokens` is {k!r}; give an integer from 0 to 1023.")
        k = _within_limit(drafter, "`num_assistant_tokens` is", k)
        return DraftLengths(k, k, adaptive=False)
    if config.controller is not None:
        k = max(setting.num_draft_tokens for setting in config.controller.order)
        k = _within_limit(drafter, "the longest draft of `controller` is", k)
        return DraftLengths(k, k, adaptive=False)
    limit = drafter.max_num_draft_tokens
    if config.num_draft_tokens != "auto":
        k = _within_limit(drafter, "`num_draft_tokens` is", int(config.num_draft_tokens))
        return DraftLengths(k, k, adaptive=False)
    first = drafter.default_num_draft_tokens
    adaptive = config.governor != "off" and config.schedule is None  # a schedule cuts drafts itself
    longest = 2 * first if adaptive else first
    return DraftLengths(first, longest if limit is None else min(longest, limit), adaptive)


def _within_limit(drafter: Drafter, who: str, length: int) -> int:
    limit = drafter.max_num_draft_tokens
    if limit is not None and length > limit:
        raise ValueError(f"{who} {length}; this {drafter.method!r} drafter drafts at most {limit} tokens.")
    return length
