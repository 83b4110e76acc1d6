"""Draws the report of `attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from slipstream.benchmarks.attention import Measurement, Report

TARGET = 0.7
"""Of the copy bandwidth, at batch 32 and context 8192."""


def draw(report: Report, path: Path) -> None:
    """Share of the copy bandwidth, and how much longer PyTorch's attention takes, over the context."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    batches = sorted({m.batch for m in report.measurements})
    for number, batch in enumerate(batches):
        own = [m for m in report.measurements if m.batch == batch]
        colour = plt.get_cmap("viridis")(number / max(1, len(batches) - 1))
        left.plot([m.context for m in own], [m.share_of_bandwidth for m in own], "o-", color=colour, label=f"{batch}")
        right.plot([m.context for m in own], [m.torch_us / m.kernel_us for m in own], "o-", color=colour)
    left.plot([8192], [TARGET], "kx", label="target, 32")
    left.set_ylim(0, 1)
    left.set_title("share of the copy bandwidth")
    left.legend(title="batch", fontsize=8)
    right.set_ylim(bottom=0)
    right.axhline(1, color="k", linewidth=0.8, linestyle="--")
    right.set_title("PyTorch's time over the kernel's")
    for axis in (left, right):
        _context_axis(axis, report.measurements)
    figure.suptitle(
        f"Attention over pages, 32 query and 8 key heads of 128, bfloat16, {report.width} queries a row; {report.host}",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _context_axis(axis: Axes, measurements: list[Measurement]) -> None:
    contexts = sorted({m.context for m in measurements})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
    axis.set_xlabel("context, tokens")
