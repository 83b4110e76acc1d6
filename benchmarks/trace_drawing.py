"""Draws some steps of a trace file: lanes by process, slices, and arrows along the fences; below, one hand-over."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

NUM_STEPS = 5
"""In the upper panel."""
COLOURS = {
    "step": "#d9d9d9",
    "bubble": "#d62728",
    "host": "#f2a541",
    "wait": "#e8eef4",
    "idle": "#ffffff",
    "copy": "#3a9d8f",
    "draft": "#7b5ea7",
    "verify": "#4878a8",
}
LEGEND = {
    "draft": "draft's kernels",
    "verify": "verify's kernels",
    "copy": "copy of the result",
    "host": "host works",
    "wait": "waits",
    "bubble": "bubble: no kernel runs",
}
ARROWS = {"fence": ("#202020", 0.9), "command": ("#b07a1e", 0.5)}
_HEIGHT = 0.74
_TEXT_WIDTH = 0.006
"""Of a character, as a part of the panel."""


@dataclass(frozen=True, slots=True)
class _Slice:
    lane: tuple[int, int]
    kind: str
    name: str
    begin: float
    end: float
    """Both in ms."""
    step: int | None

    @property
    def colour(self) -> str:
        return COLOURS[self.name.split()[0] if self.kind == "kernel" else self.kind]


@dataclass(frozen=True, slots=True)
class _Arrow:
    kind: str
    source: tuple[tuple[int, int], float]
    target: tuple[tuple[int, int], float]


class _TraceFile:
    """A trace file's events, by what they are."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.about: dict[str, Any] = content["otherData"]
        events = content["traceEvents"]
        self.slices = [_slice(event) for event in events if event["ph"] == "X"]
        self.arrows = list(_arrows(events))
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        processes = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
        self.lanes = {lane: f"{processes[lane[0]]}: {thread}" for lane, thread in sorted(threads.items())}

    def kernels(self, role: str) -> dict[int, _Slice]:
        """A worker's work, by step."""
        found = (s for s in self.slices if s.kind == "kernel" and s.name.startswith(role))
        return {s.step: s for s in found if s.step is not None}

    def total_ms(self, kind: str) -> float:
        """Of all slices of a kind."""
        return sum(s.end - s.begin for s in self.slices if s.kind == kind)


