"""Commands by a worker's socket: in order, whole, and of one epoch alone."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from slipstream.common.wire import command_socket
from slipstream.common.wire.command_socket import (
    MAX_COMMAND_BYTES,
    CommandReceiver,
    CommandSender,
    Serve,
    serve_on_event_loop,
)
from slipstream.common.wire.step import StepCommand
from slipstream.common.wire.worker import command_to_pb
from slipstream.protos import worker_pb2 as pb
from slipstream.services.worker.server import DeviceThread
from tests.harness.waiting import until
from tests.harness.workers import decode


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[CommandReceiver]:
    """Listens beside `worker.sock`, and leaves nothing behind."""
    made = CommandReceiver()
    with closing(made):
        made.listen(f"unix:{tmp_path}/worker.sock")
        yield made
    assert not os.listdir(tmp_path)


@asynccontextmanager
async def epoch_of(
    receiver: CommandReceiver, serve: Serve = serve_on_event_loop
) -> AsyncIterator[asyncio.Queue[pb.StepCommand | Exception]]:
    """An epoch, whose commands lie in the queue, as well as the error that ends it."""
    taken: asyncio.Queue[pb.StepCommand | Exception] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(item: pb.StepCommand | Exception) -> None:
        loop.call_soon_threadsafe(taken.put_nowait, item)

    with receiver.epoch(serve, put, put):
        yield taken


def sender(tmp_path: Path) -> CommandSender:
    """Connected to `receiver`."""
    made = CommandSender.beside(f"unix:{tmp_path}/worker.sock", ".commands")
    assert made is not None
    return made


def send(to_worker: CommandSender, *commands: StepCommand) -> list[pb.StepCommand]:
    """Writes commands; returns what the worker gets."""
    for command in commands:
        to_worker.add(command)
    while not to_worker.flush():
        time.sleep(0.001)
    return [command_to_pb(command) for command in commands]


async def test_only_commands_of_short_steps_are_urgent(
    receiver: CommandReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(command_socket, "time", SimpleNamespace(monotonic=lambda: now))
    with closing(sender(tmp_path)) as to_worker:
        found = []
        for passed_s in (0.0, 0.02, 0.0001, 0.001, 0.0001, 0.002, 0.02):
            now += passed_s
            to_worker.add(decode(1))
            found.append(to_worker.is_urgent)
    assert found == [False, False, False, True, True, True, False]


@pytest.mark.parametrize("is_read_by_a_thread", [False, True])
async def test_commands_of_all_sizes_arrive_in_order(
    is_read_by_a_thread: bool, receiver: CommandReceiver, tmp_path: Path
) -> None:
    sizes = [1, 3, 70_000, 2, 1_600_000, 0]
    commands = [replace(decode(step), slots=tuple(range(size))) for step, size in enumerate(sizes)]
    with DeviceThread() as thread:
        async with epoch_of(receiver, thread.serve if is_read_by_a_thread else serve_on_event_loop) as taken:
            with closing(sender(tmp_path)) as to_worker:
                written = await asyncio.to_thread(send, to_worker, *commands)
                assert [await taken.get() for _ in commands] == written
                # Other work of the thread has its turn, and commands after it.
                assert await asyncio.wrap_future(thread.submit(lambda: "work")) == "work"
                await asyncio.to_thread(send, to_worker, commands[0])
                assert await taken.get() == written[0]
                await until(lambda: thread.busy_s == 0)


async def test_connections_end_with_the_epoch_and_nothing_is_left_for_the_next(
    receiver: CommandReceiver, tmp_path: Path
) -> None:
    with closing(sender(tmp_path)) as of_last, closing(sender(tmp_path)) as never_read:
        send(never_read, decode(9))
        receiver.forget()
        with closing(sender(tmp_path)) as of_this:
            async with epoch_of(receiver) as taken:
                send(of_this, decode(1))
                assert await taken.get() == command_to_pb(decode(1))
            for step in (2, 3):
                send(of_this, decode(step))  # no error: the end of its Execute stream says it
            send(of_last, decode(9))
        async with epoch_of(receiver) as taken:
            with closing(sender(tmp_path)) as of_next:
                send(of_next, decode(1))
                assert await taken.get() == command_to_pb(decode(1))
                assert taken.empty()


@pytest.mark.parametrize(
    ("data", "accepted"),
    [
        (struct.pack("<I", MAX_COMMAND_BYTES + 1), f"at most {MAX_COMMAND_BYTES}"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "a StepCommand"),
    ],
)
async def test_what_is_no_command_is_the_last_thing_that_is_read(
    data: bytes, accepted: str, receiver: CommandReceiver, tmp_path: Path
) -> None:
    async with epoch_of(receiver) as taken:
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/worker.sock.commands")
        writer.write(data)
        with pytest.raises(InvalidArgumentError, match=f"command.*{accepted}"):
            raise cast("Exception", await taken.get())
        assert not await reader.read()
        writer.close()


async def test_a_command_that_cannot_be_carried_out_is_the_last_one(receiver: CommandReceiver, tmp_path: Path) -> None:
    failed: asyncio.Queue[Exception] = asyncio.Queue()

    def refuse(command: pb.StepCommand) -> None:
        raise FailedPreconditionError(f"step {command.step}")

    with receiver.epoch(serve_on_event_loop, refuse, failed.put_nowait), closing(sender(tmp_path)) as to_worker:
        send(to_worker, decode(1))
        send(to_worker, decode(2))
        assert str(await failed.get()) == "step 1"
        await asyncio.sleep(0)
        assert failed.empty()


async def test_work_that_comes_behind_a_command_is_done_behind_it(receiver: CommandReceiver, tmp_path: Path) -> None:
    """As when a worker is drained right behind its last command."""
    done: list[str] = []
    has_begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        go_on.wait()

    def take(command: pb.StepCommand) -> None:
        done.append(f"command {command.step}")

    with (
        DeviceThread() as thread,
        closing(sender(tmp_path)) as to_worker,
        receiver.epoch(thread.serve, take, lambda _: None),
    ):
        send(to_worker, decode(1))
        await until(lambda: done == ["command 1"])
        thread.submit(hold)
        await asyncio.to_thread(has_begun.wait)
        send(to_worker, decode(2))
        drained = thread.submit(done.append, "drained")
        go_on.set()
        await asyncio.wrap_future(drained)
    assert done == ["command 1", "command 2", "drained"]


async def test_a_thread_that_is_shut_down_reads_no_more(receiver: CommandReceiver, tmp_path: Path) -> None:
    thread = DeviceThread()
    async with epoch_of(receiver, thread.serve) as taken:
        with closing(sender(tmp_path)) as to_worker:
            send(to_worker, decode(1))
            assert await taken.get() == command_to_pb(decode(1))
            await asyncio.to_thread(thread.shutdown)
    thread.shutdown()


async def test_a_second_connection_is_not_read(receiver: CommandReceiver, tmp_path: Path) -> None:
    with DeviceThread() as thread, closing(sender(tmp_path)) as first:
        async with epoch_of(receiver, thread.serve) as taken:
            send(first, decode(1))
            assert await taken.get() == command_to_pb(decode(1))
            with closing(sender(tmp_path)) as second:
                send(second, decode(2))
                await asyncio.wrap_future(thread.submit(lambda: None))
                send(first, decode(3))
                assert await taken.get() == command_to_pb(decode(3))


async def test_nothing_is_written_behind_a_command_that_was_not_written_whole(
    receiver: CommandReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_socket, "SEND_TIMEOUT_S", 0.0)
    with closing(sender(tmp_path)) as to_worker:
        to_worker.add(replace(decode(1), slots=tuple(range(400_000))))
        assert not to_worker.flush(), "no one reads"
        await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError):
            to_worker.flush()
        to_worker.add(decode(2))
        assert to_worker.flush(), "it is given up"
    with closing(sender(tmp_path)) as to_worker:
        to_worker.add(replace(decode(1), slots=(-1,)))
        to_worker.add(decode(2))
        with pytest.raises(ValueError, match="-1"):
            to_worker.flush()
        assert to_worker.flush()
        assert receiver.ending


@pytest.mark.parametrize("ending", ["", "/tmp/worker.sock.commands", ".com\0mands", ".missing"])
async def test_without_a_socket_that_can_be_reached_there_is_no_sender(
    ending: str, receiver: CommandReceiver, tmp_path: Path
) -> None:
    assert receiver.ending
    assert CommandSender.beside(f"unix:{tmp_path}/worker.sock", ending) is None


async def test_a_command_that_breaks_off_is_an_error(receiver: CommandReceiver, tmp_path: Path) -> None:
    async with epoch_of(receiver) as taken:
        _, writer = await asyncio.open_unix_connection(f"{tmp_path}/worker.sock.commands")
        writer.write(struct.pack("<I", 30) + b"half")
        writer.close()
        with pytest.raises(InvalidArgumentError, match="a whole one before the end"):
            raise cast("Exception", await taken.get())


async def test_only_this_user_may_connect(receiver: CommandReceiver, tmp_path: Path) -> None:
    assert receiver.ending == ".commands"
    assert stat.S_IMODE((tmp_path / "worker.sock.commands").stat().st_mode) == 0o600


async def test_the_socket_of_a_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    first, second = CommandReceiver(), CommandReceiver()
    first.listen(f"unix:{tmp_path}/worker.sock")
    with closing(second):
        second.listen(f"unix:{tmp_path}/worker.sock")
        async with epoch_of(second) as taken:
            with closing(sender(tmp_path)) as to_worker:
                send(to_worker, decode(1))
                assert await taken.get() == command_to_pb(decode(1))
    first.close()


def test_a_path_without_room_for_the_ending_has_no_socket() -> None:
    made = CommandReceiver()
    made.listen(f"unix:/tmp/{'x' * 100}")
    assert made.ending == ""
    made.close()
