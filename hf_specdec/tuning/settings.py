"""The settings of a sweep: which combinations of effort, lenience and draft length a drafter can take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from ..drafters.base import Drafter
from ..scheduling.sla import Setting

WITHOUT_DRAFTS = Setting(1, 1.0, 0)


def settings_of(
    drafter: Drafter, effort: Sequence[int], lenience: Sequence[float], num_draft_tokens: Sequence[int]
) -> list[Setting]:
    """Every combination, decoding without drafts first; lenience 1 is among them whether it is named or not.

    Raises:
        ValueError: the drafter cannot take one of the values.
    """
    if drafter.spec_config.rule not in ("auto", "rejection"):
        raise ValueError(
            f"`rule` of the drafter is {drafter.spec_config.rule!r}; a sweep verifies by `lenience`, of which 1 is "
            "'rejection', leave it at 'auto'."
        )
    axes: dict[str, Sequence[Any]] = {
        "effort": effort,
        "lenience": lenience,
        "num_draft_tokens": num_draft_tokens,
    }
    for name, values in axes.items():
        if isinstance(values, str | int | float) or not values:
            raise ValueError(f"`{name}` is {values!r}; give a list of values to compare.")
    for value in lenience:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`lenience` has {value!r}; a sweep takes numbers above 0, at most 1.")
    for value in num_draft_tokens:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`num_draft_tokens` has {value!r}; a sweep takes positive integers.")
        if drafter.max_num_draft_tokens is not None and value > drafter.max_num_draft_tokens:
            raise ValueError(
                f"`num_draft_tokens` has {value}; this {drafter.method!r} drafter drafts at most "
                f"{drafter.max_num_draft_tokens} tokens."
            )
    levels = sorted({1.0, *map(float, lenience)}, reverse=True)
    combinations = product(dict.fromkeys(effort), levels, sorted(set(num_draft_tokens)))
    settings = [Setting(*combination) for combination in combinations]
    for setting in settings:
        type(drafter).check_options(spec_config=setting.config(drafter.spec_config))
    return [WITHOUT_DRAFTS, *settings]
