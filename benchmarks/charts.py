"""Draws pictures from result files, without measuring again.

    python benchmarks/charts.py benchmarks/results/decode_h200.json

draws decode_h200.png beside it. The name of a file is that of its benchmark and of the device, if it needs one.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import matplotlib as mpl

mpl.use("Agg")

from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from slipstream.benchmarks.models import EAGLE3, EAGLE3_AUTO, NONE, ONE
from slipstream.benchmarks.overlap import lost_ms, title_of
from slipstream.benchmarks.runner import Row, grouped, load, median_of, read_json
from slipstream.benchmarks.workloads import NAMES

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

PROMPT_WORKLOADS = ("prefill", "ctx8k")
"""Their throughput is that of all tokens; of the others, that of the output."""
PEER = "vLLM 0.22.0"
PEER_RESULTS = "load_vllm_h200"
LOAD_DRAFTS = (EAGLE3, EAGLE3_AUTO, NONE)
KERNELS = ("draft_ms", "verify_ms")
SPEED = "tokens_per_second"
LOAD_PANELS = (
    (SPEED, f"tokens/s (all of them: {', '.join(PROMPT_WORKLOADS)})"),
    ("first_token_p50_ms", "first token, ms"),
    ("per_token_p50_ms", "per token, ms"),
)


def peer_results(model: str) -> dict[tuple[str, str], Row]:
    """What was measured of the peer, by draft and workload."""
    return {(row["draft"], row["workload"]): row for row in load(PEER_RESULTS)["results"] if row["model"] == model}


def throughput(row: Row) -> float | None:
    """The tokens per second that a row's workload is about; None if they were not measured."""
    return row.get("all_tokens_per_second" if row["workload"] in PROMPT_WORKLOADS else "tokens_per_second")


def mean_of(rows: Iterable[Row], name: str) -> float:
    """The mean of a figure."""
    return float(mean(row[name] for row in rows))


