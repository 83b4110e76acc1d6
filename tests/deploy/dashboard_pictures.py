"""Pictures of the dashboards, from their own queries against a real Prometheus that scrapes the real services.

    python -m tests.deploy.dashboard_pictures

The Overlap dashboard for run-ahead 0 and 1, with dummy kernels of a known length; the others with the bundled models.
Every panel is where the dashboard's JSON has it, drawn by matplotlib; this is not Grafana. Needs Debian's
`prometheus`; takes three minutes.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl

mpl.use("Agg")

from collections.abc import AsyncIterator, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from slipstream.benchmarks.runner import host, write_json
from tests.deploy.dashboard_queries import FoundPanel, boards, panels_of
from tests.deploy.observed_stack import Prometheus, Series, busy, find_prometheus, observed_stack

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
RESULTS = PICTURES / "dashboards_cpu.json"
DUMMY_MS = (1.0, 4.0)
NUM_CLIENTS = 8
INTERVAL_MS = 1000
RATE_INTERVAL = "5s"
WARM_UP_S = 12.0
"""Longer than a rate's interval, so that no curve begins with the server's start."""
OVERLAP = "slipstream-overlap.json"
DUMMIES = f"{NUM_CLIENTS} clients, dummy kernels of {DUMMY_MS[0]:g} + {DUMMY_MS[1]:g} ms, two CPU cores"
BUNDLED = f"{NUM_CLIENTS} clients for 4 slots, the bundled models, two CPU cores"
COLUMNS, COLUMN, ROW, HEAD = 24, 0.6, 0.42, 0.6
"""Grafana's grid, in inches."""
COLOURS = {"green": "#2f9e5b", "yellow": "#d69a00", "orange": "#e8743b", "red": "#d93a49", "blue": "#3b74d1"}
COLOURS["text"] = "#1d2433"
PALETTE = ("#4c86e8", "#e39a2d", "#3fa66b", "#a56fd6", "#2fa6b5", "#d9618c", "#8a7a66", "#7d8899")


@dataclass(frozen=True, slots=True)
class PanelResult:
    """A panel, and Prometheus' answer to each of its queries."""

    panel: FoundPanel
    results: tuple[tuple[Series, ...], ...]

    def named(self) -> dict[str, dict[float, float]]:
        """The finite points of each series that has some, value by time, under the name of the legend."""
        found = {}
        for query, answer in zip(self.panel.queries, self.results, strict=True):
            for series in answer:
                points = {time: value for time, value in series.points if math.isfinite(value)}
                if points:
                    found[_legend(query.legend, series.labels)] = points
        return found

    def means(self) -> dict[str, float]:
        """The mean of each series."""
        return {name: sum(points.values()) / len(points) for name, points in self.named().items()}

    def newest(self) -> dict[str, float]:
        """The newest value of each series."""
        return {name: points[max(points)] for name, points in self.named().items()}

    def overrides(self, name: str) -> dict[str, Any]:
        """The settings of one series."""
        return {
            entry["id"]: entry["value"]
            for override in self.panel.settings["fieldConfig"]["overrides"]
            if override["matcher"]["options"] == name
            for entry in override["properties"]
        }

    def colour_of(self, value: float) -> str:
        """The colour of the highest threshold that the value reaches."""
        steps = self.panel.settings["fieldConfig"]["defaults"]["thresholds"]["steps"]
        return [COLOURS[step["color"]] for step in steps if step["value"] is None or value >= step["value"]][-1]


def main(
    seconds: Annotated[float, typer.Option(help="How long each picture's server is watched.")] = 40.0,
    pictures: Annotated[Path, typer.Option(help="Folder for the pictures.")] = PICTURES,
    json_file: Annotated[Path, typer.Option("--json", help="The file for the panels' mean values.")] = RESULTS,
) -> None:
    """Runs the servers, asks the queries, draws."""
    if find_prometheus() is None:
        sys.exit("prometheus is not installed (Debian: apt-get install prometheus)")
    means = asyncio.run(_watch_all(seconds, pictures))
    write_json({"host": host(), "seconds": seconds, "dashboards": means}, json_file)


