"""One stream to the scheduler, read on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from slipstream.common.fail_points import failing_before
from slipstream.common.rpc.keepalive import SAME_HOST
from slipstream.common.rpc.status import error_from_rpc

if TYPE_CHECKING:
    from slipstream.common.rpc.keepalive import ChannelOption
    from slipstream.protos import scheduler_pb2

RECONNECT_S = 0.2
"""Between two attempts to connect."""


class SchedulerGoneError(Exception):
    """The stream to the scheduler is over; the message says why."""


class SchedulerStream:
    """A call of Run. A thread reads it: all that comes while the event loop is busy is there together afterwards."""

    def __init__(self, stub: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._received: list[scheduler_pb2.RunResponse | SchedulerGoneError] = []
        self._requests: SimpleQueue[scheduler_pb2.RunRequest | None] = SimpleQueue()
        self._call = stub.Run(iter(self._requests.get, None))
        self._submit = failing_before("gateway.before_submit", self._requests.put)
        self._thread = threading.Thread(target=self._read, name="scheduler link", daemon=True)
        self._thread.start()

    def send(self, request: scheduler_pb2.RunRequest) -> None:
        """Sends a message and returns at once."""
        self._submit(request)

    async def receive(self) -> list[scheduler_pb2.RunResponse]:
        """Waits for messages and returns all that there are. Raises SchedulerGoneError."""
        await self._arrived.wait()
        self._arrived.clear()
        received, self._received = self._received, []
        messages: list[scheduler_pb2.RunResponse] = []
        for message in received:
            if isinstance(message, SchedulerGoneError):
                if messages:
                    self._put(message)
                    break
                raise message
            messages.append(message)
        return messages

    def close(self) -> None:
        """Ends the call. Blocks until the thread has ended."""
        self._requests.put(None)
        self._call.cancel()
        self._thread.join()

    def _read(self) -> None:
        end = SchedulerGoneError("the scheduler ended the stream")
        try:
            for message in self._call:
                self._loop.call_soon_threadsafe(self._put, message)
        except grpc.RpcError as error:
            end = SchedulerGoneError(str(error_from_rpc(error)))
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, end)

    def _put(self, message: scheduler_pb2.RunResponse | SchedulerGoneError) -> None:
        self._received.append(message)
        self._arrived.set()


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
