"""`slipstream trace`: asks a server for the times of its next steps, and writes them as a file for a viewer.

The gateways have the times of requests; a gateway that does not return them has no rows in the file.

The file is in the Trace Event Format, which ui.perfetto.dev and chrome://tracing show. Each process has lanes (threads,
to the viewers). Arrows (flow events) lead along the fences, from the work that signalled to the work that waited; along
the commands, from the scheduler to a worker's host; and from there to the stream. All is on one clock, in microseconds
from the first event on.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from slipstream.cli.trace_timeline import Row, StampClock, Timeline
from slipstream.client.connection import AccessOptions, open_async_channel
from slipstream.client.requests import channel_options
from slipstream.common.errors import ConfigError, FailedPreconditionError, UnavailableError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.trace import MAX_STEPS, MAX_WAIT_MS, HostRecords, Trace, TracedProcess, TraceRequest
from slipstream.protos import trace_pb2, trace_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from slipstream.cli.options import ConnectionOptions
    from slipstream.common.wire.server import ServiceState

STANDARD_OUTPUT = "-"
GATEWAY_TIMEOUT_S = 5.0

Event = dict[str, object]


async def run_trace(connection: ConnectionOptions, steps: int, wait_s: float, out: str) -> int:
    """Writes a trace of the server's next `steps` steps to the file `out`, or to standard output if that is "-".

    Raises ConfigError naming what is wrong, UnavailableError without a server, DeadlineExceededError if nothing ran
    for `wait_s`.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError("steps", steps, f"1 to {MAX_STEPS}")
    if not 0.001 <= wait_s <= MAX_WAIT_MS / 1000:
        raise ConfigError("wait_s", wait_s, f"0.001 to {MAX_WAIT_MS / 1000:g} seconds")
    with _output(out) as write:
        async with connection.client() as client:
            services = (await client.server_info()).services
        scheduler = next(service.address for service in services if service.name == "scheduler")
        trace = await fetch_trace(scheduler, TraceRequest(steps=steps, wait_ms=round(1000 * wait_s)))
        gateways = [service for service in services if service.name.startswith("gateway")]
        requests = await fetch_requests(connection.server, gateways, connection.access)
        content = trace_json(replace(trace, processes=(*trace.processes, *requests)))
        write(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    uncertainty_us = content["otherData"]["clock_uncertainty_us"]
    clocks = "one clock" if trace.device == "cpu" else f"clocks agree within {uncertainty_us:.1f} us"
    where = "" if out == STANDARD_OUTPUT else f" are in {out}"
    numbers = f"steps {trace.steps[0].step} to {trace.steps[-1].step} of epoch {trace.epoch}"
    print(f"{numbers} ({clocks}){where}: open it in https://ui.perfetto.dev", file=sys.stderr)
    return 0


async def fetch_trace(scheduler: str, request: TraceRequest) -> Trace:
    """Asks the scheduler at this address. Raises what it raises, and UnavailableError when it does not answer."""
    options = channel_options(scheduler, None)
    async with grpc.aio.insecure_channel(scheduler, options=options) as channel:
        stub = trace_pb2_grpc.TimelineStub(channel)  # type: ignore[no-untyped-call]
        try:
            return Trace.from_pb(await stub.Trace(request.to_pb()))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise FailedPreconditionError(f"the scheduler at {scheduler} is too old to be traced") from error
            failure = error_from_rpc(error)
            if isinstance(failure, UnavailableError):
                raise UnavailableError(f"no trace from the scheduler at {scheduler}: {failure}") from error
            raise failure from error


async def fetch_requests(
    server: str, gateways: Sequence[ServiceState], access: AccessOptions
) -> tuple[TracedProcess, ...]:
    """Asks the gateways for the times of their last requests. Leaves out, with a warning, one that does not answer.

    A single gateway is asked where its clients call it; several share that port, and have addresses of their own.
    """
    found = []
    for gateway in gateways:
        address, allowed = (server, access) if len(gateways) == 1 else (gateway.address, AccessOptions())
        async with open_async_channel(address, channel_options(address, None), allowed) as channel:
            stub = trace_pb2_grpc.RecorderStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer = await stub.ReadRecords(trace_pb2.ReadRecordsRequest(), timeout=GATEWAY_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                print(f"no times of requests from {gateway.name}: {error_from_rpc(error)}", file=sys.stderr)
                continue
        records = HostRecords.from_pb(answer).records
        found.append(TracedProcess(name=gateway.name, pid=gateway.pid, records=records))
    return tuple(found)


def trace_json(trace: Trace) -> dict[str, Any]:
    """Returns the whole file, for `json.dumps`. Viewers ignore `otherData`, which has the conditions of the trace."""
    timeline = Timeline(trace)
    origin_ns = min((slice_.begin_ns for slice_ in timeline.slices), default=0)

    def at(lane: Row, time_ns: int) -> Event:
        return {"pid": lane.process_number, "tid": lane.thread_number, "ts": (time_ns - origin_ns) / 1000}

    events = _names(trace, {slice_.lane for slice_ in timeline.slices})
    for slice_ in timeline.slices:
        times = at(slice_.lane, slice_.begin_ns) | {"dur": (slice_.end_ns - slice_.begin_ns) / 1000}
        events.append({"ph": "X", "name": slice_.name, "cat": slice_.kind, **times, "args": dict(slice_.details)})
    for number, arrow in enumerate(timeline.arrows, start=1):
        common: Event = {"name": arrow.name, "cat": arrow.kind, "id": number}
        events.append({"ph": "s", **common, **at(arrow.source.lane, arrow.source_ns)})
        # "bp": the arrow ends at the slice around its end, not at the next one that begins.
        events.append({"ph": "f", "bp": "e", **common, **at(arrow.target.lane, arrow.target_ns)})
    about = {
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
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _names(trace: Trace, lanes: set[Row]) -> list[Event]:
    """The metadata events: names and order of the processes and threads that have slices."""
    processes = {process.name: process for process in trace.processes}
    events: list[Event] = []
    for lane in sorted(lanes):
        process = processes[lane.process]
        model = f", {process.model}" if process.model else ""
        for name, thread, args in (
            ("process_name", 0, {"name": f"{process.name} (process {process.pid}{model})"}),
            ("process_sort_index", 0, {"sort_index": lane.process_number}),
            ("thread_name", lane.thread_number, {"name": lane.thread}),
            ("thread_sort_index", lane.thread_number, {"sort_index": lane.thread_number}),
        ):
            event: Event = {"ph": "M", "name": name, "pid": lane.process_number, "tid": thread, "args": args}
            if event not in events:
                events.append(event)
    return events


@contextmanager
def _output(out: str) -> Iterator[Callable[[str], object]]:
    """Writes to a file that appears only when all went well. Raises ConfigError before anything else is done."""
    if out == STANDARD_OUTPUT:
        yield sys.stdout.write
        return
    path = Path(out)
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is there, and may not be written to")
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        file = unfinished.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError("OUT", str(path), f"a file that this user can write ({error})") from error
    try:
        with file:
            yield file.write
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