async def _watch_all(seconds: float, pictures: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Draws every dashboard; returns the mean of each series, by dashboard, panel and name."""
    means = {}

    async def watch(prometheus: Prometheus, name: str, file: str, about: str) -> None:
        board, end = boards()[file], time.time()
        results = []
        for panel in panels_of(board):
            queries = (query.filled(RATE_INTERVAL) for query in panel.queries)
            answers = [tuple(await prometheus.query_range(expr, end - seconds, end, 1.0)) for expr in queries]
            results.append(PanelResult(panel, tuple(answers)))
        draw(board["title"], about, results, pictures / f"{name}.png")
        means[name] = {one.panel.title: one.means() for one in results if one.panel.kind not in ("table", "heatmap")}

    for run_ahead in (0, 1):
        options = {"run_ahead": run_ahead, "slots": NUM_CLIENTS, "dummy_ms": DUMMY_MS}
        async with _running(seconds, 600, **options) as prometheus:
            about = f"Run-ahead {run_ahead}: {DUMMIES}"
            await watch(prometheus, f"overlap-run-ahead-{run_ahead}", OVERLAP, about)
    async with _running(seconds, 48, slots=4) as prometheus:
        for file in boards():
            if file != OVERLAP:
                await watch(prometheus, file.removeprefix("slipstream-").removesuffix(".json"), file, BUNDLED)
    return means


@asynccontextmanager
async def _running(seconds: float, max_new_tokens: int, **options: Any) -> AsyncIterator[Prometheus]:
    """A server that has been busy, and watched, for so long."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            observed_stack(Path(folder), interval_ms=INTERVAL_MS, **options) as observed,
            busy(observed.address, num_clients=NUM_CLIENTS, max_new_tokens=max_new_tokens),
        ):
            await asyncio.sleep(WARM_UP_S + seconds)
            yield observed.prometheus


def draw(title: str, about: str, results: Sequence[PanelResult], path: Path) -> None:
    """Draws every panel at the place that the dashboard gives it."""
    places = [result.panel.settings["gridPos"] for result in results]
    width, height = COLUMNS * COLUMN, HEAD + ROW * max(place["y"] + place["h"] for place in places)
    figure = plt.figure(figsize=(width, height), facecolor="#eef0f4")
    note = "drawn from this dashboard's own queries, answered by a real Prometheus; not Grafana"
    figure.text(0.01, 1 - 0.25 / height, title, fontsize=15, weight="bold")
    figure.text(0.01, 1 - 0.48 / height, f"{about}; {note}", fontsize=9, color="#5b6475")
    for result, place in zip(results, places, strict=True):
        left, bottom = place["x"] * COLUMN, height - HEAD - ROW * (place["y"] + place["h"])
        box = (left + 0.62, bottom + 0.38, place["w"] * COLUMN - 0.8, place["h"] * ROW - 0.78)
        axis = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        axis.set_title(result.panel.title, fontsize=9, weight="bold", loc="left")
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        _DRAWERS[result.panel.kind](axis, result)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_numbers(axis: Axes, result: PanelResult) -> None:
    axis.axis("off")
    found = result.newest() or {"no value": math.nan}
    size = 24 if len(found) == 1 else 12 if len(found) < 4 else 9
    for row, (name, value) in enumerate(found.items()):
        y = 1 - (row + 0.5) / len(found)
        colour = result.colour_of(value) if math.isfinite(value) else COLOURS["text"]
        axis.text(-0.1, y, say(value, result.panel.unit), fontsize=size, color=colour, weight="bold", va="center")
        if len(found) > 1:
            axis.text(1.05, y, name, fontsize=7, ha="right", va="center")


def _draw_bars(axis: Axes, result: PanelResult) -> None:
    found = result.newest()
    if not found:
        return
    axis.barh(list(found), list(found.values()), color=[result.colour_of(value) for value in found.values()])
    axis.set_xlim(0, result.panel.settings["fieldConfig"]["defaults"].get("max"))
    axis.invert_yaxis()
    axis.tick_params(axis="y", pad=-2)
    for row, value in enumerate(found.values()):
        axis.text(0, row, f"  {say(value, result.panel.unit)}", va="center", fontsize=8, weight="bold")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value, result.panel.unit)))


