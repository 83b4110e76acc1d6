"""A worker over gRPC: one scheduler at a time, and whoever comes next finds it ready however the last one ended."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from slipstream.benchmarks.dummy_model import DummyDraft
from slipstream.cli.health import check, health_checks, until_hung
from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError, StaleEpochError, UnavailableError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.step import FenceName, Role
from slipstream.common.wire.worker import attachment_to_pb, command_to_pb, description_from_pb
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.services.worker.server import DeviceThread, WorkerServicer
from tests.harness.grpc_server import running_server
from tests.harness.waiting import until
from tests.harness.workers import LocalWorker, SharedArenas, attachment_to, decode, describe

STUCK_AFTER_S = 1.0


@dataclass
class Served:
    """A draft behind gRPC."""

    worker: LocalWorker
    device_thread: DeviceThread
    address: str
    arena: SharedArenas

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[Any]:
        """A stub on a connection of its own; its end is what a killed scheduler looks like."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            yield pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]

    def attach_request(self, epoch: int) -> pb.AttachRequest:
        """An attachment of this arena."""
        return attachment_to_pb(attachment_to(self.arena, epoch))

    def settle(self) -> None:
        """Returns when all is done that the device thread was given so far."""
        self.device_thread.submit(lambda: None).result(timeout=20)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A dummy draft at a Unix socket."""
    worker, arena = LocalWorker(DummyDraft(describe(Role.DRAFT), 0)), SharedArenas()
    with DeviceThread() as device_thread:
        service = WorkerServicer(worker.engine, device_thread, stuck_after_s=STUCK_AFTER_S)
        names = ("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, service)
        async with running_server(
            names, address=f"unix:{tmp_path}/draft.sock", find_fault=service.find_fault
        ) as server:
            yield Served(worker, device_thread, server.address, arena)
        device_thread.submit(worker.engine.close).result(timeout=20)
    worker.close()
    arena.close()


async def run(call: Any, *steps: int, epoch: int, waits: int = 0) -> list[int]:
    """Sends steps and returns those that were acknowledged."""
    acknowledged = []
    for step in steps:
        command = replace(decode(step, 1, epoch=epoch, waits=waits), wants_acknowledgement=True)
        await call.write(command_to_pb(command))
        ack = await call.read()
        assert ack is not grpc.aio.EOF
        assert ack.epoch == epoch
        acknowledged.append(ack.step)
    return acknowledged


async def refused(awaitable: Any) -> Exception:
    """The error that a call ends with, as our own."""
    with pytest.raises(grpc.RpcError) as caught:
        await awaitable
    return error_from_rpc(caught.value)


async def test_describes_itself_at_any_time(served: Served) -> None:
    async with served.scheduler() as worker:
        assert description_from_pb(await worker.Describe(pb.DescribeRequest())) == served.worker.describe()


async def test_acknowledges_what_is_enqueued_not_what_is_done(served: Served) -> None:
    async with served.scheduler() as worker:
        await worker.Attach(served.attach_request(1))
        call = worker.Execute()
        assert await run(call, 1, 2, 3, epoch=1, waits=1) == [1, 2, 3]
        assert served.arena.fence(FenceName.DRAFT_PROPOSED).poll() == 0
        served.arena.fence(FenceName.VERIFY_STASH).release(1)
        await worker.Drain(pb.DrainRequest(epoch=1))
        assert served.arena.fence(FenceName.DRAFT_PROPOSED).poll() == 3
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_acknowledges_only_what_it_is_asked_to(served: Served) -> None:
    async with served.scheduler() as worker:
        await worker.Attach(served.attach_request(1))
        call = worker.Execute()
        for step in (1, 2):
            await call.write(command_to_pb(decode(step, 1)))
        assert await run(call, 3, epoch=1) == [3]


async def test_the_next_scheduler_attaches_after_the_last_one_was_lost_with_a_step_half_sent(served: Served) -> None:
    for epoch in (1, 2, 3):
        async with served.scheduler() as worker:
            await worker.Attach(served.attach_request(epoch))
            # The stash is never signalled: that command was not sent any more.
            await run(worker.Execute(), 1, 2, epoch=epoch, waits=100 * epoch)
        # The server sees the connection's end at its own time; until then the worker is not free.
        await until(lambda: served.worker.engine.epoch is None)


async def test_the_next_scheduler_attaches_after_the_last_one_was_lost_before_its_first_step(served: Served) -> None:
    for epoch in (1, 2):
        async with served.scheduler() as worker:
            await worker.Attach(served.attach_request(epoch))
    assert served.worker.engine.epoch == 2
    async with served.scheduler() as worker:
        await worker.Attach(served.attach_request(3))
        assert await run(worker.Execute(), 1, epoch=3) == [1]


async def test_a_second_scheduler_is_turned_away(served: Served) -> None:
    async with served.scheduler() as first, served.scheduler() as second:
        await first.Attach(served.attach_request(1))
        assert not (await second.Describe(pb.DescribeRequest())).has_scheduler
        call = first.Execute()
        await run(call, 1, epoch=1)
        assert (await second.Describe(pb.DescribeRequest())).has_scheduler
        error = await refused(second.Attach(served.attach_request(2)))
        assert isinstance(error, FailedPreconditionError)
        assert "another scheduler has the Execute stream" in str(error)
        assert isinstance(await refused(second.Execute().read()), FailedPreconditionError)
        assert await run(call, 2, epoch=1) == [2]


async def test_a_stream_without_an_epoch_is_refused(served: Served) -> None:
    async with served.scheduler() as worker:
        error = await refused(worker.Execute().read())
        assert isinstance(error, FailedPreconditionError)
        assert "not attached" in str(error)


async def test_an_epoch_has_one_stream(served: Served) -> None:
    """Also while the device's thread has yet to end it."""
    async with served.scheduler() as worker:
        await worker.Attach(served.attach_request(1))
        call, go_on = worker.Execute(), threading.Event()
        await run(call, 1, epoch=1)
        served.device_thread.submit(go_on.wait)
        try:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
            assert served.worker.engine.epoch == 1
            assert "not attached" in str(await refused(worker.Execute().read()))
        finally:
            go_on.set()
        await worker.Attach(served.attach_request(2))
        assert await run(worker.Execute(), 1, epoch=2) == [1]


