"""Commands by a worker's socket: in order, whole, and of one epoch alone."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from contextlib import aclosing, asynccontextmanager, closing
from typing import TYPE_CHECKING

import pytest

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.worker.command_socket import MAX_COMMAND_BYTES, CommandReceiver, CommandSender, command_path
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[CommandReceiver]:
    """Listens beside `worker.sock`, and leaves nothing behind."""
    made = CommandReceiver()
    with closing(made):
        await made.listen(f"unix:{tmp_path}/worker.sock")
        yield made
    assert not os.listdir(tmp_path)


class Stream:
    """An `Execute` stream: what its scheduler writes, and its end."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[pb.StepCommand | None] = asyncio.Queue()

    async def requests(self) -> AsyncIterator[pb.StepCommand]:
        """What a servicer is given."""
        while (command := await self.written.get()) is not None:
            yield command


@asynccontextmanager
async def epoch_of(receiver: CommandReceiver, stream: Stream) -> AsyncIterator[asyncio.Queue[pb.StepCommand | None]]:
    """An epoch, whose commands lie in the queue."""
    async with aclosing(stream.requests()) as requests, receiver.epoch(requests) as next_command:
        taken: asyncio.Queue[pb.StepCommand | None] = asyncio.Queue()

        async def take() -> None:
            while (command := await next_command()) is not None:
                taken.put_nowait(command)
            taken.put_nowait(None)

        taking = asyncio.create_task(take())
        yield taken
        stream.written.put_nowait(None)
        await taking


def sender(tmp_path: Path) -> CommandSender:
    """Connected to `receiver`."""
    path = command_path(f"unix:{tmp_path}/worker.sock")
    assert path is not None
    return CommandSender(path)


async def test_commands_of_all_sizes_arrive_in_order(receiver: CommandReceiver, tmp_path: Path) -> None:
    sizes = [1, 3, 70_000, 2, 400_000, 0]
    commands = [pb.StepCommand(step=step, slots=range(size)) for step, size in enumerate(sizes)]
    async with epoch_of(receiver, Stream()) as taken:
        with closing(sender(tmp_path)) as to_worker:
            for command in commands:
                await asyncio.to_thread(to_worker.send, command)
            assert [await taken.get() for _ in commands] == commands


async def test_commands_by_the_stream_itself_are_taken_too(receiver: CommandReceiver) -> None:
    stream = Stream()
    async with epoch_of(receiver, stream) as taken:
        for step in (1, 2):
            stream.written.put_nowait(pb.StepCommand(step=step))
        assert [command.step for _ in (1, 2) if (command := await taken.get()) is not None] == [1, 2]
        stream.written.put_nowait(None)
        assert await taken.get() is None


async def test_connections_end_with_the_epoch_and_nothing_is_left_for_the_next(
    receiver: CommandReceiver, tmp_path: Path
) -> None:
    with closing(sender(tmp_path)) as of_last:
        async with epoch_of(receiver, Stream()) as taken:
            of_last.send(pb.StepCommand(step=1))
            assert await taken.get() == pb.StepCommand(step=1)
        of_last.send(pb.StepCommand(step=2))
        of_last.send(pb.StepCommand(step=3))  # no error: the end of its Execute stream says it
        async with epoch_of(receiver, Stream()) as taken:
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
async def test_what_is_no_command_ends_the_epoch(
    data: bytes, accepted: str, receiver: CommandReceiver, tmp_path: Path
) -> None:
    async with aclosing(Stream().requests()) as requests, receiver.epoch(requests) as next_command:
        _, writer = await asyncio.open_unix_connection(f"{tmp_path}/worker.sock.commands")
        writer.write(data)
        with pytest.raises(InvalidArgumentError, match=f"command.*{accepted}"):
            await next_command()
        writer.close()


async def test_only_this_user_may_connect(receiver: CommandReceiver, tmp_path: Path) -> None:
    assert receiver.ending == ".commands"
    assert stat.S_IMODE((tmp_path / "worker.sock.commands").stat().st_mode) == 0o600


async def test_the_socket_of_a_process_that_is_gone_is_in_nobodys_way(tmp_path: Path) -> None:
    first, second = CommandReceiver(), CommandReceiver()
    await first.listen(f"unix:{tmp_path}/worker.sock")
    with closing(second):
        await second.listen(f"unix:{tmp_path}/worker.sock")
        async with epoch_of(second, Stream()) as taken:
            with closing(sender(tmp_path)) as to_worker:
                to_worker.send(pb.StepCommand(step=1))
                assert await taken.get() == pb.StepCommand(step=1)
    first.close()


async def test_a_path_without_room_for_the_ending_has_no_socket(tmp_path: Path) -> None:
    made = CommandReceiver()
    await made.listen(f"unix:/tmp/{'x' * 100}")
    assert made.ending == ""
    made.close()
