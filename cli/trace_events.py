"""A trace as events of the Trace Event Format, which ui.perfetto.dev and chrome://tracing show.

Each process has lanes (threads, to the viewers): what its host did, and what its stream did. Arrows (flow events) go
along the fences, from the work that signalled to the work that waited; along the commands, from the scheduler to a
worker's host; and from there to the stream. All is on one clock, in microseconds from the first event on.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from slipstream.cli.trace_clock import StampClock
from slipstream.cli.trace_slices import Lane
from slipstream.cli.trace_timeline import timeline_of

if TYPE_CHECKING:
    from slipstream.cli.trace_slices import Arrow, Slice
    from slipstream.common.worker.trace import Trace

Event = dict[str, object]


class TraceFile(TypedDict):
    """The format's JSON object."""

    traceEvents: list[Event]
    displayTimeUnit: str
    otherData: dict[str, object]
    """What the trace is of; viewers leave it alone."""


def trace_json(trace: Trace) -> TraceFile:
    """The whole file, for `json.dumps`."""
    timeline = timeline_of(trace)
    origin_ns = min((slice_.begin_ns for slice_ in timeline.slices), default=0)
    events = _metadata(trace, {slice_.lane for slice_ in timeline.slices})
    events += [_slice_event(slice_, origin_ns) for slice_ in timeline.slices]
    for number, arrow in enumerate(timeline.arrows, start=1):
        events += _arrow_events(number, arrow, origin_ns)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": _about(trace, origin_ns)}


def _about(trace: Trace, origin_ns: int) -> dict[str, object]:
    return {
        "made_by": "slipstream trace",
        "epoch": trace.epoch,
        "steps": len(trace.steps),
        "device": trace.device,
        "fence": trace.fence,
        "mps": "on" if trace.under_mps else "off",
        "algorithm": trace.algorithm,
        "run_ahead": trace.run_ahead,
        "origin_monotonic_ns": origin_ns,
        "clock_uncertainty_us": StampClock(trace.clock_samples).uncertainty_ns / 1000,
    }


def _metadata(trace: Trace, lanes: set[Lane]) -> list[Event]:
    processes = {process.name: process for process in trace.processes}
    events: list[Event] = []
    for lane in Lane:
        place = lane.value
        process = processes.get(place.process)
        if lane not in lanes or process is None:
            continue
        number, thread = place.process_number, place.thread_number
        model = f", {process.model}" if process.model else ""
        for name, thread_number, value in (
            ("process_name", 0, {"name": f"{process.name} (process {process.pid}{model})"}),
            ("process_sort_index", 0, {"sort_index": number}),
            ("thread_name", thread, {"name": place.thread}),
            ("thread_sort_index", thread, {"sort_index": thread}),
        ):
            event: Event = {"ph": "M", "name": name, "pid": number, "tid": thread_number, "args": value}
            if event not in events:
                events.append(event)
    return events


def _slice_event(slice_: Slice, origin_ns: int) -> Event:
    return {
        "ph": "X",
        "name": slice_.name,
        "cat": slice_.kind,
        **_where(slice_.lane, slice_.begin_ns - origin_ns),
        "dur": (slice_.end_ns - slice_.begin_ns) / 1000,
        "args": dict(slice_.details),
    }


def _arrow_events(number: int, arrow: Arrow, origin_ns: int) -> list[Event]:
    common: Event = {"name": arrow.name, "cat": arrow.kind, "id": number}
    begin = {"ph": "s", **common, **_where(arrow.source.lane, arrow.source_ns - origin_ns)}
    # It ends at the slice around its end, not at the next one that begins.
    end = {"ph": "f", "bp": "e", **common, **_where(arrow.target.lane, arrow.target_ns - origin_ns)}
    return [begin, end]


def _where(lane: Lane, time_ns: int) -> Event:
    return {"pid": lane.value.process_number, "tid": lane.value.thread_number, "ts": time_ns / 1000}
