"""Timelines with and without run-ahead: real services with dummy kernels, traced under streaming load.

Each run-ahead gives a trace as `slipstream trace` writes it, trace_<device>_run_ahead_<n>.json, and a picture of it:
lanes by process, slices, and arrows along the fences; below, one hand-over. Takes about half a minute.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import typer
from matplotlib.patches import Patch

from slipstream.benchmarks.models import NUM_DRAFT_TOKENS, DeviceOption
from slipstream.benchmarks.result_files import host
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.stream_window import streaming
from slipstream.cli.trace import fetch_trace, trace_json
from slipstream.client import AsyncClient
from slipstream.common.worker.trace import TraceRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KERNELS_MS = {"cpu": (3.0, 10.0), "cuda": (0.3, 4.5)}
RUN_AHEADS = (0, 1)
NUM_CLIENTS = 8
CONTEXT_TOKENS = 1 << 18
WARM_UP_STEPS = 100
TRACED_STEPS = 50
NUM_STEPS = 5
"""Steps in the upper panel of a picture."""
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
HEIGHT = 0.74
CHARACTER_WIDTH = 0.006
"""Width of a character, as a fraction of the panel's width."""


def main(
    device: DeviceOption = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for traces and pictures.")] = Path("build/traces"),
) -> None:
    """Traces each run-ahead, and draws it."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {run_ahead: out / f"trace_{device}_run_ahead_{run_ahead}.json" for run_ahead in RUN_AHEADS}
    asyncio.run(_trace_all(device, paths))
    for path in paths.values():
        print(draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png")))


async def _trace_all(device: str, paths: dict[int, Path]) -> None:
    draft_ms, verify_ms = KERNELS_MS[device]
    async with Stack(device=device) as stack:
        await stack.dummies(draft_ms, verify_ms)
        for run_ahead, path in paths.items():
            scheduler = stack.scheduler(
                "draft",
                run_ahead=run_ahead,
                num_draft_tokens=NUM_DRAFT_TOKENS,
                slots=NUM_CLIENTS,
                context_tokens=CONTEXT_TOKENS,
            )
            async with (
                scheduler as served,
                AsyncClient(served.address) as client,
                streaming(client, NUM_CLIENTS, max_new_tokens=CONTEXT_TOKENS // 2),
            ):
                # These hold prompts, and first uses of everything.
                await fetch_trace(served.scheduler, TraceRequest(steps=WARM_UP_STEPS))
                content = trace_json(await fetch_trace(served.scheduler, TraceRequest(steps=TRACED_STEPS)))
            content["otherData"] |= {"host": host(device), "draft_ms": draft_ms, "verify_ms": verify_ms}
            path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


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
    """The events of a trace file, by kind."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.about: dict[str, Any] = content["otherData"]
        events = content["traceEvents"]
        self.slices = [_slice(event) for event in events if event["ph"] == "X"]
        self.arrows = _arrows(events)
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        processes = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
        self.lanes = {lane: f"{processes[lane[0]]}: {thread}" for lane, thread in sorted(threads.items())}

    def kernels(self, role: str) -> dict[int, _Slice]:
        """The slices of a worker's kernels, by step."""
        found = (s for s in self.slices if s.kind == "kernel" and s.name.startswith(role))
        return {s.step: s for s in found if s.step is not None}

    def total_ms(self, kind: str) -> float:
        """The length of all slices of a kind."""
        return sum(s.end - s.begin for s in self.slices if s.kind == kind)


def draw(content: dict[str, Any], path: Path) -> str:
    """Draws the middle of a trace; returns a line about it. Raises ValueError for a trace of too few steps."""
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
    height = HEIGHT * (0.8 if is_nested else 1.0)
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
    if len(text) * CHARACTER_WIDTH < part:
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
    half = HEIGHT / 2
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
    end = begin + event["dur"] / 1000
    return _Slice((event["pid"], event["tid"]), event["cat"], event["name"], begin, end, event["args"].get("step"))


def _arrows(events: list[dict[str, Any]]) -> list[_Arrow]:
    def place(event: dict[str, Any]) -> tuple[tuple[int, int], float]:
        return (event["pid"], event["tid"]), event["ts"] / 1000

    begun = {event["id"]: event for event in events if event["ph"] == "s"}
    ended = [event for event in events if event["ph"] == "f"]
    return [_Arrow(event["cat"], place(begun[event["id"]]), place(event)) for event in ended]


if __name__ == "__main__":
    typer.run(main)
