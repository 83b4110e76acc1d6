"""Draws pictures from result files, without measuring again.

    python benchmarks/charts.py benchmarks/results/decode_h200.json

draws decode_h200.png beside it. The name of a file is that of its benchmark and of the device.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import typer
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from slipstream.benchmarks import decode_report, overlap
from slipstream.benchmarks.load_results import DRAFTS as LOAD_DRAFTS
from slipstream.benchmarks.load_results import (
    PEER,
    PROMPT_WORKLOADS,
    CapacityResult,
    LoadResult,
    peer_results,
    throughput,
)
from slipstream.benchmarks.load_workloads import NAMES
from slipstream.benchmarks.result_files import read_json, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAFT_COLOUR, VERIFY_COLOUR, LOST_COLOUR, OTHER_COLOUR = "#6aa84f", "#4878a8", "#e1812c", "#3a923a"
STEP_PARTS = (
    ("draft_ms", "draft", DRAFT_COLOUR),
    ("verify_ms", "verify", VERIFY_COLOUR),
    ("bubble_ms", "bubble", LOST_COLOUR),
)
DRAFTS = {
    "none": ("no draft", VERIFY_COLOUR),
    "standalone": ("standalone draft", LOST_COLOUR),
    "standalone_auto": ("standalone draft, auto", OTHER_COLOUR),
    "eagle3": ("EAGLE-3 head", OTHER_COLOUR),
    "eagle3_auto": ("EAGLE-3 head, auto", "#8e63b0"),
}
LATENCIES = (
    ("ttft_ms", "to the first token, ms"),
    ("inter_token_ms", "between tokens, ms"),
    ("end_to_end_ms", "end to end, ms"),
)

SPEED = "tokens_per_second"
LOAD_PANELS = (
    (SPEED, f"tokens/s (all of them: {', '.join(PROMPT_WORKLOADS)})"),
    ("first_token_p50_ms", "first token, ms"),
    ("per_token_p50_ms", "per token, ms"),
)


def draw_overlap(measurements: Sequence[overlap.Measurement], path: Path) -> None:
    """A panel for each pair of dummy kernels, with and without MPS: busy and lost time per step, by order of steps.

    Dots are the repeats.
    """
    panels = sorted({(m.mps, m.draft_ms, m.verify_ms) for m in measurements}, reverse=True)
    columns = len({panel[1:] for panel in panels})
    rows = len(panels) // columns
    most_bars = max(len({m.title for m in measurements if m.mps == panel[0]}) for panel in panels)
    size = (columns * max(5.2, 0.75 * most_bars), 3.8 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=True):
        _draw_overlap_panel(axis, [m for m in measurements if (m.mps, m.draft_ms, m.verify_ms) == panel])
    first = measurements[0]
    _save(figure, path, f"Three processes, {first.num_clients} streaming clients; {first.host}")


def _draw_overlap_panel(axis: Axes, measurements: Sequence[overlap.Measurement]) -> None:
    names = list(dict.fromkeys(m.title for m in measurements))
    groups = [[m for m in measurements if m.title == name] for name in names]
    busy = [mean(m.busy_ms for m in group) for group in groups]
    axis.bar(names, busy, color=VERIFY_COLOUR, label="draft + verify busy")
    axis.bar(names, [mean(m.lost_ms for m in g) for g in groups], bottom=busy, color=LOST_COLOUR, label="lost")
    first = measurements[0]
    for column, group in enumerate(groups):
        axis.plot([column] * len(group), [m.step_ms for m in group], "k.", markersize=4)
        ratio = f"{mean(m.ratio for m in group):.3f}"
        axis.text(column, 0.02 * first.kernel_sum_ms, ratio, ha="center", color="white", fontsize=8)
    axis.axhline(first.kernel_sum_ms, color="k", linewidth=0.8, linestyle="--", label="length of the kernels")
    axis.set_ylabel("ms per step")
    where = f", {'MPS' if first.mps else 'no MPS'}" if first.device == "cuda" else ""
    axis.set_title(f"dummy kernels of {first.draft_ms:g} + {first.verify_ms:g} ms{where}")
    if len(names) > 4:
        axis.tick_params(axis="x", labelsize=7, rotation=30)
    axis.legend(fontsize=8, loc="upper right")


def draw_decode(measurements: Sequence[decode_report.Measurement], path: Path) -> None:
    """A panel for each shape that both modes ran: a step's parts by batch, in either; lines are floors."""
    shapes = list(dict.fromkeys(m.shape for m in measurements if m.mode == decode_report.ONE))
    figure, axes = plt.subplots(1, len(shapes), figsize=(6.4 * len(shapes), 4.0), layout="constrained", squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        groups: dict[tuple[int, str], list[decode_report.Measurement]] = {}
        for m in measurements:
            if m.shape == shape:
                groups.setdefault((m.batch, m.mode), []).append(m)
        for place, group in enumerate(groups.values()):
            _draw_step(axis, place, group)
        axis.set_xticks(range(len(groups)), [f"{batch}\n{mode.split()[0]}" for batch, mode in groups], fontsize=7)
        axis.set_xlabel("requests at a time, processes")
        axis.set_ylabel("ms per step")
        axis.set_title(shape)
    axes[0][0].legend(loc="upper left", fontsize=8)
    _save(figure, path, f"Decode steps; {measurements[0].host}")


def _draw_step(axis: Axes, place: int, group: Sequence[decode_report.Measurement]) -> None:
    bottom = 0.0
    for name, label, colour in STEP_PARTS:
        height = median(getattr(m, name) for m in group)
        axis.bar(place, height, bottom=bottom, color=colour, label=label if place == 0 else None)
        bottom += height
    draft, verify = group[0].draft_floor_ms, group[0].verify_floor_ms
    if draft is not None and verify is not None:
        label = "floor: bytes that must be read" if place == 0 else "_"  # no line of the legend
        axis.hlines(draft + verify, place - 0.4, place + 0.4, color="#222222", label=label)


def draw_serving(report: Mapping[str, Any], path: Path) -> None:
    """Throughput and three latencies against the offered load. `report`: the content of the JSON file."""
    figure, grid = plt.subplots(2, 2, figsize=(10.4, 7.2), layout="constrained")
    throughput, *latencies = grid.flat
    for algorithm, capacity in report["capacity"].items():
        runs = [run for run in report["runs"] if run["algorithm"] == algorithm]
        offered = [run["offered_requests_per_second"] for run in runs]
        name, colour = DRAFTS[algorithm]
        tokens = [run["report"]["tokens_per_second"] for run in runs]
        throughput.plot(offered, tokens, "o-", color=colour, markersize=4, label=name)
        throughput.axhline(capacity["tokens_per_second"], color=colour, linewidth=0.8, linestyle="--")
        for panel, (field, _) in zip(latencies, LATENCIES, strict=True):
            for percentile, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
                values = [run["report"][field][percentile] for run in runs]
                panel.plot(offered, values, style, marker="o", markersize=3, color=colour)
    throughput.set_ylabel("output tokens/s")
    throughput.set_title("throughput (dashed: capacity, by saturation)", fontsize=10)
    throughput.legend(fontsize=8)
    for panel, (_, label) in zip(latencies, LATENCIES, strict=True):
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_ylabel(label)
        panel.set_title("p50 (solid), p90 (dashed), p99 (dotted)", fontsize=10)
    for panel in grid.flat:
        panel.set_xlabel("offered requests/s (Poisson)")
        panel.grid(alpha=0.3)
    scale, temperature = report["lengths"]["scale"], report["temperature"]
    _save(figure, path, f"Open loop, ShareGPT-like lengths x {scale:g}, T = {temperature:g}; {report['host']}")


def draw_long_prompt(report: Mapping[str, Any], path: Path) -> None:
    """The stream's tokens over time, and gaps by the size of the steps. `report`: the content of the JSON file."""
    figure, (timeline, bars) = plt.subplots(1, 2, figsize=(10.4, 3.9), layout="constrained")
    results, prompt_tokens = report["results"], report["plan"]["prompt_tokens"]
    sizes = [r["max_batched_tokens"] for r in results]
    names = [str(size) if size == "auto" or size < prompt_tokens else "all at once" for size in sizes]
    for number, (name, result) in enumerate(zip(names, results, strict=True)):
        colour = plt.get_cmap("viridis")(number / max(1, len(results) - 1) * 0.9)
        times, counts = zip(*result["messages"], strict=True)
        before = sum(count for at, count in result["messages"] if at < 0)
        tokens = [total - before for total in itertools.accumulate(counts)]
        timeline.step(times, tokens, where="post", color=colour, linewidth=1.2, label=name)
        first_token_s = result["first_token_s"][0]
        at_first = max((total for at, total in zip(times, tokens, strict=True) if at <= first_token_s), default=0)
        timeline.plot(first_token_s, at_first, "o", color=colour, markersize=5)
    timeline.axvline(0, color="k", linewidth=0.8, linestyle="--")
    timeline.set_xlabel("s since the long prompt was sent (dot: its first token)")
    timeline.set_ylabel("tokens of the running stream")
    timeline.legend(fontsize=8, title="tokens a step", title_fontsize=8)
    timeline.grid(alpha=0.3)
    _draw_gaps(bars, results, names)
    _save(figure, path, f"A running stream while a prompt of {prompt_tokens:,} tokens comes in; {report['host']}")


def _draw_gaps(panel: Axes, results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for shift, field, colour, label in (
        (-0.2, "quiet_message_gap_ms", VERIFY_COLOUR, "alone"),
        (0.2, "message_gap_ms", LOST_COLOUR, "while the prompt comes in"),
    ):
        places = [column + shift for column in range(len(results))]
        panel.bar(places, [r[field]["p50"] for r in results], 0.38, color=colour, label=f"{label}, p50")
        panel.plot(places, [r[field]["p99"] for r in results], "_", color="k", markersize=14)
    panel.plot([], [], "_", color="k", markersize=14, label="p99")
    panel.set_yscale("log")
    panel.set_ylabel("ms between messages of the stream")
    labels = [f"{name}\n{mean(r['first_token_s']):.1f} s" for name, r in zip(names, results, strict=True)]
    panel.set_xticks(range(len(results)), labels, fontsize=8)
    panel.set_xlabel("tokens of a step; below: to the prompt's first token")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3, axis="y")


def draw_soak(report: Mapping[str, Any], path: Path) -> None:
    """Memory, threads and descriptors of every process over time, and free pages. `report`: content of the file."""
    figure, grid = plt.subplots(2, 2, figsize=(10.4, 6.4), layout="constrained", sharex=True)
    *panels, pages = grid.flat
    services = list(dict.fromkeys(usage["service"] for usage in report["usage"]))
    quantities = (("memory_mib", "resident memory, MiB"), ("threads", "threads"), ("descriptors", "descriptors"))
    for panel, (name, label) in zip(panels, quantities, strict=True):
        for usage in report["usage"]:
            colour = f"C{services.index(usage['service'])}"
            minutes = [at / 60 for at in usage["at_s"]]
            panel.plot(minutes, usage[name], ".-", color=colour, markersize=2, linewidth=0.8)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    for service in services:
        panels[0].plot([], [], color=f"C{services.index(service)}", label=service)
    panels[0].legend(fontsize=7, ncols=2, loc="center right")
    times, free, total, _ = zip(*report["quiet"], strict=True)
    pages.plot([at / 60 for at in times], free, "o-", color=VERIFY_COLOUR, label="free, without clients")
    pages.plot([at / 60 for at in times], total, "k--", linewidth=0.8, label="all")
    marks = [at / 60 for at, _, _ in report["faults"]]
    pages.plot(marks, [0.0] * len(marks), "|", color=LOST_COLOUR, label="a fault")
    pages.set_ylabel("KV pages")
    pages.legend(fontsize=7)
    for panel in grid.flat:
        panel.set_xlabel("minutes")
        panel.grid(alpha=0.3)
    what = f"{sum(report['outcomes'].values()):,} jobs, {len(marks)} faults"
    _save(figure, path, f"{what}: a line for each process; {report['host']}")


def draw_load(results: Sequence[LoadResult], path: Path) -> None:
    """Throughput and two latencies by workload, a row of panels for each model; lighter bars are the peer's."""
    models = list(dict.fromkeys(result.model for result in results))
    size = (15.0, 3.9 * len(models))
    figure, grid = plt.subplots(len(models), 3, figsize=size, layout="constrained", squeeze=False)
    for panels, model in zip(grid, models, strict=True):
        mine = [result for result in results if result.model == model]
        names = sorted({result.workload for result in mine}, key=NAMES.index)
        rows = {(result.draft, result.workload): asdict(result) for result in mine}
        for panel, (name, label) in zip(panels, LOAD_PANELS, strict=True):
            peer = {key: row for key, row in peer_results(model).items() if key[1] in names}
            _draw_bars(panel, names, name, rows, peer)
            panel.set_title(f"{model}: {label}", fontsize=9)
        panels[0].legend(fontsize=7)
    _save(figure, path, f"Whole requests (dots: p99); {results[0].host}")


def _draw_bars(panel: Axes, names: Sequence[str], quantity: str, *sides: Mapping[tuple[str, str], Any]) -> None:
    """`sides`: rows by draft and workload, ours and the peer's."""
    groups = [
        (draft, {name: row for (of, name), row in rows.items() if of == draft}, alpha, owner)
        for draft in LOAD_DRAFTS
        for rows, alpha, owner in zip(sides, (1.0, 0.45), ("", f", {PEER}"), strict=True)
        if any(of == draft for of, _ in rows)
    ]
    width = 0.8 / len(groups)
    for number, (draft, rows, alpha, owner) in enumerate(groups):
        mine = [(names.index(name) + (number + 0.5) * width - 0.4, row) for name, row in rows.items()]
        values = (throughput(row) if quantity == SPEED else row.get(quantity) for _, row in mine)
        places, heights = _known([(place, value) for (place, _), value in zip(mine, values, strict=True)])
        title, colour = DRAFTS[draft]
        panel.bar(places, heights, 0.95 * width, color=colour, alpha=alpha, label=title + owner)
        if quantity != SPEED:
            panel.plot(*_known([(at, row.get(quantity.replace("p50", "p99"))) for at, row in mine]), "k.", markersize=4)
    panel.set_xticks(range(len(names)), names, fontsize=8)
    panel.grid(alpha=0.3, axis="y")
    if quantity == LOAD_PANELS[1][0]:
        panel.set_yscale("log")


def _known(points: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float]]:
    return [x for x, y in points if y is not None], [y for _, y in points if y is not None]