async def test_a_command_that_makes_no_sense_ends_the_epoch_and_nothing_else(served: Served) -> None:
    async with served.scheduler() as worker:
        await worker.Attach(served.attach_request(1))
        call = worker.Execute()
        await call.write(command_to_pb(decode(1, 99, epoch=1)))
        error = await refused(call.read())
        assert isinstance(error, InvalidArgumentError)
        assert error.field == "slots"
        served.settle()
        await worker.Attach(served.attach_request(2))
        call = worker.Execute()
        await call.write(command_to_pb(decode(1, 1, epoch=1)))
        assert isinstance(await refused(call.read()), StaleEpochError)
        served.settle()
        await worker.Attach(served.attach_request(3))
        assert await run(worker.Execute(), 1, epoch=3) == [1]
    assert served.worker.failures == []


async def test_drain_names_the_epoch(served: Served) -> None:
    async with served.scheduler() as worker:
        await worker.Attach(served.attach_request(5))
        await worker.Drain(pb.DrainRequest(epoch=4))
        assert served.worker.engine.epoch == 5
        await worker.Drain(pb.DrainRequest())
        assert served.worker.engine.epoch is None
        await worker.Attach(served.attach_request(6))


async def test_an_attachment_that_is_refused_leaves_the_worker_free(served: Served) -> None:
    async with served.scheduler() as worker:
        request = served.attach_request(1)
        request.manifest.buffers[0].offset = 2**40
        assert "not an aligned part" in str(await refused(worker.Attach(request)))
        request = served.attach_request(1)
        request.manifest.path += "-not"
        assert "No such file" in str(await refused(worker.Attach(request)))
        await worker.Attach(served.attach_request(1))
        assert await run(worker.Execute(), 1, epoch=1) == [1]


async def test_a_worker_whose_device_thread_hangs_counts_as_one_that_does_not_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    served.device_thread.submit(go_on.wait)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceThread, "busy_s", 0.9 * STUCK_AFTER_S)
        assert await check(served.address) == "SERVING"
    try:
        async with health_checks(served.address) as answers:
            await until_hung(answers, 0.5)
        hangs = (
            r"the thread that owns the device has been at the same work for \d+ s: wait \(threading.py:\d+\) in wait"
        )
        with pytest.raises(UnavailableError, match=hangs):
            await check(served.address)
    finally:
        go_on.set()
    served.settle()
    assert await check(served.address) == "SERVING"


async def test_an_attach_that_waits_behind_work_that_hangs_does_not_hide_it(served: Served) -> None:
    """A scheduler whose stream has ended tries to attach again and again."""
    go_on = threading.Event()
    served.device_thread.submit(go_on.wait)
    async with served.scheduler() as stub, health_checks(served.address) as answers:
        attaching = stub.Attach(served.attach_request(1))
        try:
            await until_hung(answers, 0.5)
        finally:
            go_on.set()
        await attaching


async def test_a_worker_goes_on_to_attach_when_its_scheduler_is_gone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, go_on = served.worker.engine.attach, threading.Event()
    monkeypatch.setattr(served.worker.engine, "attach", lambda attachment: go_on.wait() and attach(attachment))
    try:
        async with served.scheduler() as stub:
            attaching = stub.Attach(served.attach_request(1))
            await until(lambda: served.device_thread.busy_s > 0)
            attaching.cancel()
        await until(lambda: served.device_thread.busy_s > 1.2 * STUCK_AFTER_S)
        assert await check(served.address) == "SERVING"
    finally:
        go_on.set()


async def test_a_worker_may_take_its_time_to_attach(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken, and graphs are captured."""
    attach, go_on = served.worker.engine.attach, threading.Event()
    monkeypatch.setattr(served.worker.engine, "attach", lambda attachment: go_on.wait() and attach(attachment))
    async with served.scheduler() as stub:
        attaching = stub.Attach(served.attach_request(1))
        try:
            await until(lambda: served.device_thread.busy_s > 1.2 * STUCK_AFTER_S)
            assert await check(served.address) == "SERVING"
        finally:
            go_on.set()
        await attaching
    assert served.device_thread.busy_s == 0
