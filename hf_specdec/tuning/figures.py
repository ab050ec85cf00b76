"""Figures of a sweep, as PNG files; matplotlib is imported here only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .points import Point
from .settings import WITHOUT_DRAFTS


def draw(points: Sequence[Point], front: Sequence[Point], chosen: Point, folder: Path) -> None:
    """front.png, heatmaps.png, acceptance.png and predicted.png."""
    drafting = [point for point in points if point.setting != WITHOUT_DRAFTS]
    figures: dict[str, Figure] = {"front": _front(points, front, chosen)}
    if drafting:
        figures |= {"heatmaps": _heatmaps(drafting), "acceptance": _acceptance(front), "predicted": _predicted(points)}
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=150)


def _front(points: Sequence[Point], front: Sequence[Point], chosen: Point) -> Figure:
    """Speed against merit; a solid line joins points of one effort and draft length, a dotted one those of one
    lenience and draft length."""
    figure, axes = _axes()
    for style, line_of in (
        ("-", lambda setting: (setting.effort, setting.num_draft_tokens)),
        (":", lambda setting: (setting.lenience, setting.num_draft_tokens)),
    ):
        for key in sorted({line_of(point.setting) for point in points}):
            line = [point for point in points if line_of(point.setting) == key]
            line.sort(key=lambda point: (point.setting.lenience, point.setting.effort))
            if len(line) > 1:
                kind = "effort" if style == "-" else "lenience"
                _plot(axes, line, style, f"{kind} {key[0]:g}, {key[1]} tokens")
    for point in points:
        xerr = [[point.merit.mean - point.merit.low], [point.merit.high - point.merit.mean]]
        yerr = [[point.speed.mean - point.speed.low], [point.speed.high - point.speed.mean]]
        color = "tab:red" if point is chosen else "black" if point in front else "lightgrey"
        axes.errorbar(point.merit.mean, point.speed.mean, xerr=xerr, yerr=yerr, fmt="o", color=color, zorder=3)
    axes.set_xlabel("quality" if chosen.quality is not None else "-KL a token (0 is lossless)")
    axes.set_ylabel("tokens/s")
    axes.set_title("black: the front, red: chosen")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)
    return figure


def _heatmaps(points: Sequence[Point]) -> Figure:
    """Effort by lenience: speed-up, tau and KL, each of the draft length that was fastest there."""
    efforts = sorted({point.setting.effort for point in points})
    levels = sorted({point.setting.lenience for point in points}, reverse=True)
    shown: dict[str, Callable[[Point], float]] = {
        "speed-up": lambda point: point.speed_up,
        "tau": lambda point: point.tau,
        "KL a token": lambda point: point.kl.mean,
    }
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        table = [[float("nan")] * len(levels) for _ in efforts]
        for row, effort in enumerate(efforts):
            for column, level in enumerate(levels):
                here = [p for p in points if (p.setting.effort, p.setting.lenience) == (effort, level)]
                if here:
                    table[row][column] = value(max(here, key=lambda point: point.speed.mean))
                    axes.text(column, row, f"{table[row][column]:.3g}", ha="center", va="center", color="tab:red")
        axes.imshow(table, aspect="auto", cmap="Greys")
        axes.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
        axes.set_yticks(range(len(efforts)), [str(effort) for effort in efforts])
        axes.set(title=title, xlabel="lenience", ylabel="effort")
    return figure


def _acceptance(front: Sequence[Point]) -> Figure:
    figure, axes = _axes()
    for point in front:
        if point.accepted_per_position:
            positions = range(1, len(point.accepted_per_position) + 1)
            axes.plot(positions, point.accepted_per_position, "o-", label=point.setting.key)
    axes.set(xlabel="drafted token", ylabel="share of verifications that accept it", ylim=(0, 1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)
    return figure


def _predicted(points: Sequence[Point]) -> Figure:
    figure, axes = _axes()
    axes.plot([p.predicted_speed for p in points], [p.speed.mean for p in points], "o", color="black")
    most = max(max(point.predicted_speed, point.speed.mean) for point in points)
    axes.plot([0, most], [0, most], ":", color="grey")
    axes.set(xlabel="predicted tokens/s", ylabel="measured tokens/s")
    return figure


def _plot(axes: Any, line: Sequence[Point], style: str, label: str) -> None:
    axes.plot([p.merit.mean for p in line], [p.speed.mean for p in line], style, linewidth=1, label=label)


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 5), layout="constrained")
    return figure, figure.subplots()
