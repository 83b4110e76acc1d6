"""The connection to the scheduler, and one stream of it, read on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, Self

import grpc

from slipstream.common.rpc.address import SAME_HOST
from slipstream.common.rpc.status import error_from_rpc
from slipstream.protos import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from slipstream.common.rpc.address import ChannelOption

RECONNECT_S = 0.2
"""Between two attempts to connect."""
DESCRIBE_TIMEOUT_S = 1.0


class SchedulerGoneError(Exception):
    """The stream to the scheduler is over; the message says why."""


class RunStream(Protocol):
    """A call of Run. Belongs to the event loop, but for `close`."""

    def send(self, request: scheduler_pb2.RunRequest) -> None:
        """Sends a message and returns at once."""

    async def receive(self) -> list[scheduler_pb2.RunResponse]:
        """Waits for messages and returns all that there are. Raises SchedulerGoneError."""

    def close(self) -> None:
        """Ends the call. Blocks until its thread has ended."""


class Connection(Protocol):
    """A connection to a scheduler, there or not; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def open(self) -> RunStream:
        """Calls Run. Called on the event loop."""

    def describe(self) -> scheduler_pb2.SchedulerDescription:
        """Calls Describe, on any thread. Raises grpc.RpcError."""


class SchedulerConnection:
    """Implements `Connection` over a channel to an address."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def open(self) -> SchedulerStream:
        return SchedulerStream(self._stub)

    def describe(self) -> scheduler_pb2.SchedulerDescription:
        found: scheduler_pb2.SchedulerDescription = self._stub.Describe(
            scheduler_pb2.DescribeSchedulerRequest(), timeout=DESCRIBE_TIMEOUT_S
        )
        return found


class Inbox:
    """The messages of a stream that were not taken yet, and its end. Belongs to the event loop."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._messages: list[scheduler_pb2.RunResponse] = []
        self._end: SchedulerGoneError | None = None

    def put(self, message: scheduler_pb2.RunResponse | SchedulerGoneError) -> None:
        """Adds a message, or the end; nothing comes after that."""
        if self._end is not None:
            return
        if isinstance(message, SchedulerGoneError):
            self._end = message
        else:
            self._messages.append(message)
        self._arrived.set()

    async def take(self) -> list[scheduler_pb2.RunResponse]:
        """Waits for messages and returns all that there are. Raises the end once all before it were taken."""
        await self._arrived.wait()
        messages, self._messages = self._messages, []
        if self._end is not None and not messages:
            raise self._end
        if self._end is None:
            self._arrived.clear()
        return messages


class SchedulerStream:
    """Implements `RunStream`. A thread reads it: all that comes while the loop is busy is there together afterwards."""

    def __init__(self, stub: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._requests: SimpleQueue[scheduler_pb2.RunRequest | None] = SimpleQueue()
        self._call = stub.Run(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, name="scheduler link", daemon=True)
        self._thread.start()

    def send(self, request: scheduler_pb2.RunRequest) -> None:
        self._requests.put(request)

    async def receive(self) -> list[scheduler_pb2.RunResponse]:
        return await self._inbox.take()

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._thread.join()

    def _read(self) -> None:
        end = SchedulerGoneError("the scheduler ended the stream")
        try:
            for message in self._call:
                self._loop.call_soon_threadsafe(self._inbox.put, message)
        except grpc.RpcError as error:
            end = SchedulerGoneError(str(error_from_rpc(error)))
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._inbox.put, end)


def channel_options() -> list[ChannelOption]:
    """Returns the arguments of a channel to the scheduler."""
    backoff_ms = int(1000 * RECONNECT_S)
    return [
        *SAME_HOST.options(),
        ("grpc.initial_reconnect_backoff_ms", backoff_ms),
        ("grpc.min_reconnect_backoff_ms", backoff_ms),
        ("grpc.max_reconnect_backoff_ms", backoff_ms),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
