"""Draws the measurements of `decode`."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from slipstream.benchmarks.decode_report import Measurement

PARTS = (("draft_ms", "draft", "#6aa84f"), ("verify_ms", "verify", "#4878a8"), ("bubble_ms", "bubble", "#e1812c"))
FLOOR_COLOUR = "#222222"


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """One panel a shape: a step's parts by batch, in three processes and in one; lines are floors."""
    shapes = list(dict.fromkeys(m.shape for m in measurements))
    figure, axes = plt.subplots(1, len(shapes), figsize=(6.4 * len(shapes), 4.0), layout="constrained", squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        _draw_panel(axis, [m for m in measurements if m.shape == shape], shape)
    axes[0][0].legend(loc="upper left", fontsize=8)
    figure.suptitle(f"Decode steps; {measurements[0].host}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axis: Axes, measurements: Sequence[Measurement], shape: str) -> None:
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.batch, m.mode), []).append(m)
    for place, group in enumerate(groups.values()):
        bottom = 0.0
        for name, label, colour in PARTS:
            height = median(getattr(m, name) for m in group)
            axis.bar(place, height, bottom=bottom, color=colour, label=label if place == 0 else None)
            bottom += height
        floors = [m.draft_floor_ms + m.verify_floor_ms for m in group if m.draft_floor_ms and m.verify_floor_ms]
        if floors:
            named = "what must be read" if place == 0 else "_"  # no line of the legend
            axis.hlines(floors[0], place - 0.4, place + 0.4, color=FLOOR_COLOUR, label=named)
    axis.set_xticks(range(len(groups)), [f"{batch}\n{mode.split()[0]}" for batch, mode in groups], fontsize=7)
    axis.set_xlabel("requests at a time, processes")
    axis.set_ylabel("ms per step")
    axis.set_title(shape)
