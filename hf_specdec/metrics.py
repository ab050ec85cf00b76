"""What a generate call did: counts per row, their sums, and where the time went."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class RowStats:
    """Counts of one row. `accepted_per_position[i]` counts the rounds that accepted drafted token i; `tv` and `kl` are
    sums over the row's tokens."""

    num_verifications: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_plain_steps: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tv: float = 0.0
    kl: float = 0.0

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one target forward.

        Args:
            drafted: drafted tokens that could still have been kept (a budget or a schedule ends them, a stop
                cuts them).
            accepted: drafted tokens that reached the text.
            emitted: tokens that reached the text.
        """
        self.num_verifications += 1
        self.num_plain_steps += drafted == 0
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.num_emitted += emitted
        self._count_positions(1 for _ in range(accepted))

    def __add__(self, other: RowStats) -> RowStats:
        summed = (field.name for field in fields(self) if field.name != "accepted_per_position")
        total = RowStats(**{name: getattr(self, name) + getattr(other, name) for name in summed})
        total._count_positions(self.accepted_per_position)
        total._count_positions(other.accepted_per_position)
        return total

    def _count_positions(self, counts: Any) -> None:
        for position, count in enumerate(counts):
            if position == len(self.accepted_per_position):
                self.accepted_per_position.append(0)
            self.accepted_per_position[position] += count


@dataclass
class SpecStats:
    """Statistics of a generate call; calls add up with `+`.

    The counts are sums over the rows: a forward over a batch is one verification for each of its unfinished rows. The
    prefill, which emits the first token, counts as a verification of an empty draft, so `num_emitted` is the number of
    new tokens and `mean_accepted_length` (tau) is `num_emitted / num_verifications`.

    Attributes:
        rows: the same counts per row.
        draft_time, verify_time, host_time: seconds spent drafting, in the target's forwards and the verification up
            to the host copy, and in the rest of the loop. Clocks are the host's: on a GPU, what drafting has launched
            but not finished is waited for, and counted, in verify_time.
        num_forwards: target forwards of the call, the prefill included.
        rule: the rule that verified; "match" in greedy decoding.
        lossless: whether the text is distributed exactly as the target's.
        bound: what a lenient rule guarantees for each token, with h the law it was drawn from and p the target's.
        kernels: the implementation of the verification that ran.
        cache, rollback: how the target's cache holds the rows and forgets rejected tokens.
        seed: the key of the noise (None in greedy decoding).
        settings: how many rounds ran at which setting of an SLA controller, the prefill left out.
    """

    rows: list[RowStats] = field(default_factory=list)
    draft_time: float = 0.0
    verify_time: float = 0.0
    host_time: float = 0.0
    num_forwards: int = 0
    rule: str = ""
    lossless: bool = True
    bound: str = ""
    kernels: str = ""
    cache: str = ""
    rollback: str = ""
    seed: int | list[int] | None = None
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> RowStats:
        return sum(self.rows, RowStats())

    @property
    def num_verifications(self) -> int:
        return sum(row.num_verifications for row in self.rows)

    @property
    def num_drafted(self) -> int:
        return sum(row.num_drafted for row in self.rows)

    @property
    def num_accepted(self) -> int:
        return sum(row.num_accepted for row in self.rows)

    @property
    def num_emitted(self) -> int:
        return sum(row.num_emitted for row in self.rows)

    @property
    def num_plain_steps(self) -> int:
        return sum(row.num_plain_steps for row in self.rows)

    @property
    def accepted_per_position(self) -> list[int]:
        return self.total.accepted_per_position

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """tau: emitted tokens per verification, the bonus token included."""
        return self.num_emitted / self.num_verifications if self.num_verifications else 0.0

    @property
    def mean_tv(self) -> float:
        """TV(h, p), averaged over the emitted tokens; 0 under a lossless rule.

        h and p are a token's laws given the text before it: the one it was drawn from, and the target's. In greedy
        decoding it is the share of tokens that were not the target's best.
        """
        return sum(row.tv for row in self.rows) / self.num_emitted if self.num_emitted else 0.0

    @property
    def mean_kl(self) -> float:
        """KL(h || p) in nats, averaged over the emitted tokens. In greedy decoding, where it would be infinite, it is
        the log-probability that a token had less than the best one."""
        return sum(row.kl for row in self.rows) / self.num_emitted if self.num_emitted else 0.0

    def __add__(self, other: SpecStats) -> SpecStats:
        """Sums over calls. Rows are added by index; descriptions that differ are joined with ' + '."""
        if not isinstance(other, SpecStats):
            return NotImplemented
        longer, shorter = sorted((self.rows, other.rows), key=len, reverse=True)
        return SpecStats(
            rows=[row + (shorter[i] if i < len(shorter) else RowStats()) for i, row in enumerate(longer)],
            draft_time=self.draft_time + other.draft_time,
            verify_time=self.verify_time + other.verify_time,
            host_time=self.host_time + other.host_time,
            num_forwards=self.num_forwards + other.num_forwards,
            rule=_joined(self.rule, other.rule),
            lossless=self.lossless and other.lossless,
            bound=_joined(self.bound, other.bound),
            kernels=_joined(self.kernels, other.kernels),
            cache=_joined(self.cache, other.cache),
            rollback=_joined(self.rollback, other.rollback),
            seed=self.seed if self.seed == other.seed else None,
            settings=dict(Counter(self.settings) + Counter(other.settings)),
        )

    def __radd__(self, other: Any) -> SpecStats:
        return self if other == 0 else NotImplemented  # so that sum() works

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        names = ("num_verifications", "num_drafted", "num_accepted", "num_emitted", "num_plain_steps")
        derived = ("accepted_per_position", "acceptance_rate", "mean_accepted_length", "mean_tv", "mean_kl")
        return {**{name: getattr(self, name) for name in names + derived}, **asdict(self)}

    def summary(self) -> str:
        """A few lines for people."""
        by_position = ", ".join(str(count) for count in self.accepted_per_position) or "none"
        law = "lossless"
        if not self.lossless:
            law = f"lossy ({self.bound}; measured: TV {self.mean_tv:.4f}, KL {self.mean_kl:.4f} a token)"
        return (
            f"{self.num_emitted} tokens in {self.num_verifications} verifications "
            f"(tau {self.mean_accepted_length:.2f}, {self.num_plain_steps} without a draft)\n"
            f"accepted {self.num_accepted} of {self.num_drafted} drafted tokens "
            f"({self.acceptance_rate:.0%}), by position: {by_position}\n"
            f"rule {self.rule}, {law}, kernels {self.kernels}, "
            f"cache {self.cache}, rollback {self.rollback}\n"
            f"draft {self.draft_time:.2f} s, verify {self.verify_time:.2f} s, host {self.host_time:.2f} s"
            + "".join(f"\n{count} rounds at {setting}" for setting, count in self.settings.items())
        )


def _joined(a: str, b: str) -> str:
    return a if a == b or not b else b if not a else f"{a} + {b}"