def draw_capacity(results: Sequence[CapacityResult], path: Path) -> None:
    """Both latencies at every rate that was tried; dashed: their limits."""
    figure, panels = plt.subplots(1, 2, figsize=(10.4, 3.9), layout="constrained")
    for panel, name in zip(panels, ("first_token", "per_token"), strict=True):
        for result, style in zip(results, itertools.cycle(("o-", "s-", "^-", "v-")), strict=False):
            title, colour = DRAFTS[result.draft]
            latencies = [getattr(one, f"{name}_p99_ms") for one in result.tried]
            label = f"{result.model}, {title}: {result.rate:.1f}/s"
            panel.plot([one.rate for one in result.tried], latencies, style, color=colour, markersize=4, label=label)
        panel.axhline(getattr(results[0], f"{name}_ms"), color="k", linewidth=0.8, linestyle="--")
        panel.set_yscale("log")
        panel.set_xlabel("requests/s (Poisson)")
        panel.set_ylabel(f"{name.replace('_', ' ')}, p99, ms")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    _save(figure, path, f"Latencies by rate; {results[0].host}")


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


PICTURES: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], None]]] = {
    "overlap": (overlap.read_measurements, draw_overlap),
    "decode": (lambda path: read_rows(path, decode_report.Measurement), draw_decode),
    "serving": (lambda path: read_json(path, None), draw_serving),
    "long_prompt": (lambda path: read_json(path, None), draw_long_prompt),
    "load": (lambda path: read_rows(path, LoadResult.from_json), draw_load),
    "capacity": (lambda path: read_rows(path, CapacityResult.from_json), draw_capacity),
    "soak": (lambda path: read_json(path, None), draw_soak),
}
"""Reads the results of a benchmark, and draws them."""


def main(
    results: Annotated[list[Path], typer.Argument(help="Result files of overlap, decode, serving and so on.")],
) -> None:
    """Draws a picture beside each file."""
    for path in results:
        name = path.stem.rpartition("_")[0]
        if name not in PICTURES:
            raise typer.BadParameter(f"there are no pictures of {name}")
        read, draw = PICTURES[name]
        draw(read(path), path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
