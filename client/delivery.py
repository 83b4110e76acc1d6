"""A client's delivery: one stream on which the outputs of many of its jobs arrive together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from slipstream.common.errors import ConnectionLostError, NotFoundError, SlipstreamError
from slipstream.common.rpc.status import error_from_rpc, error_from_status
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

logger = logging.getLogger(__name__)

MAX_UNREAD = 64
"""Messages of an output that wait for their reader. The output goes on by a call of its own after so many, where gRPC
holds it back until it is read."""


class Delivery:
    """A stream of a server, on which outputs arrive. Belongs to the event loop."""

    def __init__(self, stub: Any) -> None:
        """Opens it."""
        self._stub = stub
        self._id: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """0 if it could not be opened."""
        self._calls: dict[int, DeliveredCall] = {}
        self._numbers = count(1)
        self._running = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """True once nothing arrives any more."""
        return self._running.done() or self._running.cancelling() > 0

    async def opened(self) -> bool:
        """Returns whether outputs can arrive, once that is known."""
        return await asyncio.shield(self._id) != 0 and not self.is_over

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None, make_call: Callable[[], Any]
    ) -> DeliveredCall:
        """Calls Generate, with the output on this stream. `make_call`: makes the call that has the output itself."""
        number = next(self._numbers)
        request.delivery.id, request.delivery.output = self._id.result(), number
        call = self._stub.Generate(request, timeout=timeout_s)
        found = self._calls[number] = DeliveredCall(call, make_call, lambda: self._calls.pop(number, None))
        return found

    def close(self) -> asyncio.Task[None]:
        """Ends it. Returns what is done then."""
        self._running.cancel()
        return self._running

    async def _run(self) -> None:
        why = ""
        call: Any = None
        try:
            call = self._stub.Deliver(generation_pb2.DeliverRequest())
            async for message in call:
                if not self._id.done():
                    self._id.set_result(message.delivery)
                for part in message.parts:
                    found = self._calls.get(part.output)
                    if found is not None:
                        found.put(part)
        except grpc.RpcError as error:
            why = str(error_from_rpc(error))
            logger.info("outputs do not arrive together: %s", why)
        finally:
            if call is not None:
                call.cancel()
            if not self._id.done():
                self._id.set_result(0)
            for found in self._calls.values():
                found.fail(ConnectionLostError(f"the stream of outputs ended before the job did: {why}"))


class DeliveredCall:
    """A call of Generate whose output arrives by a delivery: yields the messages as the call itself would.

    A reader that does not keep up gets the rest by a call of its own, and so does one whose server has no such
    delivery.
    """

    def __init__(self, call: Any, make_call: Callable[[], Any], on_leave: Callable[[], object]) -> None:
        self._call = call
        self._make_call = make_call
        self._on_leave = on_leave
        self._unread: deque[generation_pb2.GenerateResponse] = deque()
        self._is_full = self._has_ended = False
        self._error: SlipstreamError | None = None
        self._changed = asyncio.Event()
        call.add_done_callback(self._on_end)

    def put(self, part: generation_pb2.DeliveredPart) -> None:
        """Takes the next part; after too many that are not read it drops those that follow."""
        self._is_full = self._is_full or len(self._unread) == MAX_UNREAD
        if self._is_full:
            pass
        elif part.status:
            self._error = error_from_status(part.status)
        else:
            # A part as it is would keep the memory of the parts of all other outputs.
            message = generation_pb2.GenerateResponse()
            message.CopyFrom(part.response)
            self._unread.append(message)
        self._changed.set()

    def fail(self, error: SlipstreamError) -> None:
        """Called when no more parts arrive."""
        self._error = self._error or error
        self._changed.set()

    def cancel(self) -> None:
        """Ends the call, and the job unless it is over or has another caller."""
        self._call.cancel()
        self._on_leave()

    async def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        try:
            while not self._is_full or self._unread:
                if self._unread:
                    message = self._unread.popleft()
                    yield message
                    if message.HasField("job_usage"):
                        return
                elif self._error is not None:
                    raise self._error
                elif self._has_ended:
                    self._has_ended = False
                    await self._raise_failure()
                else:
                    self._changed.clear()
                    await self._changed.wait()
        except NotFoundError as error:
            logger.info("an output arrives by itself: %s", error)
        call = self._make_call()
        try:
            async for message in call:
                # The job has this caller now.
                self.cancel()
                yield message
        finally:
            call.cancel()

    def _on_end(self, _: Any) -> None:
        self._has_ended = True
        self._changed.set()

    async def _raise_failure(self) -> None:
        """Raises the error of a call that has failed. The end of another one arrives with its output."""
        try:
            async for _ in self._call:
                pass
        except grpc.RpcError as error:
            if isinstance(found := error_from_rpc(error), NotFoundError):
                raise found from None
            raise
