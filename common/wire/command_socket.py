"""A worker's socket for the commands of steps, beside its `Execute` stream: the way from one process to the other.

A command by gRPC passes an event loop and gRPC's own threads on both sides. The scheduler writes it to this socket at
once, and the worker reads it on the thread that carries it out. Each is a `StepCommand` after its length in bytes,
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
from slipstream.common.rpc.address import COMMANDS_ENDING, path_beside
from slipstream.common.wire.worker import command_to_pb
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.wire.step import StepCommand

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 64 * 2**20
"""The largest command, also by gRPC. Few have more than some KiB, but one names all pages of what begins with it."""
SEND_TIMEOUT_S = 5.0
"""A worker that has room for no command for so long is lost."""
SHORT_STEP_S = 0.003
"""While steps are shorter, the loop's thread writes commands itself. Another thread writes them later, but spares the
loop the system calls."""
TOGETHER_S = 0.0003
"""Commands that are added within so much after the first of a step belong to that step."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class CommandSender:
    """The scheduler's end. Any thread may call: commands are written in the order in which they were added."""

    def __init__(self, path: Path) -> None:
        """Connects. Raises OSError."""
        self.is_urgent = False
        """True while steps are so short that the thread that adds a command should write it, too."""
        self._added_at = 0.0
        self._added: deque[StepCommand] = deque()
        self._unwritten = b""
        """The rest of a command that was written in part."""
        self._blocked_since: float | None = None
        """When the worker was first found to have no room."""
        self._writing = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    @classmethod
    def beside(cls, address: str, ending: str) -> CommandSender | None:
        """Connects to the socket of the worker at an address; None where it has none, or none that can be reached."""
        if "/" in ending or "\0" in ending:
            logger.warning(
                "commands go to %s by gRPC: command_socket: %r, accepted: an ending of a name", address, ending
            )
            return None
        path = path_beside(address, ending) if ending else None
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

    def flush(self) -> bool:
        """Writes what was added. False if the worker had no room for all: call it again soon.

        Raises UnavailableError if the worker has had no room for too long, ValueError for a number that a message
        cannot hold; nothing is written any more then. A worker that is gone, or has ended the epoch, is no error: its
        `Execute` stream ends, too, and says why.
        """
        with self._writing:
            while self._unwritten or self._added:
                try:
                    if not self._unwritten:
                        message = command_to_pb(self._added.popleft()).SerializeToString()
                        self._unwritten = _LENGTH.pack(len(message)) + message
                    num_written = self._socket.send(self._unwritten)
                except BlockingIOError:
                    return self._wait_for_room()
                except ValueError:
                    self._end()
                    raise
                except OSError:
                    logger.debug("a command cannot be written", exc_info=True)
                    self._end()
                else:
                    self._unwritten, self._blocked_since = self._unwritten[num_written:], None
            return True

    def close(self) -> None:
        """Ends the connection."""
        with self._writing:
            self._end()

    def _wait_for_room(self) -> bool:
        now = time.monotonic()
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since > SEND_TIMEOUT_S:
            self._end()
            raise UnavailableError(f"it has read no command for {SEND_TIMEOUT_S:.0f} s")
        return False

    def _end(self) -> None:
        """Closes the connection and drops what is left: no command may follow one that was written in part."""
        self._socket.close()
        self._added.clear()
        self._unwritten = b""


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
        """Returns the connection's descriptor, to wait for."""
        return self._connection.fileno()

    def read(self) -> bool:
        """Takes the commands that are there. False at the end, or when nothing more is to be read."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            self._fail(UnavailableError(f"the connection for commands broke: {error}"))
            return False
        self._bytes += data
        try:
            while (command := self._next()) is not None:
                self._take(command)
            if self._bytes and not data:
                raise InvalidArgumentError("command", f"{len(self._bytes)} bytes", "a whole one before the end")
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
        """Listens beside a worker's address, which this process has claimed; if that fails commands arrive by gRPC."""
        path = path_beside(address, COMMANDS_ENDING)
        if path is None:
            logger.info("commands come by gRPC: the path of %s has no room for %s", address, COMMANDS_ENDING)
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.is_socket():
                path.unlink()  # of a process that is gone: the claim is this one's
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen()
        except OSError as error:
            listener.close()
            logger.warning("commands come by gRPC, as %s cannot be listened at: %s", path, error)
            return
        listener.setblocking(False)
        self._listener, self.ending = listener, COMMANDS_ENDING

    def close(self) -> None:
        """Listens no more."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            Path(self._listener.getsockname()).unlink(missing_ok=True)
            self._listener.close()

    def forget(self) -> None:
        """Closes the connections that wait: they belong to an epoch that is over."""
        while (connection := self._accept()) is not None:
            connection.close()

    @contextmanager
    def epoch(
        self, serve: Serve, take: Callable[[pb.StepCommand], None], fail: Callable[[Exception], None]
    ) -> Iterator[None]:
        """The context of an epoch: `take` gets the commands of one connection, on the thread that `serve` reads on.

        `fail` is told what `take` raises, or InvalidArgumentError for what is no command; then nothing more is read.
        """
        listener = self._listener
        if listener is None:
            yield
            return
        stops: list[Callable[[], None]] = []

        def accept() -> None:
            if (connection := self._accept()) is not None:
                loop.remove_reader(listener)
                stops.append(serve(CommandReader(connection, take, fail)))

        loop = asyncio.get_running_loop()
        loop.add_reader(listener, accept)
        try:
            yield
        finally:
            if listener.fileno() >= 0:
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
