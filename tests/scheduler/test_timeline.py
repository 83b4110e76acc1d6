"""A trace of three processes, asked for over a real connection."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from slipstream.benchmarks.dummy_model import DummyDraft
from slipstream.cli.trace import fetch_trace, trace_json
from slipstream.cli.trace_timeline import FENCES
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from slipstream.common.wire.events import Event, Site
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from slipstream.common.wire.trace import MAX_STEPS, MAX_WAIT_MS, Trace, TraceRequest
from slipstream.protos import trace_pb2, trace_pb2_grpc
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.scheduler import timeline
from slipstream.scheduler.link import Link, LinkThread
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.server import RECORDER, DeviceThread, RecorderServicer, WorkerServicer
from tests.harness.counted_jobs import Job
from tests.harness.grpc_server import running_server
from tests.harness.scheduler_server import Gateway, ServedScheduler, served_scheduler
from tests.harness.trace_format import check
from tests.harness.worker_processes import WorkerProcesses, running_session, timeline_server
from tests.harness.workers import LocalWorker, SharedArenas, attachment_to, decode, describe
from tests.scheduler.test_session import models, processes

__all__ = ["models", "processes"]

SETTINGS: dict[str, Any] = {
    "fixed_draft_tokens": 3,
    "slots": 3,
    "context_tokens": 480,
    "max_batched_tokens": 16,
    "page_tokens": 8,
    "kv_memory_mib": 8,
}


def make_job(max_new_tokens: int = 400) -> Job:
    """A request that takes many steps, with a prompt of three chunks."""
    spec = SequenceSpec(
        job_id="a",
        prompt=tuple(range(3, 43)),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )
    return Job(spec)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_every_process_is_there_in_every_step(processes: WorkerProcesses, run_ahead: int) -> None:
    with running_session(processes, run_ahead=run_ahead, **SETTINGS) as client:
        await client.served()
        async with timeline_server(client) as address:
            before_ns = time.monotonic_ns()
            asked = asyncio.create_task(fetch_trace(address, TraceRequest(steps=30)))
            _, trace = await asyncio.gather(client.run(make_job()), asked)
            after_ns = time.monotonic_ns()
    check(trace_json(trace))
    first = trace.steps[0].step
    numbers = list(range(first, first + 30))
    assert [step.step for step in trace.steps] == numbers
    assert (trace.run_ahead, trace.device, trace.fence, trace.algorithm) == (run_ahead, "cpu", "host", "standalone")
    records = {process.name: process.records for process in trace.processes}
    assert list(records) == ["scheduler", "verify", "draft"]
    assert all(before_ns < r.begin_ns <= r.end_ns < after_ns for found in records.values() for r in found)
    for name, sites in (
        ("scheduler", (Site.SEND, Site.RESULT, Site.WAIT, Site.TAKE_IN)),
        ("verify", (Site.STREAM, Site.RECEIVE, Site.ENQUEUE)),
        ("draft", (Site.RECEIVE, Site.ENQUEUE)),
    ):
        for site in sites:
            assert [record.step for record in records[name] if record.site is site] == numbers
    # The trace may begin with steps that only take in chunks of the prompt.
    decoding = [step.step for step in trace.steps if step.label != "prefill"]
    assert [record.step for record in records["draft"] if record.site is Site.STREAM] == decoding
    check_order(trace)


def check_order(trace: Trace) -> None:
    """One clock: nothing begins before what it follows from, whichever process that was in."""
    at = {(process.name, r.site, r.step): r for process in trace.processes for r in process.records}
    assert {step.label for step in trace.steps} <= {"decode", "prefill", "mixed"}
    num_waits = 0
    for step in trace.steps:
        send = at["scheduler", Site.SEND, step.step]
        for role, waits in (("draft", step.draft_waits), ("verify", step.verify_waits)):
            work = at.get((role, Site.STREAM, step.step)) or at[role, Site.PREFILL, step.step]
            receive, enqueue = at[role, Site.RECEIVE, step.step], at[role, Site.ENQUEUE, step.step]
            assert send.begin_ns < receive.begin_ns <= receive.end_ns <= enqueue.begin_ns < work.begin_ns
            for point in waits:
                signalled = at.get((FENCES[point.fence][0].value, Site.STREAM, point.value))
                if signalled is not None:
                    assert signalled.end_ns < work.begin_ns
                    num_waits += 1
        arrived_ns = at["scheduler", Site.RESULT, step.step].end_ns
        assert at["verify", Site.STREAM, step.step].begin_ns < arrived_ns
        assert arrived_ns == at["scheduler", Site.TAKE_IN, step.step].begin_ns
        if step.step - trace.run_ahead - 1 >= trace.steps[0].step:
            consumed = at["scheduler", Site.TAKE_IN, step.step - trace.run_ahead - 1]
            assert consumed.end_ns < send.begin_ns
    assert num_waits > len(trace.steps)


@pytest.fixture
async def served(models: dict[Role, Path], tmp_path: Path) -> AsyncIterator[ServedScheduler]:
    """A scheduler whose workers are in this process."""
    verify = make_verify(WorkerConfig(model=models[Role.VERIFY]), HostDevice(), 0)
    draft = make_draft(WorkerConfig(model=models[Role.DRAFT]), HostDevice(), 0)
    async with served_scheduler(tmp_path, verify, draft, **SETTINGS) as served:
        yield served


async def test_when_requests_end_before_there_are_the_steps_so_far(
    served: ServedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, until_complete = asyncio.Event(), timeline._until_complete

    async def noted(*arguments: Any) -> None:
        begun.set()
        await until_complete(*arguments)

    async def traced(gateway: Gateway, request: TraceRequest) -> Trace:
        """A trace that has begun before the steps do."""
        begun.clear()
        asked = asyncio.create_task(fetch_trace(served.address, request))
        await begun.wait()
        _, trace = await asyncio.gather(gateway.run(make_job(60).spec), asked)
        return trace

    monkeypatch.setattr(timeline, "_until_complete", noted)
    async with Gateway(served) as gateway:
        await gateway.attached()
        trace = await traced(gateway, TraceRequest(steps=MAX_STEPS, wait_ms=1500))
        assert trace.steps[-1].step >= trace.steps[0].step + 10
        check(trace_json(trace))
        with pytest.raises(DeadlineExceededError, match=r"no step was complete within 0\.05 s"):
            await fetch_trace(served.address, TraceRequest(steps=1, wait_ms=50))
        # What came before is no part of another trace.
        after = await traced(gateway, TraceRequest(steps=5))
    assert len(after.steps) == 5
    # The stamps of a step are read with the next one: those of the last one were not known yet.
    assert after.steps[0].step > trace.steps[-1].step + 1


@pytest.mark.slow
async def test_workers_that_are_lost_end_the_wait(processes: WorkerProcesses) -> None:
    with running_session(processes, **SETTINGS) as client:
        await client.served()
        async with timeline_server(client) as address:
            asked = asyncio.create_task(fetch_trace(address, TraceRequest(steps=MAX_STEPS, wait_ms=MAX_WAIT_MS)))
            await client.run(make_job(40))
            processes.send_signal(Role.VERIFY, signal.SIGKILL)
            processes.wait(Role.VERIFY)
            with pytest.raises(UnavailableError, match="the workers were lost"):
                await asked
            with pytest.raises(UnavailableError, match="not attached"):
                await fetch_trace(address, TraceRequest(steps=1))
            processes.start(Role.VERIFY)
            await client.served()
            asked = asyncio.create_task(fetch_trace(address, TraceRequest(steps=5)))
            await asyncio.gather(client.run(make_job()), asked)
            assert asked.result().epoch == client.epoch.number if client.epoch else False


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("steps", MAX_STEPS + 1), ("wait_ms", MAX_WAIT_MS + 1)])
async def test_a_request_out_of_range_names_the_field(served: ServedScheduler, field: str, value: int) -> None:
    stub: Any = trace_pb2_grpc.TimelineStub(served.channel)  # type: ignore[no-untyped-call]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Trace(trace_pb2.TraceRequest(**{"steps": 1, field: value}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
    with pytest.raises(InvalidArgumentError, match=field):
        TraceRequest(**{"steps": 1, field: value})


@pytest.mark.parametrize("is_recording", [True, False])
async def test_a_worker_need_not_record(tmp_path: Path, is_recording: bool) -> None:
    """Nor need it know that anybody does: a drafter of another make answers that there is no such call."""
    worker = LocalWorker(DummyDraft(describe(Role.DRAFT), 0))
    arena, thread = SharedArenas(), LinkThread()
    with DeviceThread() as device_thread:
        service = WorkerServicer(worker.engine, device_thread)
        recorder = RecorderServicer(worker.engine.log, HostDevice())
        services = [
            ("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, service),
            (RECORDER, trace_pb2_grpc.add_RecorderServicer_to_server, recorder),
        ]
        async with running_server(*services[: 1 + is_recording], address=f"unix:{tmp_path}/draft.sock") as server:
            link = Link(Role.DRAFT, server.address, thread, on_failure=lambda: None)
            assert link.read_records(0) is None
            try:
                found = await asyncio.to_thread(use, link, arena)
            finally:
                await asyncio.to_thread(thread.close)
        device_thread.submit(worker.engine.close).result(timeout=20)
    worker.close()
    arena.close()
    if not is_recording:
        assert found is None
        return
    assert found is not None
    assert found.epoch == 3
    assert [(record.site, record.step) for record in found.records] == [(Site.RECEIVE, 2), (Site.ENQUEUE, 2)]
    assert all(isinstance(record, Event) for record in found.records)
    assert found.clock is not None
    assert found.clock.device_ns == found.clock.host_ns


def use(link: Link, arena: Any) -> Any:
    """Two steps of an epoch; returns what is known of the second."""
    link.attach(attachment_to(arena, 3))
    for step in (1, 2):
        link.send(replace(decode(step, 1, epoch=3), wants_acknowledgement=True))
    assert link.wait_for_acknowledgement(2, 10.0)
    found = link.read_records(2)
    link.detach(drain=True)
    return found