def _draw_lines(axis: Axes, result: PanelResult) -> None:
    defaults = result.panel.settings["fieldConfig"]["defaults"]
    is_stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    named, means = result.named(), result.means()
    if not named:
        return
    times = sorted({time for points in named.values() for time in points})
    below = np.zeros(len(times))
    for name, spare in zip(named, PALETTE * (1 + len(named) // len(PALETTE)), strict=False):
        overrides = result.overrides(name)
        fixed = overrides.get("color", {}).get("fixedColor", spare)
        style = {"color": COLOURS.get(fixed, fixed), "label": f"{name}  {say(means[name], result.panel.unit)}"}
        values = np.array([named[name].get(time, math.nan) for time in times])
        seconds = np.array(times) - times[0]
        if is_stacked and "custom.stacking" not in overrides:
            top = below + np.nan_to_num(values)
            axis.fill_between(seconds, below, top, alpha=0.85, linewidth=0, **style)
            below = top
        else:
            axis.plot(seconds, values, linewidth=1.3, **style)
    if defaults.get("min") is not None:
        axis.set_ylim(bottom=defaults["min"])
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value, result.panel.unit)))
    axis.xaxis.set_major_formatter("{x:.0f} s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6.5, loc="best", framealpha=0.7, ncols=1 + (len(named) > 6))


def _draw_heat_map(axis: Axes, result: PanelResult) -> None:
    bounds = sorted(((float(name), points) for name, points in result.named().items()), key=lambda each: each[0])
    times = sorted({time for _, points in bounds for time in points})
    totals = np.array([[points.get(time, 0.0) for time in times] for _, points in bounds])
    if not totals.size:
        return
    counts = np.clip(np.diff(totals, axis=0, prepend=0), 0, None)
    used = np.flatnonzero(counts.any(axis=1))
    rows = slice(max(0, used[0] - 1), used[-1] + 2) if used.size else slice(0)
    axis.pcolormesh(np.array(times) - times[0], np.arange(len(counts[rows])), counts[rows], cmap="OrRd")
    labels = [f"≤ {say(bound, result.panel.unit)}" if math.isfinite(bound) else "more" for bound, _ in bounds[rows]]
    axis.set_yticks(range(len(labels)), labels)
    axis.xaxis.set_major_formatter("{x:.0f} s")


def _draw_table(axis: Axes, result: PanelResult) -> None:
    axis.axis("off")
    order = result.panel.settings["transformations"][0]["options"]["indexByName"]
    columns = sorted(order, key=order.get)
    rows = [[series.labels.get(name, "") for name in columns] for found in result.results for series in found]
    if rows:
        axis.table(cellText=rows, colLabels=columns, loc="upper center", edges="horizontal").set_fontsize(7)


_DRAWERS = {
    "stat": _draw_numbers,
    "bargauge": _draw_bars,
    "timeseries": _draw_lines,
    "heatmap": _draw_heat_map,
    "table": _draw_table,
}


def say(value: float, unit: str) -> str:
    """A value with its unit, as people read it."""
    if not math.isfinite(value):
        return ""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        factor, name = next(((f, n) for f, n in ((1, "s"), (1e3, "ms")) if abs(value) * f >= 1), (1e6, "µs"))
        return f"{value * factor:.3g} {name}" if value else "0 s"
    if unit == "bytes":
        factor, name = next(((f, n) for f, n in ((2**30, "GiB"), (2**20, "MiB")) if value >= f), (2**10, "KiB"))
        return f"{value / factor:.3g} {name}" if value else "0"
    suffix = {"none": "", "reqps": " req/s", "cps": " /s"}.get(unit, f" {unit}")
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}") + suffix


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    if pattern == "__auto":
        return ", ".join(value for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), pattern).strip()


if __name__ == "__main__":
    typer.run(main)
