"""Commands by a worker's socket: in order, whole, and of one epoch alone."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, cast

import pytest

from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError
from slipstream.common.worker.command_socket import (
    MAX_COMMAND_BYTES,
    CommandReceiver,
    CommandSender,
    command_path,
    serve_on_event_loop,
)
from slipstream.protos import worker_pb2 as pb
from slipstream.services.worker.servicer import DeviceThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from slipstream.common.worker.command_socket import Serve

pytestmark = pytest.mark.timeout(20)


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
    path = command_path(f"unix:{tmp_path}/worker.sock")
    assert path is not None
    return CommandSender(path)


@pytest.mark.parametrize("is_read_by_a_thread", [False, True])
async def test_commands_of_all_sizes_arrive_in_order(
    is_read_by_a_thread: bool, receiver: CommandReceiver, tmp_path: Path
) -> None:
    sizes = [1, 3, 70_000, 2, 400_000, 0]
    commands = [pb.StepCommand(step=step, slots=range(size)) for step, size in enumerate(sizes)]
    with DeviceThread() as thread:
        async with epoch_of(receiver, thread.serve if is_read_by_a_thread else serve_on_event_loop) as taken:
            with closing(sender(tmp_path)) as to_worker:
                for command in commands:
                    await asyncio.to_thread(to_worker.send, command)
                assert [await taken.get() for _ in commands] == commands
                # Other work of the thread has its turn, and commands after it.
                assert await asyncio.wrap_future(thread.submit(lambda: "work")) == "work"
                await asyncio.to_thread(to_worker.send, commands[0])
                assert await taken.get() == commands[0]
                assert thread.busy_s == 0


async def test_connections_end_with_the_epoch_and_nothing_is_left_for_the_next(
    receiver: CommandReceiver, tmp_path: Path
) -> None:
    with closing(sender(tmp_path)) as of_last, closing(sender(tmp_path)) as never_read:
        never_read.send(pb.StepCommand(step=9))
        receiver.forget()
        with closing(sender(tmp_path)) as of_this:
            async with epoch_of(receiver) as taken:
                of_this.send(pb.StepCommand(step=1))
                assert await taken.get() == pb.StepCommand(step=1)
            for step in (2, 3):
                of_this.send(pb.StepCommand(step=step))  # no error: the end of its Execute stream says it
            of_last.send(pb.StepCommand(step=9))
        async with epoch_of(receiver) as taken:
            with closing(sender(tmp_path)) as of_next:
                of_next.send(pb.StepCommand(step=1))
                assert await taken.get() == pb.StepCommand(step=1)
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
        to_worker.send(pb.StepCommand(step=1))
        to_worker.send(pb.StepCommand(step=2))
        assert str(await failed.get()) == "step 1"
        await asyncio.sleep(0)
        assert failed.empty()


async def test_a_thread_that_is_shut_down_reads_no_more(receiver: CommandReceiver, tmp_path: Path) -> None:
    thread = DeviceThread()
    async with epoch_of(receiver, thread.serve) as taken:
        with closing(sender(tmp_path)) as to_worker:
            to_worker.send(pb.StepCommand(step=1))
            assert await taken.get() == pb.StepCommand(step=1)
            await asyncio.to_thread(thread.shutdown)
    thread.shutdown()


async def test_only_this_user_may_connect(receiver: CommandReceiver, tmp_path: Path) -> None:
    assert receiver.ending == ".commands"
    assert stat.S_IMODE((tmp_path / "worker.sock.commands").stat().st_mode) == 0o600


async def test_the_socket_of_a_process_that_is_gone_is_in_nobodys_way(tmp_path: Path) -> None:
    first, second = CommandReceiver(), CommandReceiver()
    first.listen(f"unix:{tmp_path}/worker.sock")
    with closing(second):
        second.listen(f"unix:{tmp_path}/worker.sock")
        async with epoch_of(second) as taken:
            with closing(sender(tmp_path)) as to_worker:
                to_worker.send(pb.StepCommand(step=1))
                assert await taken.get() == pb.StepCommand(step=1)
    first.close()


def test_a_path_without_room_for_the_ending_has_no_socket() -> None:
    made = CommandReceiver()
    made.listen(f"unix:/tmp/{'x' * 100}")
    assert made.ending == ""
    made.close()
