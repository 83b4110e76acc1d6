"""The scheduler's end of a worker's stream of commands, with a worker behind real gRPC."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    MismatchError,
    UnavailableError,
)
from slipstream.common.wire import command_socket
from slipstream.common.wire.command_socket import SHORT_STEP_S, CommandReceiver, CommandSender
from slipstream.common.wire.events import EventLog, Site
from slipstream.common.wire.step import (
    FenceName,
    FenceOps,
    FenceWait,
    PrefillChunk,
    Role,
    StepCommand,
)
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.scheduler.link import Dispatch, Link, LinkThread
from slipstream.services.worker import server
from slipstream.services.worker.server import DeviceThread, WorkerServicer
from tests.harness.grpc_server import running_server
from tests.harness.leaks import nothing_left
from tests.harness.waiting import until
from tests.harness.workers import LocalWorker, SharedArenas, attach, attachment_to, decode, describe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from slipstream.common.rpc.serving import GrpcServer

    Linked = Callable[..., AbstractAsyncContextManager[tuple["Served", Link]]]


def ignore() -> None:
    """For losses that a test looks for by itself."""


@dataclass
class Served:
    """A worker behind gRPC, on the test's event loop."""

    worker: LocalWorker
    device_thread: DeviceThread
    server: GrpcServer


