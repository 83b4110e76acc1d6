"""Draws the measurements of `overlap`."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from slipstream.benchmarks.overlap import Measurement

BUSY_COLOUR = "#4878a8"
LOST_COLOUR = "#e1812c"


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """One panel for each pair of stand-ins: busy and lost time per step, by policy; dots are the repeats."""
    pairs = sorted({(m.draft_ms, m.verify_ms) for m in measurements}, reverse=True)
    figure, panels = plt.subplots(1, len(pairs), figsize=(5.2 * len(pairs), 3.6), layout="constrained", squeeze=False)
    for panel, pair in zip(panels[0], pairs, strict=True):
        groups: dict[str, list[Measurement]] = {}
        for m in measurements:
            if (m.draft_ms, m.verify_ms) == pair:
                name = "host blocks" if m.policy == "host_blocks" else f"run-ahead {m.run_ahead}"
                groups.setdefault(name, []).append(m)
        names = list(groups)
        busy = [mean(m.busy_ms for m in groups[name]) for name in names]
        lost = [mean(m.step_ms for m in groups[name]) - b for name, b in zip(names, busy, strict=True)]
        panel.bar(names, busy, color=BUSY_COLOUR, label="draft + verify busy")
        panel.bar(names, lost, bottom=busy, color=LOST_COLOUR, label="lost")
        for column, name in enumerate(names):
            panel.plot([column] * len(groups[name]), [m.step_ms for m in groups[name]], "k.", markersize=4)
            panel.text(column, 0.1, f"{mean(m.ratio for m in groups[name]):.3f}", ha="center", color="white")
        panel.axhline(sum(pair), color="k", linewidth=0.8, linestyle="--", label="stand-ins asked for")
        panel.set_ylabel("ms per step")
        panel.set_title(f"stand-ins of {pair[0]:g} + {pair[1]:g} ms")
        panel.legend(fontsize=8, loc="upper right")
    figure.suptitle(f"Three processes, 8 streaming clients; {measurements[0].host}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
