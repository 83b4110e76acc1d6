"""Draws the measurements of `overlap`."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from slipstream.benchmarks.overlap_policies import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from slipstream.benchmarks.overlap import Measurement

BUSY_COLOUR = "#4878a8"
LOST_COLOUR = "#e1812c"


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """One panel for each pair of dummy kernels, with and without MPS: busy and lost time per step, by policy.

    Dots are the repeats.
    """
    panels = sorted({(m.mps, m.draft_ms, m.verify_ms) for m in measurements}, reverse=True)
    columns = len({panel[1:] for panel in panels})
    rows = len(panels) // columns
    size = (columns * max(5.2, 0.75 * len(_groups(measurements, panels[0]))), 3.8 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=True):
        _draw_panel(axis, _groups(measurements, panel), panel)
    figure.suptitle(
        f"Three processes, {measurements[0].num_clients} streaming clients; {measurements[0].host}", fontsize=9
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _groups(measurements: Sequence[Measurement], panel: tuple[bool, float, float]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        if (m.mps, m.draft_ms, m.verify_ms) == panel:
            policy = Policy(name=m.policy, run_ahead=m.run_ahead, fence=m.fence if m.fence != "host" else "auto")
            groups.setdefault(policy.title, []).append(m)
    return groups


def _draw_panel(axis: Axes, groups: dict[str, list[Measurement]], panel: tuple[bool, float, float]) -> None:
    has_mps, draft_ms, verify_ms = panel
    names = list(groups)
    busy = [mean(m.busy_ms for m in groups[name]) for name in names]
    lost = [mean(m.step_ms for m in groups[name]) - b for name, b in zip(names, busy, strict=True)]
    axis.bar(names, busy, color=BUSY_COLOUR, label="draft + verify busy")
    axis.bar(names, lost, bottom=busy, color=LOST_COLOUR, label="lost")
    for column, name in enumerate(names):
        axis.plot([column] * len(groups[name]), [m.step_ms for m in groups[name]], "k.", markersize=4)
        ratio = f"{mean(m.ratio for m in groups[name]):.3f}"
        axis.text(column, 0.02 * (draft_ms + verify_ms), ratio, ha="center", color="white", fontsize=8)
    axis.axhline(draft_ms + verify_ms, color="k", linewidth=0.8, linestyle="--", label="dummy kernels asked for")
    axis.set_ylabel("ms per step")
    is_gpu = next(iter(groups.values()))[0].device == "cuda"
    where = f", {'MPS' if has_mps else 'no MPS'}" if is_gpu else ""
    axis.set_title(f"dummy kernels of {draft_ms:g} + {verify_ms:g} ms{where}")
    if len(names) > 4:
        axis.tick_params(axis="x", labelsize=7, rotation=30)
    axis.legend(fontsize=8, loc="upper right")
