"""A worker's socket for the commands of steps, beside its `Execute` stream: the way from one process to the other.

A command by gRPC passes an event loop and gRPC's own threads on both sides. The scheduler writes it to this socket at
once, and the worker reads it on the thread that carries it out. Each is a `StepCommand` behind its length in bytes,
which has four bytes, the lowest first.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from slipstream.common.errors import InvalidArgumentError, UnavailableError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES, UnixAddress, parse_address
from slipstream.common.worker.wire import command_to_pb
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.worker.step import StepCommand

logger = logging.getLogger(__name__)

ENDING = ".commands"
"""Of the socket's path, behind that of the worker's own socket."""
MAX_COMMAND_BYTES = 4 * 2**20
"""As of a message by gRPC."""
SEND_TIMEOUT_S = 5.0
"""A worker that reads nothing for so long is lost. Commands under way are few and small: a socket holds them all."""
SHORT_STEP_S = 0.003
"""Another thread writes a command 150 us later, which only short steps cannot wait for, and spares the loop as much."""
TOGETHER_S = 0.0003
"""Commands that follow each other within so much are of one step."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


def command_path(address: str, ending: str) -> Path | None:
    """The path of the socket of a worker at this address; None where there can be none."""
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        return None
    path = parsed.path.with_name(parsed.path.name + ending)
    return path if len(bytes(path)) <= MAX_UNIX_PATH_BYTES else None


class CommandSender:
    """The scheduler's end. Any thread may call: commands are written in the order in which they were added."""

    def __init__(self, path: Path) -> None:
        """Connects. Raises OSError."""
        self.is_urgent = False
        """True while steps are so short that the thread that adds a command should write it, too."""
        self._added_at = 0.0
        self._added: deque[StepCommand] = deque()
        self._writing = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SEND_TIMEOUT_S)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    @classmethod
    def beside(cls, address: str, ending: str) -> CommandSender | None:
        """Connects to the socket of the worker at an address; None where it has none, or none that can be reached."""
        path = command_path(address, ending) if ending else None
        if path is None:
            return None
        try:
            return cls(path)
        except OSError as error:
            logger.warning("commands go to the worker by gRPC, as %s cannot be used: %s", path, error)
            return None

    def add(self, command: StepCommand) -> None:
        """Adds a command for `flush` to write."""
        since_s = time.monotonic() - self._added_at
        if since_s > TOGETHER_S:
            self.is_urgent, self._added_at = since_s < SHORT_STEP_S, self._added_at + since_s
        self._added.append(command)

    def flush(self) -> None:
        """Writes what was added. Raises UnavailableError if the worker does not read, ValueError for a wrong number.

        A worker that is gone, or has ended the epoch, is no error: its `Execute` stream ends, too, and says why.
        """
        with self._writing:
            while self._added:
                message = command_to_pb(self._added.popleft()).SerializeToString()
                try:
                    self._socket.sendall(_LENGTH.pack(len(message)) + message)
                except TimeoutError:
                    raise UnavailableError(f"it has read no command for {SEND_TIMEOUT_S:.0f} s") from None
                except OSError:
                    logger.debug("a command cannot be written", exc_info=True)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class CommandReader:
    """Reads the commands of one connection. Belongs to the thread that reads."""

    def __init__(
        self, connection: socket.socket, take: Callable[[pb.StepCommand], None], fail: Callable[[Exception], None]
    ) -> None:
        """See `CommandReceiver.epoch`."""
        self._connection = connection
        self._take = take
        self._fail = fail
        self._bytes = bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        """Of the connection, to wait for."""
        return self._connection.fileno()

    def read(self) -> bool:
        """Takes the commands that are there. False at the end, or when nothing more is to be read."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._bytes += data
        try:
            while (command := self._next()) is not None:
                self._take(command)
        except Exception as error:
            self._fail(error)
            return False
        return bool(data)

    def close(self) -> None:
        """Hangs up."""
        self._connection.close()

    def _next(self) -> pb.StepCommand | None:
        """The next whole command. Raises InvalidArgumentError."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_COMMAND_BYTES:
            raise InvalidArgumentError("command", f"{length} bytes", f"at most {MAX_COMMAND_BYTES}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        message = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        try:
            return pb.StepCommand.FromString(message)
        except DecodeError:
            raise InvalidArgumentError("command", f"{length} bytes", "a StepCommand") from None


Serve = Callable[[CommandReader], Callable[[], None]]
"""Begins to call `read` whenever there is something, until it returns False; returns a function that ends it."""


def serve_on_event_loop(reader: CommandReader) -> Callable[[], None]:
    """A `Serve` for the running event loop."""
    loop, descriptor = asyncio.get_running_loop(), reader.fileno()

    def stop() -> None:
        if reader.fileno() == descriptor:
            loop.remove_reader(descriptor)
            reader.close()

    def read() -> None:
        if not reader.read():
            stop()

    loop.add_reader(descriptor, read)
    return stop


class CommandReceiver:
    """The worker's end. Belongs to the event loop."""

    def __init__(self) -> None:
        self.ending = ""
        """The ending of the socket's path; empty without one."""
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> None:
        """Listens beside a worker's address, which this process has claimed. Raises OSError."""
        path = command_path(address, ENDING)
        if path is None:
            return
        path.unlink(missing_ok=True)  # of a process that is gone: the claim is this one's
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        self._listener.setblocking(False)
        self.ending = ENDING

    def close(self) -> None:
        """Listens no more."""
        if self._listener is not None:
            Path(self._listener.getsockname()).unlink(missing_ok=True)
            self._listener.close()

    def forget(self) -> None:
        """Hangs up on those who have connected so far: they are of an epoch that is over."""
        while (connection := self._accept()) is not None:
            connection.close()

    @contextmanager
    def epoch(
        self, serve: Serve, take: Callable[[pb.StepCommand], None], fail: Callable[[Exception], None]
    ) -> Iterator[None]:
        """The context of an epoch: commands that come by the socket go to `take`, on whatever thread `serve` reads.

        `fail` is told what `take` raises, or InvalidArgumentError for what is no command; then nothing more is read.
        """
        listener = self._listener
        if listener is None:
            yield
            return
        stops: list[Callable[[], None]] = []

        def accept() -> None:
            if (connection := self._accept()) is not None:
                stops.append(serve(CommandReader(connection, take, fail)))

        loop = asyncio.get_running_loop()
        loop.add_reader(listener, accept)
        try:
            yield
        finally:
            loop.remove_reader(listener)
            for stop in stops:
                stop()

    def _accept(self) -> socket.socket | None:
        if self._listener is None:
            return None
        try:
            return self._listener.accept()[0]
        except BlockingIOError:
            return None
