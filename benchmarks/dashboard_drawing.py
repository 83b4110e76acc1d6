"""Draws a dashboard's panels from the results of their queries, with matplotlib: where there is no Grafana."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from slipstream.benchmarks.dashboard_queries import FoundPanel, FoundQuery
    from slipstream.benchmarks.prometheus_server import Series

NOT_GRAFANA = "Drawn from the dashboard's own queries against a real Prometheus. This is not Grafana."
COLUMN_INCHES, ROW_INCHES, TITLE_INCHES, GAP_INCHES, LABEL_INCHES = 0.62, 0.38, 0.75, 0.3, 0.75
COLORS = {"green": "#3d9950", "yellow": "#c79a00", "orange": "#e07a1f", "red": "#d03a4a", "blue": "#3a6fc4"}
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


@dataclass(frozen=True, slots=True)
class PanelResult:
    """A panel, and what Prometheus answered to each of its queries."""

    panel: FoundPanel
    results: tuple[tuple[Series, ...], ...]

    def named(self) -> list[tuple[str, Series]]:
        """All series under the names that a legend shows."""
        return [
            (legend(query, series), series)
            for query, found in zip(self.panel.queries, self.results, strict=True)
            for series in found
        ]

    def newest(self) -> list[tuple[str, float]]:
        """The newest finite value of each series."""
        return [(name, value) for name, series in self.named() if (value := _newest(series)) is not None]

    def means(self) -> dict[str, float]:
        """The mean of the finite values of each series."""
        finite = {name: [v for _, v in series.points if math.isfinite(v)] for name, series in self.named()}
        return {name: sum(values) / len(values) for name, values in finite.items() if values}


def legend(query: FoundQuery, series: Series) -> str:
    """The name of a series: the query's legend with its labels filled in."""
    if query.legend == "__auto":
        return ", ".join(value for name, value in series.labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), query.legend).strip()


def draw_dashboard(board: dict[str, Any], subtitle: str, results: Sequence[PanelResult], path: Path) -> None:
    """Writes the picture: every panel at its place in the dashboard's grid."""
    places = [result.panel.settings["gridPos"] for result in results]
    headings = {panel["gridPos"]["y"]: panel["title"] for panel in board["panels"] if panel["type"] == "row"}
    rows = max(place["y"] + place["h"] for place in places)
    width, height = 24 * COLUMN_INCHES, rows * ROW_INCHES + TITLE_INCHES
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), dpi=100, facecolor="white")
        figure.text(0.012, 1 - 0.28 / height, board["title"], fontsize=15, weight="bold")
        figure.text(0.012, 1 - 0.55 / height, f"{subtitle}  {NOT_GRAFANA}", fontsize=9, color="#555555")
        for row, heading in headings.items():
            y = 1 - (TITLE_INCHES + (row + 0.7) * ROW_INCHES) / height
            figure.text(0.012, y, heading, fontsize=11, color="#555555")
        for place, result in zip(places, results, strict=True):
            left, bottom = place["x"] / 24, 1 - (TITLE_INCHES + (place["y"] + place["h"]) * ROW_INCHES) / height
            size = (place["w"] / 24, place["h"] * ROW_INCHES / height)
            margin = (LABEL_INCHES / width, GAP_INCHES / height)
            inner = (size[0] - 1.3 * margin[0], size[1] - 2.2 * margin[1])
            axes = figure.add_axes((left + margin[0], bottom + margin[1], *inner))
            axes.set_title(result.panel.title, fontsize=9, loc="left", weight="bold")
            _DRAWERS[result.panel.kind](axes, result)
        figure.savefig(path)
        plt.close(figure)