@asynccontextmanager
async def served(
    folder: Path,
    role: Role,
    *,
    acknowledge_done: bool = False,
    has_socket: bool = True,
    as_on_gpu: bool = False,
    kind: type[WorkerServicer] = WorkerServicer,
) -> AsyncIterator[Served]:
    """A dummy at a Unix socket, with another one for commands. `as_on_gpu`: the device's thread reads and enqueues."""
    dummy = DummyDraft(describe(role), 0) if role is Role.DRAFT else DummyVerify(describe(role), 0)
    worker, commands = LocalWorker(dummy), CommandReceiver()
    worker.engine.enqueues_at_once = not as_on_gpu
    with DeviceThread() as device_thread, closing(commands):
        service = kind(worker.engine, device_thread, commands=commands, acknowledge_done=acknowledge_done)
        names = ("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, service)
        async with running_server(names, address=f"unix:{folder}/{role.value}.sock") as server:
            if has_socket and not acknowledge_done:
                commands.listen(server.address)
            yield Served(worker, device_thread, server)
        device_thread.submit(worker.engine.close).result(timeout=20)
    worker.close()


@pytest.fixture
def thread() -> Iterator[LinkThread]:
    """The links' event loop, of which nothing is left."""
    made = LinkThread()
    yield made
    waiting = asyncio.run_coroutine_threadsafe(_tasks(), made.loop).result()
    made.close()
    assert not waiting


@pytest.fixture
def linked(tmp_path: Path, thread: LinkThread) -> Linked:
    """Serves a draft, and yields it with a link to it. Options are those of `served`."""

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[tuple[Served, Link]]:
        async with served(tmp_path, Role.DRAFT, **options) as draft:
            yield draft, Link(Role.DRAFT, draft.server.address, thread, on_failure=ignore)

    return make


async def _tasks() -> list[Any]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture
def arena() -> Iterator[SharedArenas]:
    """Shared by all workers of a test."""
    made = SharedArenas()
    yield made
    made.close()


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize(("has_socket", "interval_s"), [(True, 0.0), (True, 2 * SHORT_STEP_S), (False, 0.0)])
async def test_commands_go_out_and_the_worker_drains(
    has_socket: bool,
    interval_s: float,
    as_on_gpu: bool,
    linked: Linked,
    arena: SharedArenas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_socket: list[int] = []
    add = CommandSender.add
    monkeypatch.setattr(CommandSender, "add", lambda self, added: (by_socket.append(added.step), add(self, added))[1])
    async with linked(has_socket=has_socket, as_on_gpu=as_on_gpu) as (draft, link):

        def use() -> None:
            assert link.describe() == replace(draft.worker.describe(), pid=os.getpid())  # by the kernel's word
            link.attach(attachment_to(arena, 3))
            for step in range(1, 21):
                link.send(replace(decode(step, 1, epoch=3), wants_acknowledgement=step % 10 == 0))
                time.sleep(interval_s)  # as long as a step takes
            assert link.wait_for_acknowledgement(20, 10.0)
            assert not link.wait_for_acknowledgement(21, 0.01)
            link.detach(drain=True)

        await asyncio.to_thread(use)
        assert arena.fence(FenceName.DRAFT_PROPOSED).poll() == 20
        assert draft.worker.engine.epoch is None
        assert by_socket == (list(range(1, 21)) if has_socket else [])


async def test_a_process_that_was_started_since_the_last_description_is_not_attached(
    linked: Linked, arena: SharedArenas
) -> None:
    """The memory would be given back under it, once the process that was described has ended."""
    async with linked() as (draft, link):

        def use() -> None:
            described = link.describe()
            engine = draft.worker.engine
            engine.description = replace(engine.description, pid=described.pid + 1)
            with pytest.raises(FailedPreconditionError, match="is meant, and this is process"):
                link.attach(attachment_to(arena, 1))
            link.describe()
            link.attach(attachment_to(arena, 1))
            link.detach(drain=True)

        await asyncio.to_thread(use)


async def test_a_worker_whose_socket_cannot_be_reached_gets_commands_by_the_stream(
    tmp_path: Path, linked: Linked, arena: SharedArenas
) -> None:
    async with linked() as (_, link):
        (tmp_path / "draft.sock.commands").unlink()

        def use() -> None:
            link.attach(attachment_to(arena, 1))
            link.send(replace(decode(1, 1, epoch=1), wants_acknowledgement=True))
            assert link.wait_for_acknowledgement(1, 10.0)
            link.detach(drain=True)

        await asyncio.to_thread(use)


async def test_a_worker_that_reads_no_commands_is_lost(
    thread: LinkThread, linked: Linked, arena: SharedArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it holds up neither the thread that sends nor that of the links."""
    monkeypatch.setattr(command_socket, "SEND_TIMEOUT_S", 2.0)
    monkeypatch.setattr(server, "serve_on_event_loop", lambda reader: reader.close)
    async with linked() as (_, link):
        await asyncio.to_thread(link.attach, attachment_to(arena, 1))
        chunk = PrefillChunk(slot=1, start=0, tokens=(2**31,) * 100_000, is_last=False)

        def send_until_lost() -> int:
            """Returns how many calls of the links' thread ended while it waited for room."""
            with suppress(UnavailableError):
                for step in range(1, 1000):
                    link.send(replace(decode(step, epoch=1), chunks=(chunk,)))
                    thread.call(_tasks())
                    time.sleep(0.01)
            assert link.failure is not None
            return step

        assert await asyncio.to_thread(send_until_lost) > 5
        with pytest.raises(UnavailableError, match=r"^the draft service is lost: it has read no command for"):
            link.send(decode(1000, 1, epoch=1))
        await asyncio.to_thread(link.detach, drain=False)


async def test_a_drain_that_takes_long_is_broken_off_by_another_detach(linked: Linked, arena: SharedArenas) -> None:
    """As when verify is lost meanwhile: the next epoch does not wait for it."""
    async with linked() as (draft, link):
        await asyncio.to_thread(link.attach, attachment_to(arena, 1))
        go_on = threading.Event()
        draft.device_thread.submit(go_on.wait)
        draining = asyncio.create_task(asyncio.to_thread(link.detach, drain=True))
        try:
            await asyncio.sleep(0.1)
            assert not draining.done()
            await asyncio.to_thread(link.detach, drain=False)
            assert not await draining
            assert not go_on.is_set()
        finally:
            go_on.set()


async def test_nothing_is_left_of_links_that_come_and_go(tmp_path: Path, arena: SharedArenas) -> None:
    async with served(tmp_path, Role.DRAFT) as draft:

        def use(epoch: int) -> None:
            thread = LinkThread()
            link = Link(Role.DRAFT, draft.server.address, thread, on_failure=ignore)
            link.describe()
            link.attach(attachment_to(arena, epoch))
            link.send(decode(1, 1, epoch=epoch))
            link.detach(drain=epoch % 2 == 0)
            thread.close()
            draft.device_thread.submit(lambda: None).result(timeout=20)

        def use_often() -> None:
            use(1)
            with nothing_left(with_descriptors=False):
                for epoch in range(2, 8):
                    use(epoch)

        await asyncio.to_thread(use_often)


async def test_a_worker_that_is_not_there_is_unavailable(tmp_path: Path, thread: LinkThread) -> None:
    link = Link(Role.DRAFT, f"unix:{tmp_path}/nobody.sock", thread, on_failure=ignore)
    with pytest.raises(UnavailableError, match=f"^no draft service answers at unix:{tmp_path}/nobody.sock: "):
        await asyncio.to_thread(link.describe)
    await asyncio.to_thread(link.detach, drain=True)


async def test_a_worker_that_speaks_no_grpc_is_named(tmp_path: Path, thread: LinkThread) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0garbage" * 1000)
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "garbage.sock"):
        link = Link(Role.DRAFT, f"unix:{tmp_path}/garbage.sock", thread, on_failure=ignore)
        with pytest.raises(UnavailableError, match=r"^no draft service answers at unix:"):
            await asyncio.to_thread(link.describe)
        await asyncio.to_thread(link.detach, drain=False)


async def test_what_a_worker_says_of_itself_does_not_act_on_a_terminal(linked: Linked) -> None:
    async with linked() as (draft, link):
        engine = draft.worker.engine
        engine.description = replace(engine.description, model="a\n\x1b[31mb", algorithm="\r")
        description = await asyncio.to_thread(link.describe)
        assert (description.model, description.algorithm) == ("a\\n\\x1b[31mb", "\\r")
        await asyncio.to_thread(link.detach, drain=False)


async def test_a_worker_of_the_other_role_is_not_taken(tmp_path: Path, thread: LinkThread) -> None:
    async with served(tmp_path, Role.DRAFT) as draft:
        link = Link(Role.VERIFY, draft.server.address, thread, on_failure=ignore)
        with pytest.raises(UnavailableError, match="is a draft service, not verify"):
            await asyncio.to_thread(link.describe)
        await asyncio.to_thread(link.detach, drain=False)


async def test_what_the_worker_refuses_arrives_as_what_it_is(linked: Linked, arena: SharedArenas) -> None:
    async with linked() as (_, link):
        with pytest.raises(MismatchError, match="dtype: draft has 'float32', verify has 'float16'"):
            await asyncio.to_thread(link.attach, attachment_to(arena, peer=describe(Role.VERIFY, dtype="float16")))
        await asyncio.to_thread(link.attach, attachment_to(arena))
        link.send(decode(1, 99))
        with pytest.raises(UnavailableError, match="the draft service is lost: slots: got 99"):
            await asyncio.to_thread(link.wait_for_acknowledgement, 1, 10.0)
        with pytest.raises(UnavailableError, match="lost"):
            link.send(decode(2, 1))
        await asyncio.to_thread(link.detach, drain=True)


async def test_the_loss_of_the_worker_wakes_whoever_waits(linked: Linked, arena: SharedArenas) -> None:
    async with linked() as (draft, link):
        await asyncio.to_thread(link.attach, attachment_to(arena))
        waiting = asyncio.create_task(asyncio.to_thread(link.wait_for_acknowledgement, 1, 20.0))
        await draft.server.stop(0)
        with pytest.raises(UnavailableError, match="the draft service is lost"):
            await waiting
        await asyncio.to_thread(link.detach, drain=True)


@pytest.mark.parametrize("place", ["command_to_pb", "CommandSender.flush"])
async def test_a_command_that_fails_on_its_way_loses_the_worker(
    place: str, linked: Linked, arena: SharedArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    by_socket = place == "CommandSender.flush"
    async with linked(has_socket=by_socket) as (_, link):
        await asyncio.to_thread(link.attach, attachment_to(arena, 3))
        monkeypatch.setattr(f"slipstream.scheduler.link.{place}", fail)
        link.send(replace(decode(1, 1, epoch=3), wants_acknowledgement=True))
        with pytest.raises(UnavailableError, match="the draft service is lost: a mistake of ours"):
            await asyncio.to_thread(link.wait_for_acknowledgement, 1, 20.0)
        await asyncio.to_thread(link.detach, drain=True)


async def test_a_worker_that_stops_while_it_attaches_is_unavailable_not_a_mistake(
    linked: Linked, arena: SharedArenas
) -> None:
    async with linked() as (draft, link):
        busy = threading.Event()
        draft.device_thread.submit(busy.wait)
        attaching = asyncio.create_task(asyncio.to_thread(link.attach, attachment_to(arena)))
        await until(lambda: draft.device_thread._work_queue.qsize() > 0)
        await draft.server.stop(0)
        with pytest.raises(UnavailableError):
            await attaching
        busy.set()
        await asyncio.to_thread(link.detach, drain=False)


def _pair(step: int) -> tuple[StepCommand, StepCommand]:
    """Decode commands of a step, ordered as the plan does."""
    draft = decode(step, 1, waits=step - 1)
    verify = decode(step, 1, role=Role.VERIFY, waits=step)
    return draft, verify


@pytest.mark.parametrize("acknowledge_done", [False, True])
async def test_acknowledged_dispatch_sends_what_depends_on_a_step_after_its_acknowledgement(
    tmp_path: Path, thread: LinkThread, arena: SharedArenas, acknowledge_done: bool
) -> None:
    log = EventLog()
    async with (
        served(tmp_path, Role.DRAFT, acknowledge_done=acknowledge_done) as draft,
        served(tmp_path, Role.VERIFY, acknowledge_done=acknowledge_done) as verify,
    ):
        links = {
            Role.DRAFT: Link(Role.DRAFT, draft.server.address, thread, on_failure=ignore),
            Role.VERIFY: Link(Role.VERIFY, verify.server.address, thread, on_failure=ignore),
        }
        to_draft, to_verify = links.values()
        dispatch = Dispatch(to_verify, log, lambda _: 10.0)

        def use() -> None:
            for link in links.values():
                attach(link, arena)
            for step in range(1, 11):
                first, second = _pair(step)
                dispatch.send(to_draft, first, to_draft)
                dispatch.send(to_verify, second, to_draft)
                if acknowledge_done:
                    # Verify's command is sent when draft's is done.
                    assert arena.fence(FenceName.DRAFT_PROPOSED).poll() >= step
            for link in links.values():
                link.detach(drain=True)

        await asyncio.to_thread(use)
        assert arena.fence(FenceName.VERIFY_STASH).poll() == 10
    # Draft's first command waits for nothing.
    assert [event.site for event in log.since(0)] == [Site.ACKNOWLEDGEMENT] * 19
    assert log.stalled_ns[Site.ACKNOWLEDGEMENT] > 0


async def test_acknowledged_dispatch_gives_up_when_no_acknowledgement_comes(
    linked: Linked, arena: SharedArenas
) -> None:
    async with linked() as (_, link):
        await asyncio.to_thread(link.attach, attachment_to(arena))
        dispatch = Dispatch(link, EventLog(), lambda _: 0.02)
        late = replace(decode(2, 1), ops=FenceOps((FenceWait(FenceName.DRAFT_PROPOSED, 1),)))
        with pytest.raises(DeadlineExceededError, match="the draft service did not acknowledge step 1 in time"):
            await asyncio.to_thread(dispatch.send, link, late, link)
        await asyncio.to_thread(link.detach, drain=False)


async def test_dispatch_together_holds_nothing_back(tmp_path: Path, thread: LinkThread, arena: SharedArenas) -> None:
    """The one that is waited for comes last, and still both end."""
    async with served(tmp_path, Role.DRAFT) as draft, served(tmp_path, Role.VERIFY) as verify:
        links = [
            Link(Role.DRAFT, draft.server.address, thread, on_failure=ignore),
            Link(Role.VERIFY, verify.server.address, thread, on_failure=ignore),
        ]

        def use() -> None:
            for link in links:
                attach(link, arena)
            for step in range(1, 6):
                first, second = _pair(step)
                for link, command in ((links[1], second), (links[0], first)):
                    Dispatch(links[1], EventLog()).send(link, command, links[0])
            assert arena.fence(FenceName.VERIFY_STASH).wait_on_host(5, 10.0)
            for link in links:
                link.detach(drain=True)

        await asyncio.to_thread(use)


class Acknowledging(WorkerServicer):
    """Answers each command with acknowledgements of its own choice, `again` for ever."""

    acks: tuple[int, ...] = ()
    again = False

    async def Execute(self, requests: Any, context: Any) -> AsyncIterator[pb.StepAck]:  # noqa: N802 - gRPC's name
        async for command in requests:
            for step in self.acks:
                yield pb.StepAck(epoch=command.epoch, step=step)
            while self.again:
                yield pb.StepAck(epoch=command.epoch, step=command.step)


@pytest.mark.parametrize(
    ("acks", "again", "wrong"),
    [
        ((), True, "number 2, of step 1"),
        ((2**62,), False, "number 1, of step 4611686018427387904"),
        ((1, 1), False, "number 2, of step 1"),
    ],
)
async def test_a_worker_that_acknowledges_what_it_was_not_sent_is_lost(
    acks: tuple[int, ...],
    again: bool,
    wrong: str,
    thread: LinkThread,
    linked: Linked,
    arena: SharedArenas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each acknowledgement costs the thread of the links, which is the other worker's, too."""
    monkeypatch.setattr(Acknowledging, "acks", acks)
    monkeypatch.setattr(Acknowledging, "again", again)
    async with linked(has_socket=False, kind=Acknowledging) as (_, link):

        def use() -> None:
            link.attach(attachment_to(arena, 1))
            link.send(replace(decode(1, 1, epoch=1), wants_acknowledgement=True))
            with pytest.raises(UnavailableError, match=f"acknowledgement: got {wrong}, accepted: one for each of 1"):
                link.wait_for_acknowledgement(2, 10.0)
            assert link.has_refused
            link.detach(drain=False)

        await asyncio.to_thread(use)
