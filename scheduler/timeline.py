"""The `Timeline` service: waits for steps, and merges the events of scheduler, draft and verify."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import RETRY_AFTER_MS, DeadlineExceededError, UnavailableError
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.wire.step import Role
from slipstream.common.wire.trace import Trace, TracedProcess, TraceRequest
from slipstream.protos import trace_pb2, trace_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from slipstream.common.wire.events import Event
    from slipstream.common.wire.trace import ClockSample, HostRecords, TracedStep
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.epoch import Epoch
    from slipstream.scheduler.observer import StepTrace

LOOK_S = 0.005
"""Time between two looks for steps that are traced."""
SERVICE_NAME = trace_pb2.DESCRIPTOR.services_by_name["Timeline"].full_name


class TimelineServicer(trace_pb2_grpc.TimelineServicer):
    """Serves `Timeline`."""

    def __init__(self, epoch: Callable[[], Epoch | None]) -> None:
        """`epoch` returns the current epoch, or the last one; None before the first."""
        self._epoch = epoch

    async def Trace(self, request: trace_pb2.TraceRequest, context: Any) -> trace_pb2.TraceResponse:
        reject_unknown_fields(request)
        asked = TraceRequest.from_pb(request)
        epoch = self._epoch()
        if epoch is None or epoch.trace.is_closed:
            reason = "the scheduler is not attached to its workers"
            raise UnavailableError(reason, retry_after_ms=RETRY_AFTER_MS)
        return (await _trace(epoch, asked)).to_pb()


async def _trace(epoch: Epoch, asked: TraceRequest) -> Trace:
    """Raises DeadlineExceededError when nothing runs, UnavailableError when the workers are lost."""
    trace, workers = epoch.trace, _attached(epoch)
    _, clock_before = await asyncio.to_thread(_ask_workers, epoch, workers, trace.last_sent + 1)
    first = trace.last_sent + 1
    last = first + asked.steps - 1
    await _until_complete(trace, last, asked.wait_ms / 1000)
    steps = trace.steps(first, last)
    if not steps:
        raise DeadlineExceededError(f"no step was complete within {asked.wait_ms / 1000:g} s: ask while requests run")
    # Read before the workers are asked, which takes time: the rings go on.
    host = trace.host_events(first)
    streams = {role: trace.stream_events(role, first) for role in workers}
    answers, clock_after = await asyncio.to_thread(_ask_workers, epoch, workers, first)
    return _merged(epoch, workers, steps, host, streams, answers, (clock_before, clock_after))


async def _until_complete(trace: StepTrace, last: int, wait_s: float) -> None:
    """Returns when the step is complete, the epoch is over, or no step was completed for `wait_s`."""
    seen, seen_at = trace.last_complete, time.monotonic()
    while trace.last_complete < last and not trace.is_closed and time.monotonic() < seen_at + wait_s:
        await asyncio.sleep(LOOK_S)
        if trace.last_complete != seen:
            seen, seen_at = trace.last_complete, time.monotonic()


def _merged(
    epoch: Epoch,
    workers: Mapping[Role, WorkerDescription],
    steps: list[TracedStep],
    host: list[Event],
    streams: dict[Role, list[Event]],
    answers: dict[Role, HostRecords | None],
    samples: tuple[ClockSample, ...],
) -> Trace:
    numbers = {step.step for step in steps}

    def traced(records: Iterable[Event]) -> tuple[Event, ...]:
        return tuple(record for record in records if record.step in numbers)

    processes = [TracedProcess(name="scheduler", pid=os.getpid(), records=traced(host))]
    for role, worker in workers.items():
        answer = answers[role]
        records = traced([*streams[role], *(() if answer is None else answer.records)])
        processes.append(TracedProcess(name=role.value, pid=worker.pid, model=worker.model, records=records))
        processes += [
            replace(rank, name=f"{role.value} {rank.name}", records=traced(rank.records))
            for rank in (() if answer is None else answer.ranks)
        ]
    return Trace(
        epoch=epoch.number,
        device=epoch.verify.device,
        fence=epoch.fence_kind,
        under_mps=epoch.under_mps,
        algorithm=epoch.algorithm,
        run_ahead=epoch.sizes.batch.run_ahead,
        steps=tuple(steps),
        processes=tuple(processes),
        clock_samples=samples,
    )


def _ask_workers(
    epoch: Epoch, workers: Iterable[Role], from_step: int
) -> tuple[dict[Role, HostRecords | None], ClockSample]:
    """Returns the workers' records of steps from this one on, and a sample of the stamps' clock. Blocks.

    Prefers the workers' samples of the clock: outside MPS, the scheduler gets the GPU late.
    """
    answers = {role: epoch.read_records(role, from_step) for role in workers}
    clocks = [answer.clock for answer in answers.values() if answer is not None and answer.clock is not None]
    tightest = min(clocks, key=lambda clock: clock.uncertainty_ns) if clocks else epoch.sample_clock()
    return answers, tightest


def _attached(epoch: Epoch) -> dict[Role, WorkerDescription]:
    draft = epoch.draft
    return {Role.VERIFY: epoch.verify} | ({} if draft is None else {Role.DRAFT: draft})
