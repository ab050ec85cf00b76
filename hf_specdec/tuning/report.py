"""What a sweep writes: tables for machines and people, the options that it recommends, and figures."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import SpecConfig
from .front import Limits, choose, front_of
from .points import Estimate, Point
from .settings import Setting


@dataclass(frozen=True)
class Report:
    """The outcome of a sweep.

    Attributes:
        points: what was measured.
        skipped: settings that screening left out.
        limits: what the choice must keep to.
        asked: models, prompts and sampling.
        base: the drafter's other options.
    """

    points: list[Point]
    skipped: list[Setting]
    limits: Limits
    asked: dict[str, Any]
    base: SpecConfig

    @property
    def front(self) -> list[Point]:
        return front_of(self.points)

    @property
    def chosen(self) -> Point:
        return choose(self.points, self.limits)[0]

    @property
    def recommended(self) -> SpecConfig:
        """The options of the chosen setting."""
        return self.chosen.setting.config(self.base)

    def summary(self) -> str:
        """A markdown table of the front, and the choice in a sentence."""
        chosen, keeps = choose(self.points, self.limits)
        lines = [
            "| setting | tokens/s | 95% interval | speed-up | tau | p95 between tokens | KL a token | quality | law |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for point in self.front:
            speed, quality = point.speed, "" if point.quality is None else f"{point.quality.mean:.3f}"
            law = "lossless" if point.lossless else f"lossy ({point.bound})"
            lines.append(
                f"| {point.setting.key} | {speed.mean:.1f} | {speed.low:.1f} to {speed.high:.1f} | "
                f"{point.speed_up:.2f}x | {point.tau:.2f} | {point.itl_ms[1]:.1f} ms | {point.kl.mean:.4f} | "
                f"{quality} | {law} |"
            )
        what = "The fastest within the limits" if keeps else "No setting keeps to the limits; the nearest"
        if not self.limits.allow_loss:
            what += " (lossless, because no limit on loss was given)"
        lines += ["", f"{what}: {chosen.setting.key}, {chosen.speed_up:.2f}x."]
        if self.skipped:
            lines.append(f"Left out by screening: {'; '.join(setting.key for setting in self.skipped)}.")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """points.csv, pareto.json, report.md, recommended.json, and figures where matplotlib is installed."""
        front = self.front
        rows = [{"on_front": point in front, **_flat(point)} for point in self.points]
        with (folder / "points.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        chosen, keeps = choose(self.points, self.limits)
        whole = {
            "asked": self.asked,
            "limits": asdict(self.limits),
            "points": [{**_nested(point), "on_front": point in front} for point in self.points],
            "skipped": [setting._asdict() for setting in self.skipped],
            "chosen": {**chosen.setting._asdict(), "keeps_to_limits": keeps},
        }
        _write_json(folder / "pareto.json", whole)
        _write_json(folder / "recommended.json", asdict(self.recommended))
        note = ""
        try:
            from .figures import draw
        except ImportError:
            note = "\nFigures need matplotlib: pip install 'hf-specdec[plots]', and run this again.\n"
        else:
            draw(self.points, front, chosen, folder)
        (folder / "report.md").write_text(f"{self.summary()}\n{note}", encoding="utf-8")


def _nested(point: Point) -> dict[str, Any]:
    return {**point.setting._asdict(), **{k: _plain(v) for k, v in vars(point).items() if k != "setting"}}


def _flat(point: Point) -> dict[str, Any]:
    """One column a number; intervals as NAME, NAME_low and NAME_high."""
    row: dict[str, Any] = point.setting._asdict()
    for name, value in vars(point).items():
        if isinstance(value, Estimate):
            row |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
        elif name == "itl_ms":
            row |= {f"itl_ms_p{q}": ms for q, ms in zip((50, 95, 99), value, strict=True)}
        elif name == "accepted_per_position":
            row[name] = " ".join(f"{share:.4f}" for share in value)
        elif name != "setting":
            row[name] = value
    return row


def _plain(value: Any) -> Any:
    return {"mean": value.mean, "low": value.low, "high": value.high} if isinstance(value, Estimate) else value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