def say(value: float, unit: str) -> str:
    """A value with its unit, as people read it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        factor, name = next(((f, n) for f, n in ((1, "s"), (1e3, "ms")) if abs(value) * f >= 1), (1e6, "µs"))
        return f"{value * factor:.3g} {name}" if value else "0 s"
    if unit == "bytes":
        factor, name = next(((f, n) for f, n in ((2**30, "GiB"), (2**20, "MiB")) if value >= f), (2**10, "KiB"))
        return f"{value / factor:.3g} {name}"
    suffix = {"none": "", "reqps": " req/s", "cps": " /s"}.get(unit, f" {unit}")
    return f"{value:,.0f}{suffix}" if abs(value) >= 1000 else f"{value:.3g}{suffix}"


def _stat(axes: Axes, result: PanelResult) -> None:
    axes.axis("off")
    found = result.newest()
    size = 22 if len(found) == 1 else 13 if len(found) < 4 else 9
    for number, (name, value) in enumerate(found):
        y = 1 - (number + 0.5) / len(found)
        text = say(value, result.panel.unit)
        axes.text(0.02, y, text, fontsize=size, weight="bold", color=_color(result, value), va="center")
        if len(found) > 1:
            axes.text(0.98, y, name, fontsize=8, color="#555555", va="center", ha="right")


def _bars(axes: Axes, result: PanelResult) -> None:
    found = result.newest()[::-1]
    values = [value for _, value in found]
    axes.barh([name for name, _ in found], values, color=[_color(result, value) for value in values], height=0.6)
    axes.set_xlim(0, 1.25 * max([*values, 1e-9]))
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    for number, value in enumerate(values):
        axes.text(value, number, f" {say(value, result.panel.unit)}", va="center", fontsize=8)


def _graph(axes: Axes, result: PanelResult) -> None:
    settings = result.panel.settings["fieldConfig"]
    over = {item["matcher"]["options"] for item in settings["overrides"] if _unstacks(item)}
    fixed = {
        item["matcher"]["options"]: entry["value"]["fixedColor"]
        for item in settings["overrides"]
        for entry in item["properties"]
        if entry["id"] == "color"
    }
    named = [(name, _finite(series)) for name, series in result.named() if _newest(series) is not None]
    is_stacked = settings["defaults"]["custom"]["stacking"]["mode"] == "normal"
    stack = [(name, points) for name, points in named if is_stacked and name not in over]
    if stack:
        times = sorted({time for _, points in stack for time in points})
        heights = [[points.get(time, 0.0) for time in times] for _, points in stack]
        colors = [_shade(fixed.get(name), number) for number, (name, _) in enumerate(stack)]
        names = [_labelled(name, points, result) for name, points in stack]
        axes.stackplot(_since(times), heights, labels=names, colors=colors, alpha=0.85)
    for number, (name, points) in enumerate(named):
        if not is_stacked or name in over:
            color = "black" if name in over else _shade(fixed.get(name), number)
            label = _labelled(name, points, result)
            axes.plot(_since(list(points)), list(points.values()), label=label, color=color, linewidth=1.3)
    _axis(axes, result)
    if named:
        axes.legend(fontsize=7, loc="upper left", ncols=1 + (len(named) > 5), framealpha=0.7)


def _axis(axes: Axes, result: PanelResult) -> None:
    unit = result.panel.unit
    defaults = result.panel.settings["fieldConfig"]["defaults"]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    if defaults.get("min") is not None:
        axes.set_ylim(bottom=defaults["min"])
    if (axes.get_ylim()[1] - axes.get_ylim()[0]) < 1e-9:
        axes.set_ylim(0, 1)
    # Room for the legend above what it names.
    axes.set_ylim(top=axes.get_ylim()[0] + 1.35 * (axes.get_ylim()[1] - axes.get_ylim()[0]))
    for step in defaults["thresholds"]["steps"][1:]:
        if step["value"] < axes.get_ylim()[1]:
            axes.axhline(step["value"], color=COLORS.get(step["color"]), linewidth=0.7, linestyle="--")


def _heat_map(axes: Axes, result: PanelResult) -> None:
    buckets = sorted((float(series.labels["le"]), _finite(series)) for _, series in result.named())
    times = sorted({time for _, points in buckets for time in points})
    counts, below = [], dict.fromkeys(times, 0.0)
    for _, points in buckets:
        counts.append([max(0.0, points.get(time, 0.0) - below[time]) for time in times])
        below = {time: points.get(time, 0.0) for time in times}
    used = [number for number, row in enumerate(counts) if any(row)] or [0]
    first, last = max(0, used[0] - 1), min(len(counts), used[-1] + 2)
    axes.imshow(
        counts[first:last],
        aspect="auto",
        origin="lower",
        cmap="Oranges",
        extent=(0, max(times) - min(times), 0, last - first),
    )
    axes.grid(visible=False)
    axes.set_yticks([number + 1 for number in range(last - first)])
    axes.set_yticklabels([f"≤ {say(le, 's')}" if math.isfinite(le) else "more" for le, _ in buckets[first:last]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))


def _table(axes: Axes, result: PanelResult) -> None:
    axes.axis("off")
    organize = result.panel.settings["transformations"][0]["options"]
    columns = sorted(organize["indexByName"], key=organize["indexByName"].get)
    rows = [[series.labels.get(column, "") or "–" for column in columns] for _, series in result.named()]
    if rows:
        made = axes.table(cellText=rows, colLabels=columns, loc="upper center", cellLoc="left", edges="horizontal")
        made.auto_set_font_size(False)
        made.set_fontsize(8)
        made.scale(1, 1.4)


_DRAWERS: Mapping[str, Callable[[Axes, PanelResult], None]] = {
    "stat": _stat,
    "bargauge": _bars,
    "timeseries": _graph,
    "heatmap": _heat_map,
    "table": _table,
}


def _labelled(name: str, points: Mapping[float, float], result: PanelResult) -> str:
    return f"{name}: {say(sum(points.values()) / len(points), result.panel.unit)}"


def _color(result: PanelResult, value: float) -> str:
    steps: list[dict[str, Any]] = result.panel.settings["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[reached[-1]]


def _shade(fixed: str | None, number: int) -> str:
    return COLORS.get(fixed or "", fixed or f"C{number % 10}")


def _unstacks(override: dict[str, Any]) -> bool:
    return any(entry["id"] == "custom.stacking" for entry in override["properties"])


def _finite(series: Series) -> dict[float, float]:
    return {time: value for time, value in series.points if math.isfinite(value)}


def _newest(series: Series) -> float | None:
    return next((value for _, value in reversed(series.points) if math.isfinite(value)), None)


def _since(times: Sequence[float]) -> list[float]:
    return [time - times[0] for time in times]
