"""Draws the results of `long_prompt`."""

from __future__ import annotations

from itertools import accumulate
from statistics import mean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

QUIET_COLOUR = "#4878a8"
BUSY_COLOUR = "#e1812c"


def draw(report: dict[str, Any], path: Path) -> None:
    """`report` as it is in the JSON file: the stream's tokens over time, and gaps by the size of the chunks."""
    figure, (timeline, bars) = plt.subplots(1, 2, figsize=(10.4, 3.9), layout="constrained")
    results = report["results"]
    for number, result in enumerate(results):
        colour = plt.get_cmap("viridis")(number / max(1, len(results) - 1) * 0.9)
        times, counts = zip(*result["messages"], strict=True)
        before = sum(count for at, count in result["messages"] if at < 0)
        tokens = [total - before for total in accumulate(counts)]
        timeline.step(times, tokens, where="post", color=colour, linewidth=1.2, label=_name(report, result))
        first_token_s = result["first_token_s"][0]
        at_first = max((total for at, total in zip(times, tokens, strict=True) if at <= first_token_s), default=0)
        timeline.plot(first_token_s, at_first, "o", color=colour, markersize=5)
    timeline.axvline(0, color="k", linewidth=0.8, linestyle="--")
    timeline.set_xlabel("s since the long prompt was sent (dot: its first token)")
    timeline.set_ylabel("tokens of the running stream")
    timeline.legend(fontsize=8, title="chunk", title_fontsize=8)
    timeline.grid(alpha=0.3)
    _draw_bars(bars, report)
    plan = report["plan"]
    figure.suptitle(
        f"A running stream while a prompt of {plan['prompt_tokens']:,} tokens comes in; {report['host']}", fontsize=9
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_bars(panel: Any, report: dict[str, Any]) -> None:
    results = report["results"]
    columns = range(len(results))
    for shift, field, colour, label in (
        (-0.2, "quiet_message_gap_ms", QUIET_COLOUR, "alone"),
        (0.2, "message_gap_ms", BUSY_COLOUR, "while the prompt comes in"),
    ):
        places = [column + shift for column in columns]
        panel.bar(places, [r[field]["p50"] for r in results], 0.38, color=colour, label=f"{label}, p50")
        panel.plot(places, [r[field]["p99"] for r in results], "_", color="k", markersize=14)
    panel.plot([], [], "_", color="k", markersize=14, label="p99")
    panel.set_yscale("log")
    panel.set_ylabel("ms between messages of the stream")
    panel.set_xticks(columns, [f"{_name(report, r)}\n{mean(r['first_token_s']):.1f} s" for r in results], fontsize=8)
    panel.set_xlabel("tokens in a chunk; below: to the prompt's first token")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3, axis="y")


def _name(report: dict[str, Any], result: dict[str, Any]) -> str:
    chunk: int = result["chunk_tokens"]
    return "all at once" if chunk >= report["plan"]["prompt_tokens"] else str(chunk)
