"""Deliveries: a client gets the outputs of many jobs on one stream, so that a step of all of them is few messages."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.rpc.status import status_from_error
from slipstream.common.wire.messages import LENGTH_DELIMITED, new_varint, tag
from slipstream.gateway.keys import current_owner
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from slipstream.gateway.stream import JobReader, StreamWrites, Write

MAX_OF_AN_OWNER = 64
"""Deliveries that an owner has open at a time: each process of a door has one."""
MAX_MESSAGE_BYTES = 2**18
"""Bytes of parts from which on a message takes no further ones."""


def _key(kind: Any, name: str) -> bytes:
    return tag(kind.DESCRIPTOR.fields_by_name[name].number, LENGTH_DELIMITED)


_PARTS = _key(generation_pb2.DeliverResponse, "parts")
_RESPONSE = _key(generation_pb2.DeliveredPart, "response")
_STATUS = _key(generation_pb2.DeliveredPart, "status")


class Deliveries:
    """The deliveries that clients have open. Belongs to the event loop."""

    def __init__(self, writes: StreamWrites) -> None:
        self._writes = writes
        self._open: dict[int, Delivery] = {}
        self._is_closing = False

    async def serve(self, context: Any) -> None:
        """Serves a delivery until its caller leaves. Raises ResourceExhaustedError if the owner has too many."""
        owner = current_owner()
        if sum(delivery.owner == owner for delivery in self._open.values()) == MAX_OF_AN_OWNER:
            message = f"{MAX_OF_AN_OWNER} deliveries are open, and no more at a time"
            raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
        delivery = Delivery(owner)
        self._open[delivery.id] = delivery
        try:
            async with self._writes.bounding(context.write) as write:
                if self._is_closing:
                    delivery.close()
                await delivery.run(write)
        finally:
            del self._open[delivery.id]
            delivery.end()

    def take(self, request: generation_pb2.GenerateRequest) -> DeliveredOutput:
        """Takes the delivery out of a request: what remains is the same for every call for its job.

        Raises NotFoundError if the owner of this call has no such delivery here.
        """
        reject_unknown_fields(request.delivery, "delivery")
        number, output = request.delivery.id, request.delivery.output
        request.ClearField("delivery")
        delivery = self._open.get(number)
        if delivery is None or delivery.owner != current_owner():
            raise NotFoundError(f"there is no delivery {number} at this gateway")
        return delivery.add(output)

    def close(self) -> None:
        """Ends each delivery once it has no outputs."""
        self._is_closing = True
        for delivery in self._open.values():
            delivery.close()


class Delivery:
    """The parts of outputs that wait to be written: one of each output, whose reader waits with the next."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.id = secrets.randbits(63) + 1
        self._outputs: set[int] = set()
        self._parts: dict[int, bytes] = {}
        """By output, encoded."""
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        """Set when parts are written; there is another one for the next."""
        self._is_closing = self._is_over = False

    def add(self, output: int) -> DeliveredOutput:
        """Adds an output. Raises InvalidArgumentError for a number that another one has."""
        if output in self._outputs:
            raise InvalidArgumentError("delivery.output", output, "a number that no open call has")
        self._outputs.add(output)
        return DeliveredOutput(self, output)

    def remove(self, output: int) -> None:
        """Removes an output; what it has put is still written."""
        self._outputs.discard(output)
        self._changed.set()

    async def put(self, output: int, part: bytes) -> None:
        """Has the next part of an output written, after the one before it. Raises UnavailableError after the end."""
        while output in self._parts and not self._is_over:
            await self._taken.wait()
        if self._is_over:
            raise UnavailableError("the delivery of the output has ended", retry_after_ms=RETRY_AFTER_MS)
        self._parts[output] = part
        self._changed.set()

    async def run(self, write: Write) -> None:
        """Writes the parts that are there, again and again, until it is closed and has no outputs."""
        await write(generation_pb2.DeliverResponse(delivery=self.id))
        while self._parts or self._outputs or not self._is_closing:
            if self._parts:
                await write(self._take())
            else:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        """Ends it once it has no outputs."""
        self._is_closing = True
        self._changed.set()

    def end(self) -> None:
        """Called when nothing is written any more."""
        self._is_over = True
        self._taken.set()

    def _take(self) -> bytes:
        num_bytes, taken = 0, []
        for output, part in self._parts.items():
            taken.append(output)
            num_bytes += len(part)
            if num_bytes >= MAX_MESSAGE_BYTES:
                break
        message = b"".join(map(self._parts.pop, taken))
        self._taken.set()
        self._taken = asyncio.Event()
        return message


class DeliveredOutput:
    """The output of a call in a delivery."""

    def __init__(self, delivery: Delivery, number: int) -> None:
        self._delivery = delivery
        self._number = number
        self._begin = generation_pb2.DeliveredPart(output=number).SerializeToString()

    def leave(self) -> None:
        """Called when the call ends."""
        self._delivery.remove(self._number)

    async def send(self, reader: JobReader, timeout_s: float | None) -> None:
        """Delivers all that a reader has to say, and the error that ends it."""
        try:
            await reader.send(self._write, timeout_s=timeout_s)
        except SlipstreamError as error:
            await self._put(_STATUS, status_from_error(error).SerializeToString())

    async def _write(self, message: Any) -> None:
        await self._put(_RESPONSE, message if isinstance(message, bytes) else message.SerializeToString())

    async def _put(self, field: bytes, content: bytes) -> None:
        begin = self._begin + field + new_varint(len(content))
        part = b"".join((_PARTS, new_varint(len(begin) + len(content)), begin, content))
        await self._delivery.put(self._number, part)
