"""Draws the report of `serving`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {"none": "#4878a8", "standalone": "#e1812c", "eagle3": "#3a923a"}
NAMES = {"none": "no draft", "standalone": "standalone draft", "eagle3": "EAGLE-3 head"}
STYLES = {"p50": "-", "p90": "--", "p99": ":"}
PANELS = (
    ("ttft_ms", "to the first token, ms"),
    ("inter_token_ms", "between tokens, ms"),
    ("end_to_end_ms", "end to end, ms"),
)


def draw(report: dict[str, Any], path: Path) -> None:
    """`report` as it is in the JSON file: throughput and three latencies against the offered load."""
    figure, grid = plt.subplots(2, 2, figsize=(10.4, 7.2), layout="constrained")
    throughput, *latencies = grid.flat
    for algorithm, capacity in report["capacity"].items():
        runs = [run for run in report["runs"] if run["algorithm"] == algorithm]
        offered = [run["offered_requests_per_second"] for run in runs]
        colour = COLOURS[algorithm]
        tokens = [run["report"]["tokens_per_second"] for run in runs]
        throughput.plot(offered, tokens, "o-", color=colour, markersize=4, label=NAMES[algorithm])
        throughput.axhline(capacity["tokens_per_second"], color=colour, linewidth=0.8, linestyle="--")
        for panel, (field, _) in zip(latencies, PANELS, strict=True):
            for percentile, style in STYLES.items():
                values = [run["report"][field][percentile] for run in runs]
                panel.plot(offered, values, style, marker="o", markersize=3, color=colour)
    throughput.set_ylabel("output tokens/s")
    throughput.set_title("throughput (dashed: capacity, by saturation)", fontsize=10)
    throughput.legend(fontsize=8)
    for panel, (_, label) in zip(latencies, PANELS, strict=True):
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_ylabel(label)
        panel.set_title("p50 (solid), p90 (dashed), p99 (dotted)", fontsize=10)
    for panel in grid.flat:
        panel.set_xlabel("offered requests/s (Poisson)")
        panel.grid(alpha=0.3)
    lengths = report["lengths"]
    figure.suptitle(
        f"Open loop, ShareGPT-like lengths x {lengths['scale']:g}, T = {report['temperature']:g}; {report['host']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
