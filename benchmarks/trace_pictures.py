"""Timelines with and without run-ahead: real services with dummy kernels, traced under streaming load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from collections.abc import AsyncIterator

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from slipstream.benchmarks.models import NUM_DRAFT_TOKENS
from slipstream.benchmarks.runner import DevicePlan, Row, Scenario, Table, benchmark, host, run
from slipstream.benchmarks.stack import Served, Stack
from slipstream.benchmarks.streams import PROMPT, streaming
from slipstream.cli.load_requests import request
from slipstream.cli.trace import fetch_trace, trace_json
from slipstream.client import AsyncClient
from slipstream.common.settings import setting
from slipstream.common.wire.trace import TraceRequest

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
    "result": "#3a9d8f",
    "copy": "#3a9d8f",  # in traces of the time when results were copied to the host
    "draft": "#7b5ea7",
    "verify": "#4878a8",
}
LEGEND = {
    "draft": "draft's kernels",
    "verify": "verify's kernels",
    "result": "result: copied, or not seen yet",
    "host": "host works",
    "wait": "waits",
    "bubble": "bubble: no kernel runs",
}
ARROWS = {"fence": ("#202020", 0.9), "command": ("#b07a1e", 0.5)}
HEIGHT = 0.74
CHARACTER_WIDTH = 0.006
"""Width of a character, as a fraction of the panel's width."""

Event = dict[str, Any]
"""An event of a trace file. Times are in microseconds."""
Rows = dict[tuple[int, int], int]
"""Places of lanes in a panel, by process and thread."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a run."""

    out: Path = setting(Path("build/traces"), help="Folder for traces and pictures.")