def draw(content: dict[str, Any], path: Path) -> str:
    """Draws the middle of a trace; returns in a line what it shows. Raises ValueError for one of too few steps."""
    trace = _TraceFile(content)
    verify, draft = trace.kernels("verify"), trace.kernels("draft")
    whole = sorted(verify.keys() & draft.keys())
    if len(whole) < NUM_STEPS + 2:
        raise ValueError(f"{len(whole)} steps with a draft are too few: at least {NUM_STEPS + 2}")
    middle = len(whole) // 2
    first, last = whole[middle - NUM_STEPS // 2 - 1], whole[middle + NUM_STEPS // 2]
    hand_over = (verify[whole[middle - 1]].end, verify[whole[middle]].begin)
    margin = 0.6 * (hand_over[1] - hand_over[0])
    figure, axes = plt.subplots(2, 1, figsize=(13, 7.4), layout="constrained")
    _draw_panel(axes[0], trace, (verify[first].end, verify[last].end))
    _draw_panel(axes[1], trace, (hand_over[0] - margin, hand_over[1] + margin))
    axes[0].set_title(_title(trace), fontsize=11)
    axes[1].set_title(f"from the end of step {whole[middle - 1]} on: verify, draft, verify", fontsize=10)
    handles = [Patch(facecolor=COLOURS[kind], edgecolor="#909090", label=text) for kind, text in LEGEND.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"{path}: {_title(trace)}"


def _title(trace: _TraceFile) -> str:
    about = trace.about
    num_steps = sum(1 for s in trace.slices if s.kind == "step")
    step_ms, lost_ms = trace.total_ms("step") / num_steps, trace.total_ms("bubble") / num_steps
    where = str(about.get("host", about["device"])).partition(",")[0]
    mps = f", MPS {about['mps']}" if about["device"] != "cpu" else ""
    return (
        f"run-ahead {about['run_ahead']} on {where}{mps}: a step takes {step_ms:.2f} ms, "
        f"of which {lost_ms:.3f} ms ({100 * lost_ms / step_ms:.1f} %) are lost"
    )


def _draw_panel(axis: Axes, trace: _TraceFile, window: tuple[float, float]) -> None:
    rows = {lane: -row for row, lane in enumerate(trace.lanes)}
    begin, end = window
    for slice_ in trace.slices:
        if slice_.begin < end and slice_.end > begin:
            _draw_slice(axis, slice_, rows[slice_.lane], window)
    for arrow in trace.arrows:
        if arrow.kind in ARROWS and begin <= arrow.source[1] <= end and begin <= arrow.target[1] <= end:
            _draw_arrow(axis, arrow, rows, begin)
    axis.set_xlim(0, end - begin)
    axis.set_ylim(min(rows.values()) - 0.6, 0.6)
    axis.set_yticks(list(rows.values()), list(trace.lanes.values()), fontsize=8)
    axis.set_xlabel("ms", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for upper, lower in pairwise(rows):
        if upper[0] != lower[0]:
            axis.axhline(rows[lower] + 0.5, color="#606060", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_slice(axis: Axes, slice_: _Slice, row: int, window: tuple[float, float]) -> None:
    begin, end = max(slice_.begin, window[0]), min(slice_.end, window[1])
    is_nested = slice_.kind == "bubble"
    height = _HEIGHT * (0.8 if is_nested else 1.0)
    edge = "#c0c0c0" if slice_.kind in ("wait", "idle", "step") else slice_.colour
    axis.broken_barh(
        [(begin - window[0], end - begin)],
        (row - height / 2, height),
        facecolor=slice_.colour,
        edgecolor=edge,
        linewidth=0.5,
        zorder=3 if is_nested else 2,
    )
    text, part = _text(slice_), (end - begin) / (window[1] - window[0])
    if len(text) * _TEXT_WIDTH < part:
        colour = "white" if slice_.kind in ("kernel", "bubble", "copy") else "#404040"
        middle = (begin + end) / 2 - window[0]
        axis.text(middle, row, text, ha="center", va="center", fontsize=6.5, color=colour, zorder=4)


def _text(slice_: _Slice) -> str:
    if slice_.kind == "bubble":
        return f"{1000 * (slice_.end - slice_.begin):.0f} us"
    return slice_.name.replace(" >= ", " ≥ ")


def _draw_arrow(axis: Axes, arrow: _Arrow, rows: dict[tuple[int, int], int], begin: float) -> None:
    colour, width = ARROWS[arrow.kind]
    (source_lane, source), (target_lane, target) = arrow.source, arrow.target
    down = 1 if rows[target_lane] < rows[source_lane] else -1
    half = _HEIGHT / 2
    axis.annotate(
        "",
        xy=(target - begin, rows[target_lane] + down * half),
        xytext=(source - begin, rows[source_lane] - down * half),
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0},
        zorder=5,
        annotation_clip=True,
    )


def _slice(event: dict[str, Any]) -> _Slice:
    begin = event["ts"] / 1000
    lane = (event["pid"], event["tid"])
    step = event["args"].get("step")
    return _Slice(lane, event["cat"], event["name"], begin, begin + event["dur"] / 1000, step)


def _arrows(events: Sequence[dict[str, Any]]) -> Iterator[_Arrow]:
    begun = {event["id"]: event for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] == "f":
            source = begun[event["id"]]
            yield _Arrow(event["cat"], _end(source), _end(event))


def _end(event: dict[str, Any]) -> tuple[tuple[int, int], float]:
    return (event["pid"], event["tid"]), event["ts"] / 1000
