"""A worker's socket for the commands of steps, beside its `Execute` stream: the way from one process to the other.

A command by gRPC passes an event loop and gRPC's own threads on both sides. The scheduler's loop writes it to this
socket itself, and the worker's event loop reads it there. Each is a `StepCommand` behind its length in bytes, which has
four bytes, the lowest first.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

from google.protobuf.message import DecodeError

from slipstream.common.errors import InvalidArgumentError, UnavailableError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES, UnixAddress, parse_address
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

logger = logging.getLogger(__name__)

ENDING = ".commands"
"""Of the socket's path, behind that of the worker's own socket."""
MAX_COMMAND_BYTES = 4 * 2**20
"""As of a message by gRPC."""
SEND_TIMEOUT_S = 5.0
"""A worker that reads nothing for so long is lost. Commands under way are few and small: a socket holds them all."""
_LENGTH = struct.Struct("<I")


def command_path(address: str, ending: str = ENDING) -> Path | None:
    """The path of the socket of a worker at this address; None where there can be none."""
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        return None
    path = parsed.path.with_name(parsed.path.name + ending)
    return path if len(bytes(path)) <= MAX_UNIX_PATH_BYTES else None


class CommandSender:
    """The scheduler's end. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Connects. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SEND_TIMEOUT_S)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def send(self, command: pb.StepCommand) -> None:
        """Writes a command. Raises UnavailableError if the worker does not read.

        A worker that is gone, or has ended the epoch, is no error: its `Execute` stream ends, too, and says why.
        """
        message = command.SerializeToString()
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except TimeoutError:
            raise UnavailableError(f"it has read no command for {SEND_TIMEOUT_S:.0f} s") from None
        except OSError:
            logger.debug("a command cannot be written", exc_info=True)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class CommandReceiver:
    """The worker's end: the commands of one epoch after the other, by the socket or by `Execute`'s own stream.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self.ending = ""
        """The ending of the socket's path; empty without one."""
        self._arrived: asyncio.Queue[pb.StepCommand | Exception | None] = asyncio.Queue()
        """The commands of this epoch; an error, or None, for the end of its stream."""
        self._connections: set[asyncio.Transport] = set()
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None

    async def listen(self, address: str) -> None:
        """Listens beside a worker's address, which this process has claimed. Raises OSError."""
        path = command_path(address)
        if path is not None:
            path.unlink(missing_ok=True)  # of a process that is gone: the claim is this one's
            self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), str(path))
            path.chmod(0o600)
            self._path, self.ending = path, ENDING

    def close(self) -> None:
        """Ends all connections, and listens no more."""
        self._hang_up()
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @asynccontextmanager
    async def epoch(
        self, requests: AsyncIterator[pb.StepCommand]
    ) -> AsyncIterator[Callable[[], Awaitable[pb.StepCommand | None]]]:
        """The context of an `Execute` call: yields a function that returns the next command, None at the end.

        It raises InvalidArgumentError for what is no command. Connections end with the context.
        """
        reading = asyncio.create_task(self._read(requests))
        try:
            yield self._next
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            self._hang_up()
            self._arrived = asyncio.Queue()

    def put(self, arrived: pb.StepCommand | Exception | None) -> None:
        """Takes a command, or the reason why no more come."""
        self._arrived.put_nowait(arrived)

    def connected(self, transport: asyncio.Transport) -> None:
        """A scheduler has connected."""
        self._connections.add(transport)

    def disconnected(self, transport: asyncio.Transport) -> None:
        """It is gone. Its `Execute` stream says so, too."""
        self._connections.discard(transport)

    async def _next(self) -> pb.StepCommand | None:
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    async def _read(self, requests: AsyncIterator[pb.StepCommand]) -> None:
        """Takes the commands of the stream itself, and its end."""
        try:
            async for command in requests:
                self.put(command)
        finally:
            self.put(None)

    def _hang_up(self) -> None:
        for transport in self._connections:
            transport.abort()
        self._connections.clear()


class _Connection(asyncio.Protocol):
    """A scheduler's connection: puts together the bytes of commands."""

    def __init__(self, receiver: CommandReceiver) -> None:
        self._receiver = receiver
        self._bytes = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._receiver.connected(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None, "it was made"
        self._receiver.disconnected(self._transport)

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if length > MAX_COMMAND_BYTES:
                self._give_up(InvalidArgumentError("command", f"{length} bytes", f"at most {MAX_COMMAND_BYTES}"))
                return
            if len(self._bytes) < end:
                return
            try:
                self._receiver.put(pb.StepCommand.FromString(bytes(self._bytes[_LENGTH.size : end])))
            except DecodeError:
                self._give_up(InvalidArgumentError("command", f"{length} bytes", "a StepCommand"))
                return
            del self._bytes[:end]

    def _give_up(self, error: Exception) -> None:
        assert self._transport is not None, "data comes behind it"
        self._bytes.clear()
        self._receiver.put(error)
        self._transport.abort()