def _panels(num_rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A picture with panels in a grid, and the panels."""
    return plt.subplots(num_rows, columns, figsize=(width, height), layout="constrained", squeeze=False)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_overlap(rows: Sequence[Row], path: Path) -> None:
    """A panel for each pair of dummy kernels, with and without MPS: busy and lost time per step, by order of steps.

    Dots are the repeats.
    """
    groups = grouped([row | {"title": title_of(row), "lost_ms": lost_ms(row)} for row in rows], "mps", *KERNELS)
    keys = sorted(groups, reverse=True)
    columns = len({key[1:] for key in keys})
    most_bars = max(len(grouped(groups[key], "title")) for key in keys if key[0] == keys[0][0])
    num_rows = len(keys) // columns
    figure, axes = _panels(num_rows, columns, columns * max(5.2, 0.75 * most_bars), 3.8 * num_rows)
    for axis, key in zip(axes.flat, keys, strict=True):
        _draw_overlap_panel(axis, groups[key])
    _save(figure, path, f"Three processes, {rows[0]['num_clients']} streaming clients; {rows[0]['host']}")


def _draw_overlap_panel(axis: Axes, rows: Sequence[Row]) -> None:
    groups = {title: group for (title,), group in grouped(rows, "title").items()}
    first, busy = rows[0], [mean_of(group, "busy_ms") for group in groups.values()]
    lost = [mean_of(group, "lost_ms") for group in groups.values()]
    axis.bar([*groups], busy, color=VERIFY_COLOUR, label="draft + verify busy")
    axis.bar([*groups], lost, bottom=busy, color=LOST_COLOUR, label="lost")
    for column, group in enumerate(groups.values()):
        axis.plot([column] * len(group), [row["step_ms"] for row in group], "k.", markersize=4)
        height, ratio = 0.02 * first["kernel_sum_ms"], f"{mean_of(group, 'ratio'):.3f}"
        axis.text(column, height, ratio, ha="center", color="white", fontsize=8)
    axis.axhline(first["kernel_sum_ms"], color="k", linewidth=0.8, linestyle="--", label="length of the kernels")
    where = f", {'MPS' if first['mps'] else 'no MPS'}" if first["device"] == "cuda" else ""
    axis.set(ylabel="ms per step", title=f"dummy kernels of {first['draft_ms']:g} + {first['verify_ms']:g} ms{where}")
    if len(groups) > 4:
        axis.tick_params(axis="x", labelsize=7, rotation=30)
    axis.legend(fontsize=8, loc="upper right")


def draw_decode(rows: Sequence[Row], path: Path) -> None:
    """A panel for each shape that both modes ran: a step's parts by batch, in either; lines are floors."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows if row["mode"] == ONE))
    figure, axes = _panels(1, len(shapes), 6.4 * len(shapes), 4.0)
    for axis, shape in zip(axes[0], shapes, strict=True):
        groups = grouped([row for row in rows if row["shape"] == shape], "batch", "mode")
        for place, group in enumerate(groups.values()):
            _draw_step(axis, place, group)
        axis.set_xticks(range(len(groups)), [f"{batch}\n{mode.split()[0]}" for batch, mode in groups], fontsize=7)
        axis.set(xlabel="requests at a time, processes", ylabel="ms per step", title=shape)
    axes[0][0].legend(loc="upper left", fontsize=8)
    _save(figure, path, f"Decode steps; {rows[0]['host']}")


def _draw_step(axis: Axes, place: int, group: Sequence[Row]) -> None:
    bottom = 0.0
    for name, label, colour in STEP_PARTS:
        height = median_of(group, name)
        axis.bar(place, height, bottom=bottom, color=colour, label=label if place == 0 else None)
        bottom += height
    draft, verify = group[0]["draft_floor_ms"], group[0]["verify_floor_ms"]
    if draft is not None and verify is not None:
        label = "floor: bytes that must be read" if place == 0 else "_"  # no line of the legend
        axis.hlines(draft + verify, place - 0.4, place + 0.4, color="#222222", label=label)


def _finish(panel: Axes, legend: float | None = None, axis: Literal["both", "y"] = "both", **labels: Any) -> None:
    """Labels a panel. `legend`: the size of its letters; None: the panel has none."""
    panel.set(**labels)
    panel.grid(alpha=0.3, axis=axis)
    if legend is not None:
        panel.legend(fontsize=legend)


def draw_serving(report: Row, path: Path) -> None:
    """Throughput and three latencies against the offered load. `report`: the content of the JSON file."""
    figure, grid = _panels(2, 2, 10.4, 7.2)
    speed, *latencies = grid.flat
    for (algorithm,), runs in grouped(report["runs"], "algorithm").items():
        offered = [run["offered_requests_per_second"] for run in runs]
        name, colour = DRAFTS[algorithm]
        speed.plot(offered, [run["report"][SPEED] for run in runs], "o-", color=colour, markersize=4, label=name)
        speed.axhline(report["capacity"][algorithm][SPEED], color=colour, linewidth=0.8, linestyle="--")
        for panel, (field, _) in zip(latencies, LATENCIES, strict=True):
            for percentile, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
                values = [run["report"][field][percentile] for run in runs]
                panel.plot(offered, values, style, marker="o", markersize=3, color=colour)
    about = "offered requests/s (Poisson)"
    title = "throughput (dashed: capacity, by saturation)"
    _finish(speed, 8, xlabel=about, ylabel="output tokens/s", title=title)
    for panel, (_, label) in zip(latencies, LATENCIES, strict=True):
        title = "p50 (solid), p90 (dashed), p99 (dotted)"
        _finish(panel, xlabel=about, yscale="log", ylabel=label, title=title)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    scale, temperature = report["lengths"]["scale"], report["temperature"]
    _save(figure, path, f"Open loop, ShareGPT-like lengths x {scale:g}, T = {temperature:g}; {report['host']}")


def draw_long_prompt(report: Row, path: Path) -> None:
    """The stream's tokens over time, and gaps by the size of the steps. `report`: the content of the JSON file."""
    figure, ((timeline, bars),) = _panels(1, 2, 10.4, 3.9)
    results, prompt_tokens = report["results"], report["plan"]["prompt_tokens"]
    sizes = [r["max_batched_tokens"] for r in results]
    names = [str(size) if size == "auto" or size < prompt_tokens else "all at once" for size in sizes]
    for number, (name, result) in enumerate(zip(names, results, strict=True)):
        shade = plt.get_cmap("viridis")(number / max(1, len(results) - 1) * 0.9)
        times, counts = zip(*result["messages"], strict=True)
        totals = np.cumsum(counts) - sum(count for at, count in result["messages"] if at < 0)
        timeline.step(times, totals, where="post", color=shade, linewidth=1.2, label=name)
        first_token_s = result["first_token_s"][0]
        at_first = max((total for at, total in zip(times, totals, strict=True) if at <= first_token_s), default=0)
        timeline.plot(first_token_s, at_first, "o", color=shade, markersize=5)
    timeline.axvline(0, color="k", linewidth=0.8, linestyle="--")
    about = "s since the long prompt was sent (dot: its first token)"
    _finish(timeline, 8, xlabel=about, ylabel="tokens of the running stream")
    timeline.get_legend().set_title("tokens a step")
    for shift, field, colour, label in (
        (-0.2, "quiet_message_gap_ms", VERIFY_COLOUR, "alone"),
        (0.2, "message_gap_ms", LOST_COLOUR, "while the prompt comes in"),
    ):
        places = [column + shift for column in range(len(results))]
        bars.bar(places, [r[field]["p50"] for r in results], 0.38, color=colour, label=f"{label}, p50")
        bars.plot(places, [r[field]["p99"] for r in results], "_", color="k", markersize=14)
    bars.plot([], [], "_", color="k", markersize=14, label="p99")
    labels = [f"{name}\n{mean(r['first_token_s']):.1f} s" for name, r in zip(names, results, strict=True)]
    bars.set_xticks(range(len(results)), labels, fontsize=8)
    about = "tokens of a step; below: to the prompt's first token"
    _finish(bars, 8, "y", yscale="log", ylabel="ms between messages of the stream", xlabel=about)
    _save(figure, path, f"A running stream while a prompt of {prompt_tokens:,} tokens comes in; {report['host']}")


def draw_soak(report: Row, path: Path) -> None:
    """Memory, threads and descriptors of every process over time, and free pages. `report`: content of the file."""
    figure, grid = _panels(2, 2, 10.4, 6.4)
    *panels, pages = grid.flat
    services = list(dict.fromkeys(usage["service"] for usage in report["usage"]))
    quantities = (("memory_mib", "resident memory, MiB"), ("threads", "threads"), ("descriptors", "descriptors"))
    for panel, (name, label) in zip(panels, quantities, strict=True):
        for usage in report["usage"]:
            shade, minutes = f"C{services.index(usage['service'])}", [at / 60 for at in usage["at_s"]]
            panel.plot(minutes, usage[name], ".-", color=shade, markersize=2, linewidth=0.8)
        _finish(panel, xlabel="minutes", ylabel=label, ylim=(0, None))
    for service in services:
        panels[0].plot([], [], color=f"C{services.index(service)}", label=service)
    panels[0].legend(fontsize=7, ncols=2, loc="center right")
    times, free, total, _ = zip(*report["quiet"], strict=True)
    pages.plot([at / 60 for at in times], free, "o-", color=VERIFY_COLOUR, label="free, without clients")
    pages.plot([at / 60 for at in times], total, "k--", linewidth=0.8, label="all")
    marks = [at / 60 for at, _, _ in report["faults"]]
    pages.plot(marks, [0.0] * len(marks), "|", color=LOST_COLOUR, label="a fault")
    _finish(pages, 7, xlabel="minutes", ylabel="KV pages")
    what = f"{sum(report['outcomes'].values()):,} jobs, {len(marks)} faults"
    _save(figure, path, f"{what}: a line for each process; {report['host']}")


def draw_load(results: Sequence[Row], path: Path) -> None:
    """Throughput and two latencies by workload, a row of panels for each model; lighter bars are the peer's."""
    models = list(dict.fromkeys(result["model"] for result in results))
    figure, grid = _panels(len(models), 3, 15.0, 3.9 * len(models))
    for panels, model in zip(grid, models, strict=True):
        rows = {(result["draft"], result["workload"]): result for result in results if result["model"] == model}
        names = sorted({workload for _, workload in rows}, key=NAMES.index)
        peer = {key: row for key, row in peer_results(model).items() if key[1] in names}
        for panel, (name, label) in zip(panels, LOAD_PANELS, strict=True):
            _draw_bars(panel, names, name, rows, peer)
            panel.set_title(f"{model}: {label}", fontsize=9)
        panels[0].legend(fontsize=7)
    _save(figure, path, f"Whole requests (dots: p99); {results[0]['host']}")


def _draw_bars(panel: Axes, names: Sequence[str], quantity: str, *sides: Mapping[tuple[str, str], Row]) -> None:
    """`sides`: rows by draft and workload, ours and the peer's. What was not measured has no bar."""
    groups = [
        (draft, [rows.get((draft, name), {"workload": name}) for name in names], alpha, owner)
        for draft in LOAD_DRAFTS
        for rows, alpha, owner in zip(sides, (1.0, 0.45), ("", f", {PEER}"), strict=True)
        if any(of == draft for of, _ in rows)
    ]
    width = 0.8 / len(groups)
    for number, (draft, rows, alpha, owner) in enumerate(groups):
        places = np.arange(len(names)) + (number + 0.5) * width - 0.4
        title, colour = DRAFTS[draft]
        values = [throughput(row) if quantity == SPEED else row.get(quantity) for row in rows]
        heights = np.array(values, dtype=float)  # NaN, which is not drawn, for None
        panel.bar(places, heights, 0.95 * width, color=colour, alpha=alpha, label=title + owner)
        if quantity != SPEED:
            ends = [row.get(quantity.replace("p50", "p99")) for row in rows]
            panel.plot(places, np.array(ends, dtype=float), "k.", markersize=4)
    panel.set_xticks(range(len(names)), names, fontsize=8)
    _finish(panel, axis="y", yscale="log" if quantity == LOAD_PANELS[1][0] else "linear")


def draw_capacity(results: Sequence[Row], path: Path) -> None:
    """Both latencies at every rate that was tried; dashed: their limits."""
    figure, (panels,) = _panels(1, 2, 10.4, 3.9)
    for panel, name in zip(panels, ("first_token", "per_token"), strict=True):
        for result, style in zip(results, itertools.cycle(("o-", "s-", "^-", "v-")), strict=False):
            title, colour = DRAFTS[result["draft"]]
            rates, latencies = ([one[key] for one in result["tried"]] for key in ("rate", f"{name}_p99_ms"))
            label = f"{result['model']}, {title}: {result['rate']:.1f}/s"
            panel.plot(rates, latencies, style, color=colour, markersize=4, label=label)
        panel.axhline(results[0][f"{name}_ms"], color="k", linewidth=0.8, linestyle="--")
        _finish(panel, yscale="log", xlabel="requests/s (Poisson)", ylabel=f"{name.replace('_', ' ')}, p99, ms")
    panels[0].legend(fontsize=7)
    _save(figure, path, f"Latencies by rate; {results[0]['host']}")


def draw_draft_choice(rows: Sequence[Row], path: Path) -> None:
    """A panel for each survival curve: a line for each batch, by the fixed number of draft tokens; dashed: chosen."""
    curves = grouped(rows, "curve")
    figure, (panels,) = _panels(1, len(curves), 3.4 * len(curves), 3.6)
    for panel, ((curve,), cells) in zip(panels, curves.items(), strict=True):
        for cell in cells:
            best = max(cell["fixed"].values())
            numbers = [int(name.removeprefix("K = ")) for name in cell["fixed"]]
            shares = [tokens / best for tokens in cell["fixed"].values()]
            (line,) = panel.plot(numbers, shares, "o-", markersize=3, label=f"{cell['batch']} at once")
            chosen = cell["tokens_per_second"] / best
            panel.axhline(chosen, color=line.get_color(), linewidth=0.9, linestyle="--")
        _finish(panel, xlabel="K for all sequences", title=curve, xticks=(0, 5, 10, 15), ylim=(0.2, 1.08))
    panels[0].set_ylabel("tokens/s, as a share of the best K's")
    panels[-1].legend(fontsize=7)
    _save(figure, path, "Simulated with the times of an H200: every K for all sequences; dashed: as many as pay")


PICTURES: dict[str, Callable[[Any, Path], None]] = {
    draw.__name__.removeprefix("draw_"): draw
    for draw in (
        *(draw_overlap, draw_decode, draw_serving, draw_long_prompt, draw_load, draw_capacity, draw_soak),
        draw_draft_choice,
    )
}
"""Draws the content of a benchmark's result file."""


def main(
    results: Annotated[list[Path], typer.Argument(help="Result files of overlap, decode, serving and so on.")],
) -> None:
    """Draws a picture beside each file."""
    for path in results:
        name = path.stem if path.stem in PICTURES else path.stem.rpartition("_")[0]
        if name not in PICTURES:
            raise typer.BadParameter(f"there are no pictures of {name}")
        PICTURES[name](read_json(path), path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
