"""Which effort, lenience and draft length each round runs with, so that tokens come as fast as was promised.

The settings are those that `hf-specdec pareto` has measured, in order: the lossless ones first and the fastest of them
in front, then the lenient ones, the mildest first. Where the limit is missed the next one is tried, so that other
efforts and draft lengths come before any lenience. Where there is room the first one that is expected to keep to it
comes back.

Decisions use past rounds only, never the tokens they decide about, so a lossless setting stays exact under every rule.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..config import SpecConfig

_WINDOW = 16  # rounds at one setting that are judged together
_NEWEST = 0.5  # weight of a window's time against those before it at the same setting
_ROOM = 0.85  # share of the limit that an earlier setting is expected to keep to before it is taken again
_KEPT = 0.99  # of what a setting took beyond its stored time, after a window with room: so it is tried again one day


class Setting(NamedTuple):
    """One combination. A draft length of 0 is decoding without drafts."""

    effort: int
    lenience: float
    num_draft_tokens: int

    @property
    def key(self) -> str:
        """Names it in files, tables and statistics."""
        return f"effort {self.effort}, lenience {self.lenience:g}, {self.num_draft_tokens} tokens"

    def config(self, base: SpecConfig, seed: int | None = None) -> SpecConfig:
        """The options of a drafter that is to run so. Sampling, lenience 1 is the rule "rejection"."""
        between = base.lenient_between if self.lenience < 1.0 else None
        return base.with_options(**self._asdict(), rule="auto", governor="off", seed=seed, lenient_between=between)


class SLAController:
    """Keeps the time per output token (TPOT) of a drafter's calls under a limit; calls may share one.

    Each `_WINDOW` rounds the time of a token is measured: the median round over the tokens that a row got in one. That
    is what a setting takes that was just entered; a change at one that was kept is a change of all. A setting that has
    not been measured is expected to take what it is stored with, and to be worth a try.

    Args:
        settings: milliseconds a token of each (effort, lenience, num_draft_tokens), for instance as measured without
            other load; at least one has lenience 1.
        max_tpot_ms: the limit, in milliseconds; where no setting keeps to it the fastest is taken.
        allow_lenience: whether lenient settings may be taken at all. Text is lossless without.

    Attributes:
        order: the settings that may be taken, in the order in which they are preferred.
        setting: of the next round.
    """

    def __init__(
        self, settings: Mapping[tuple[int, float, int], float], *, max_tpot_ms: float, allow_lenience: bool = False
    ) -> None:
        self.max_tpot_ms = _checked_number("`max_tpot_ms` is", max_tpot_ms)
        if not isinstance(allow_lenience, bool):
            raise ValueError(f"`allow_lenience` is {allow_lenience!r}; give True or False.")
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"`settings` is a {type(settings).__name__}; give a dictionary from (effort, lenience, "
                "num_draft_tokens) to milliseconds a token."
            )
        stored = {
            _checked_setting(setting): _checked_number("`settings` has a time of", ms)
            for setting, ms in settings.items()
        }
        if not any(setting.lenience == 1.0 for setting in stored):
            raise ValueError("`settings` has none of lenience 1; give one that is lossless, (1, 1.0, 0) for instance.")
        self.allow_lenience = allow_lenience
        allowed = [setting for setting in stored if setting.lenience == 1.0 or allow_lenience]
        ordered = sorted(allowed, key=lambda setting: (-setting.lenience, stored[setting]))
        fastest = min(allowed, key=stored.__getitem__)
        self.order = [s for s in ordered if s in (ordered[0], fastest) or stored[s] <= self.max_tpot_ms]
        self._stored = stored
        self._load = 1.0
        self._known: dict[float, dict[Setting, float]] = {self._load: {}}  # milliseconds a token by load
        self.setting = self.order[0]
        self._begin(self.setting, is_measured=False)

    @classmethod
    def from_file(cls, path: str | os.PathLike, *, max_tpot_ms: float, allow_lenience: bool = False) -> SLAController:
        """A controller over the front in the pareto.json of a sweep, and all of its lossless settings: another one may
        be the fastest where the machine is busier. `lenient_between` of the sweep is not part of it."""
        with open(path, encoding="utf-8") as file:
            try:
                points = json.load(file)["points"]
                settings = {
                    (point["effort"], point["lenience"], point["num_draft_tokens"]): 1e3 / point["speed"]["mean"]
                    for point in points
                    if point["lossless"] or point["on_front"]
                }
            except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
                raise ValueError(f"{os.fspath(path)} is no pareto.json of `hf-specdec pareto` ({error!r}).") from error
        return cls(settings, max_tpot_ms=max_tpot_ms, allow_lenience=allow_lenience)

    @property
    def load(self) -> float:
        """What the machine has to do besides, in a unit of yours: the number of requests in flight, say. Set it when
        it changes: what was measured at a load is used again there, and for a new one that of the next smaller."""
        return self._load

    @load.setter
    def load(self, value: float) -> None:
        self._load = _checked_number("`load` is", value)
        if self._load not in self._known:
            smaller = max((load for load in self._known if load < self._load), default=None)
            self._known[self._load] = {} if smaller is None else dict(self._known[smaller])
        fitting = (setting for setting in self.order if self._expected(setting) <= self.max_tpot_ms)
        self._begin(next(fitting, min(self.order, key=self._expected)), is_measured=False)

    @property
    def levels(self) -> list[float]:
        """The leniences that rounds may run with, from 1 down."""
        return sorted({setting.lenience for setting in self.order}, reverse=True)

    def observe(self, setting: Setting, seconds: float, tokens: float) -> None:
        """Learn from a round.

        Args:
            setting: what it ran with. Rounds of another one than the present, of calls side by side, do not count.
            seconds: from the round before to its end.
            tokens: that a row was given, on average.
        """
        if setting != self.setting:
            return
        self._seconds.append(seconds)
        self._tokens += tokens
        if len(self._seconds) >= _WINDOW:
            self._learn(max(1e3 * median(self._seconds) * len(self._seconds) / self._tokens, 1e-9))
            following = self._best()
            self._begin(following, is_measured=following == self.setting)

    def _learn(self, tpot_ms: float) -> None:
        """Take in what a token took in the last window."""
        known = self._known[self._load]
        if self._is_measured:
            change = 1.0 + _NEWEST * (tpot_ms / known[self.setting] - 1.0)
            known.update({setting: change * before for setting, before in known.items()})
        else:
            known[self.setting] = tpot_ms
        if known[self.setting] <= _ROOM * self.max_tpot_ms:
            for setting in known.keys() - {self.setting}:
                known[setting] -= (1.0 - _KEPT) * max(0.0, known[setting] - self._stored[setting])

    def _best(self) -> Setting:
        """The first setting that is expected to keep to the limit, or else the fastest, if it is faster by far."""
        place = self.order.index(self.setting)
        for i, setting in enumerate(self.order):
            if self._expected(setting) <= (_ROOM if i < place else 1.0) * self.max_tpot_ms:
                return setting
        fastest = min(self.order, key=self._expected)
        return fastest if self._expected(fastest) <= _ROOM * self._expected(self.setting) else self.setting

    def _expected(self, setting: Setting) -> float:
        """Milliseconds a token, at the present load."""
        known = self._known[self._load]
        return known[setting] if setting in known else min(self._stored[setting], self.max_tpot_ms)

    def _begin(self, setting: Setting, is_measured: bool) -> None:
        """Begin a window; a setting that `is_measured` was kept from the one before."""
        self.setting, self._is_measured = setting, is_measured
        self._seconds: list[float] = []
        self._tokens = 0.0


def _checked_number(subject: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise ValueError(f"{subject} {value!r}; give a positive number.")
    return float(value)


def _checked_setting(value: Any) -> Setting:
    if isinstance(value, tuple) and len(value) == 3:
        effort, lenience, length = value
        if (
            all(isinstance(number, int) and not isinstance(number, bool) for number in (effort, length))
            and (isinstance(lenience, int | float) and not isinstance(lenience, bool))
            and (effort >= 1 and 0.0 < lenience <= 1.0 and 0 <= length < 1024)
        ):
            return Setting(effort, float(lenience), length)
    raise ValueError(
        f"`settings` has {value!r}; a setting is (effort, lenience, num_draft_tokens): a positive integer, a number "
        "above 0, at most 1, and an integer from 0 to 1023."
    )
