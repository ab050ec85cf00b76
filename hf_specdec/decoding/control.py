"""How the settings of an SLA controller reach the rounds of a call."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafters.base import DraftSession
from ..metrics import SpecStats
from ..scheduling import SLAController
from ..scheduling.sla import Setting
from ..verification import LenientRule
from ..verification.lenient import Lenience


class Control:
    """Asks the controller before each round, and tells it afterwards how long the round took.

    Args:
        controller: which calls may share.
        strict: the rule of lossless rounds.

    Attributes:
        setting: of the round; None before the first.
    """

    def __init__(self, controller: SLAController, strict: str) -> None:
        self.controller, self.strict = controller, strict
        self.setting: Setting | None = None

    def next_round(
        self, session: DraftSession, stats: SpecStats, seconds: float, emitted: Sequence[int]
    ) -> str | LenientRule:
        """The rule of the next round; nothing of it may have been drawn.

        Args:
            session: is told the effort.
            stats: counts the round.
            seconds: of the round that has ended.
            emitted: tokens that it gave each row.
        """
        if self.setting is not None:  # the prefill says nothing about a setting
            self.controller.observe(self.setting, seconds, sum(emitted) / len(emitted))
        self.setting = self.controller.setting
        session.effort = self.setting.effort
        stats.settings[self.setting.key] = stats.settings.get(self.setting.key, 0) + 1
        return self.strict if self.setting.lenience == 1.0 else Lenience(self.setting.lenience)

    @property
    def length(self) -> int:
        """Tokens to draft in the round."""
        return self.setting.num_draft_tokens if self.setting is not None else 0