def draw(content: dict[str, Any], path: Path) -> str:
    """Draws the middle of a trace; returns a line about it. Raises ValueError for a trace of too few steps."""
    events: list[Event] = content["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    kernels = {(s["name"].split()[0], s["args"]["step"]): s for s in slices if s["cat"] == "kernel"}
    whole = sorted(step for role, step in kernels if role == "verify" and ("draft", step) in kernels)
    if len(whole) < NUM_STEPS + 2:
        raise ValueError(f"{len(whole)} steps with a draft are too few: at least {NUM_STEPS + 2}")
    middle = len(whole) // 2
    first, last = whole[middle - NUM_STEPS // 2 - 1], whole[middle + NUM_STEPS // 2]
    before, after = _end(kernels["verify", whole[middle - 1]]), kernels["verify", whole[middle]]["ts"]
    margin = 0.6 * (after - before)
    figure, axes = plt.subplots(2, 1, figsize=(13, 7.4), layout="constrained")
    _draw_panel(axes[0], events, _end(kernels["verify", first]), _end(kernels["verify", last]))
    _draw_panel(axes[1], events, before - margin, after + margin)
    title = _title(content["otherData"], slices)
    axes[0].set_title(title, fontsize=11)
    axes[1].set_title(f"from the end of step {whole[middle - 1]} on: verify, draft, verify", fontsize=10)
    handles = [Patch(facecolor=COLOURS[kind], edgecolor="#909090", label=text) for kind, text in LEGEND.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"{path}: {title}"


def _end(slice_: Event) -> float:
    end: float = slice_["ts"] + slice_["dur"]
    return end


def _title(about: dict[str, Any], slices: list[Event]) -> str:
    num_steps = sum(s["cat"] == "step" for s in slices)
    step_ms, lost_ms = (
        sum(s["dur"] for s in slices if s["cat"] == kind) / num_steps / 1e3 for kind in ("step", "bubble")
    )
    where = str(about.get("host", about["device"])).partition(",")[0]
    mps = f", MPS {about['mps']}" if about["device"] != "cpu" else ""
    return (
        f"run-ahead {about['run_ahead']} on {where}{mps}: a step takes {step_ms:.2f} ms, "
        f"of which {lost_ms:.3f} ms ({100 * lost_ms / step_ms:.1f} %) are lost"
    )


def _draw_panel(axis: Axes, events: list[Event], begin: float, end: float) -> None:
    """Draws what is between two times, each lane in a row of its own."""
    processes = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    threads = {_lane(e): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = {lane: -row for row, lane in enumerate(sorted(threads))}
    for slice_ in events:
        if slice_["ph"] == "X" and slice_["ts"] < end and _end(slice_) > begin:
            _draw_slice(axis, slice_, rows[_lane(slice_)], begin, end)
    begun = {e["id"]: e for e in events if e["ph"] == "s"}
    for target in events:
        if target["ph"] == "f" and target["cat"] in ARROWS:
            source = begun[target["id"]]
            if begin <= source["ts"] and target["ts"] <= end:
                _draw_arrow(axis, source, target, rows, begin)
    axis.set_xlim(0, (end - begin) / 1e3)
    axis.set_ylim(min(rows.values()) - 0.6, 0.6)
    axis.set_yticks(list(rows.values()), [f"{processes[lane[0]]}: {threads[lane]}" for lane in rows], fontsize=8)
    axis.set_xlabel("ms", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for upper, lower in pairwise(rows):
        if upper[0] != lower[0]:
            axis.axhline(rows[lower] + 0.5, color="#606060", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _lane(event: Event) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _draw_slice(axis: Axes, slice_: Event, row: int, begin: float, end: float) -> None:
    kind, name = slice_["cat"], slice_["name"]
    left, right = max(slice_["ts"], begin), min(_end(slice_), end)
    is_nested = kind == "bubble"
    height = HEIGHT * (0.8 if is_nested else 1.0)
    colour = COLOURS[name.split()[0] if kind == "kernel" else kind]
    axis.broken_barh(
        [((left - begin) / 1e3, (right - left) / 1e3)],
        (row - height / 2, height),
        facecolor=colour,
        edgecolor="#c0c0c0" if kind in ("wait", "idle", "step") else colour,
        linewidth=0.5,
        zorder=3 if is_nested else 2,
    )
    text = f"{slice_['dur']:.0f} us" if is_nested else name.replace(" >= ", " ≥ ")
    if len(text) * CHARACTER_WIDTH < (right - left) / (end - begin):
        ink = "white" if kind in ("kernel", "bubble", "result", "copy") else "#404040"
        place = ((left + right) / 2 - begin) / 1e3
        axis.text(place, row, text, ha="center", va="center", fontsize=6.5, color=ink, zorder=4)


def _draw_arrow(axis: Axes, source: Event, target: Event, rows: Rows, begin: float) -> None:
    colour, width = ARROWS[target["cat"]]
    upper, lower = rows[_lane(source)], rows[_lane(target)]
    half = HEIGHT / 2 if lower < upper else -HEIGHT / 2
    axis.annotate(
        "",
        xy=((target["ts"] - begin) / 1e3, lower + half),
        xytext=((source["ts"] - begin) / 1e3, upper - half),
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0},
        zorder=5,
        annotation_clip=True,
    )


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Traces each run-ahead, and draws it."""
    plan.out.mkdir(parents=True, exist_ok=True)
    draft_ms, verify_ms = KERNELS_MS[plan.device]
    requests = [request(PROMPT, CONTEXT_TOKENS // 2, 0.0, 0)] * NUM_CLIENTS
    sizes = {"fixed_draft_tokens": NUM_DRAFT_TOKENS, "slots": NUM_CLIENTS, "context_tokens": CONTEXT_TOKENS}
    about = {"host": host(plan.device), "draft_ms": draft_ms, "verify_ms": verify_ms}

    async def sample(served: Served, scenario: Scenario) -> AsyncIterator[Row]:
        async with AsyncClient(served.address) as client, streaming(client, requests):
            # These hold prompts, and first uses of everything.
            await fetch_trace(served.scheduler, TraceRequest(steps=WARM_UP_STEPS))
            content = trace_json(await fetch_trace(served.scheduler, TraceRequest(steps=TRACED_STEPS)))
        content["otherData"] |= about
        path = plan.out / f"trace_{plan.device}_run_ahead_{scenario.about['run_ahead']}.json"
        path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
        yield {"title": draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png"))}

    orders = [{"run_ahead": run_ahead} for run_ahead in RUN_AHEADS]
    scenarios = [Scenario(about=order, draft="draft", options={**order, **sizes}) for order in orders]
    async with Stack(device=plan.device) as stack:
        await stack.dummies(draft_ms, verify_ms)
        await run(stack, scenarios, sample, Table(file))
