"""Receives and decodes the messages of requests: they arrive in turns, and are bounded in bytes and in fields.

A call asks for its message when it is let in, and when it is its turn. Until then, gRPC takes in `WINDOW_BYTES` of it;
after that all that a message may have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from slipstream.common.errors import RETRY_AFTER_MS, InvalidArgumentError, ResourceExhaustedError
from slipstream.common.rpc.interceptor import ServerInterceptor, is_health_check, replaced, undecodable
from slipstream.common.rpc.logs import RateLimitedLog
from slipstream.common.rpc.loop_turns import LoopTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.descriptor import Descriptor

    from slipstream.common.rpc.interceptor import Continuation, Handle

logger = logging.getLogger(__name__)

WINDOW_BYTES = 2**16 - 1
"""Bytes of a call that gRPC takes in while no one reads them."""
MAX_ARRIVING_BYTES = 2**28
"""Bytes of the messages that arrive, or wait to be decoded, at a time."""
MAX_ARRIVING_OF_A_CLIENT = 8
"""Messages of one client among them."""
MAX_REQUEST_STREAMS = 64
"""Calls at a time whose requests are a stream: each may be receiving a message for as long as it is open."""
ARRIVAL_TIMEOUT_S = 30.0
"""Time for a message to arrive, including the wait for its turn."""
PATIENCE_S = 5.0
"""Age from which a message that still arrives is given up for one that waits for a turn."""
MAX_ARRIVING_HEALTH_CHECKS = 8
"""Health checks have turns of their own, since they need no key."""
MAX_WAITING_HEALTH_CHECKS = 512
HEALTH_PATIENCE_S = 0.1
SLOW_REQUEST_BYTES = 2**16
"""To receive one of 4 MiB, to decode it and to look at its text takes a few milliseconds each; of one with thousands of
messages, the last two do."""


class Turn:
    """The right of a call to receive its message."""

    __slots__ = ("_began_at", "arrival", "client")

    def __init__(self, client: str) -> None:
        self.client = client
        self._began_at = asyncio.get_running_loop().time()
        self.arrival: asyncio.Timeout | None = None
        """The limit of the time in which the message arrives; None when it is there."""

    def hurry(self, patience_s: float) -> None:
        """Gives the message up if it has not arrived within this time of the turn's beginning."""
        if self.arrival is not None and not self.arrival.expired():
            end = self._began_at + patience_s
            self.arrival.reschedule(min(self.arrival.when() or end, end))


class ReceiveTurns:
    """Lets a number of messages arrive at a time; clients take turns. Belongs to the event loop.

    While a call waits, the oldest of the messages that hold it up is given up when it takes long to arrive.
    """

    def __init__(self, most: int, most_of_a_client: int, patience_s: float, max_waiting: int | None = None) -> None:
        """`most`: messages at a time. Beyond `max_waiting` calls, the client with the most that wait loses one."""
        self._most = most
        self._most_of_a_client = most_of_a_client
        self._patience_s = patience_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._turns: dict[Turn, None] = {}
        self._num_turns: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[Turn]]] = OrderedDict()
        """By client, in the order of their turns."""

    async def take(self, client: str) -> Turn:
        """Returns when it is the client's turn; `end` ends it. Raises ResourceExhaustedError if too many wait."""
        if self._num_waiting == self._max_waiting:
            longest = max(self._waiting, key=lambda name: len(self._waiting[name]))
            dropped = self._pop(longest)
            if not dropped.done():
                dropped.set_exception(late("too many calls wait for their turn to be received"))
        waiting: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiting)
        self._num_waiting += 1
        self._pass_on()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.cancelled():
                self._remove(client, waiting)
            else:
                self.end(waiting.result())
            raise

    def end(self, turn: Turn) -> None:
        """Ends a turn; no effect on one that has ended."""
        if turn in self._turns:
            del self._turns[turn]
            self._num_turns[turn.client] -= 1
            if not self._num_turns[turn.client]:
                del self._num_turns[turn.client]
            self._pass_on()

    def _pass_on(self) -> None:
        """Gives turns to those that wait, and hurries the oldest of the messages that hold up the others."""
        while len(self._turns) < self._most and (client := self._next()) is not None:
            waiting = self._pop(client)
            if not waiting.done():  # it may have been cancelled in this turn of the event loop
                turn = Turn(client)
                self._turns[turn] = None
                self._num_turns[client] += 1
                waiting.set_result(turn)
        if len(self._turns) == self._most and self._waiting:
            self._hurry(list(self._turns))
        else:
            for client in self._waiting:
                self._hurry([turn for turn in self._turns if turn.client == client])

    def _next(self) -> str | None:
        return next((name for name in self._waiting if self._num_turns[name] < self._most_of_a_client), None)

    def _hurry(self, turns: list[Turn]) -> None:
        oldest = next((turn for turn in turns if turn.arrival is not None), None)
        if oldest is not None:
            oldest.hurry(self._patience_s)

    def _pop(self, client: str) -> asyncio.Future[Turn]:
        """Removes the client's call that has waited for longest, and puts the client after the others."""
        waiting = self._waiting.pop(client)
        first = waiting.popleft()
        self._num_waiting -= 1
        if waiting:
            self._waiting[client] = waiting
        return first

    def _remove(self, client: str, call: asyncio.Future[Turn]) -> None:
        waiting = self._waiting.get(client, deque())
        if call in waiting:
            waiting.remove(call)
            self._num_waiting -= 1
            if not waiting:
                del self._waiting[client]


class Incoming:
    """A request's message as bytes, until it is released. Its turn ends then."""

    __slots__ = ("_end", "data")

    def __init__(self, data: bytes, end: Callable[[], None]) -> None:
        self.data = data
        self._end = end

    def release(self) -> None:
        """Drops the bytes: they were decoded, or were sent on. May be called again."""
        self.data = b""
        self._end()


def late(message: str) -> ResourceExhaustedError:
    """Returns the error of a call whose message is not received now."""
    return ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)


class Receiver(ServerInterceptor):
    """Receives a call's message, and calls the handler with it as an `Incoming`.

    The interceptors before this one see a call before its message: what they refuse costs a window. Calls whose
    requests are a stream are bounded in number.
    """

    def __init__(self, max_message_bytes: int, client_of: Callable[[Any], str]) -> None:
        """`client_of` names the client of a call by its context."""
        most = max(1, MAX_ARRIVING_BYTES // max_message_bytes)
        self._turns = ReceiveTurns(most, MAX_ARRIVING_OF_A_CLIENT, PATIENCE_S)
        self._health_turns = ReceiveTurns(
            MAX_ARRIVING_HEALTH_CHECKS, MAX_ARRIVING_HEALTH_CHECKS, HEALTH_PATIENCE_S, MAX_WAITING_HEALTH_CHECKS
        )
        self._client_of = client_of
        self._num_streams = 0

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return None if handler is None else replaced(handler, self._counted)
        turns = self._health_turns if is_health_check(handler_call_details) else self._turns

        def make(handle: Handle) -> Handle:
            async def call(_: Any, context: Any) -> Any:
                message = await self._receive(turns, context)
                try:
                    return await handle(message, context)
                finally:
                    message.release()

            return call

        return replaced(handler, make, reads_itself=True)

    async def _receive(self, turns: ReceiveTurns, context: Any) -> Incoming:
        turn: Turn | None = None
        try:
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S) as arrival:
                turn = await turns.take(self._client_of(context))
                turn.arrival = arrival
                data = await context.read()
                turn.arrival = None
            if data is grpc.aio.EOF:
                raise InvalidArgumentError.described("request", "got none, accepted: a message")
        except BaseException as error:
            if turn is not None:
                turns.end(turn)
            if isinstance(error, TimeoutError):
                raise late("the request did not arrive in time, while others were to be received") from None
            raise
        received = turn
        return Incoming(data, lambda: turns.end(received))

    def _counted(self, handle: Handle) -> Handle:
        async def call(requests: Any, context: Any) -> Any:
            if self._num_streams == MAX_REQUEST_STREAMS:
                raise late(f"{MAX_REQUEST_STREAMS} streams of requests are open, and no more at a time")
            self._num_streams += 1
            try:
                return await handle(requests, context)
            finally:
                self._num_streams -= 1

        return call


class Decoder(ServerInterceptor):
    """Decodes a call's `Incoming`; one that is no message is refused with INVALID_ARGUMENT. The last interceptor.

    Responses may be bytes, of messages that are encoded already.

    gRPC itself would log a traceback for each, and answer UNKNOWN.
    """

    def __init__(self) -> None:
        self._log = RateLimitedLog(logger, logging.WARNING)
        self._turns = LoopTurns()

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of a call unless requests are streamed."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method, decode = handler_call_details.method, handler.request_deserializer or bytes
        # The deserializer is the method `FromString` of the class.
        kind = getattr(decode, "__self__", None)

        def make(handle: Handle) -> Handle:
            async def call(request: Incoming, context: Any) -> Any:
                num_bytes = len(request.data)
                is_large = num_bytes >= SLOW_REQUEST_BYTES
                if is_large:
                    # gRPC has just copied it, which took a turn's time already.
                    await asyncio.sleep(0)
                if kind is not None and num_bytes >= MIN_COUNTED_BYTES:
                    await check_num_fields(request.data, kind.DESCRIPTOR, self._turns)
                try:
                    message = decode(request.data)
                except DecodeError:
                    self._log.write("%s: a request of %d bytes cannot be decoded", method, num_bytes)
                    raise undecodable(f"{num_bytes} bytes") from None
                request.release()
                if is_large:
                    await self._turns.begin()
                return await handle(message, context)

            return call

        return replaced(handler, make, is_raw=True, passes_bytes=True)


MAX_FIELDS = 2**14
"""Fields of a request and of the messages in it, known or not; decoded in a few milliseconds."""
MAX_NUMBERS = 2**20
"""Numbers in one of its packed lists."""
MIN_COUNTED_BYTES = 2**13
"""A shorter request is decoded in no time, whatever is in it."""
_FIELDS_IN_A_PIECE = 2**9
_BYTES_IN_A_PIECE = 2**18
"""Both are counted in a fraction of a millisecond."""
_CONTINUED = bytes(range(128, 256))
"""Bytes of a number other than its last."""
_MOST_VARINT_BYTES = 10
"""A number of 64 bits has no more."""
_VARINT, _FIXED_64, _DELIMITED, _FIXED_32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED_64: 8, _FIXED_32: 4}
_NOT_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


async def check_num_fields(request: bytes, kind: Descriptor, turns: LoopTurns) -> None:
    """Raises InvalidArgumentError for a request of this kind with too many fields, or too many numbers in a list.

    Counts, and returns, within `turns`. A request that cannot be decoded may pass. Not for one that is shorter than
    `MIN_COUNTED_BYTES`.
    """
    await turns.begin()
    for num_fields in _pieces(request, kind):
        if num_fields > MAX_FIELDS:
            raise InvalidArgumentError("request", f"more than {MAX_FIELDS} fields", f"at most {MAX_FIELDS}")
        await turns.begin()


def _pieces(request: bytes, kind: Descriptor) -> Iterator[int]:
    """Yields the number of fields so far, now and then and at the end."""
    num_fields = 0
    nested: list[tuple[int, int, Descriptor, str]] = [(0, len(request), kind, "")]
    try:
        while nested:
            place, end, message, path = nested.pop()
            fields = message.fields_by_number
            while place < end:
                num_fields += 1
                if num_fields % _FIELDS_IN_A_PIECE == 0:
                    yield num_fields
                key, place = _varint(request, place)
                wire_type = key & 7
                if wire_type == _VARINT:
                    _, place = _varint(request, place)
                elif wire_type == _DELIMITED:
                    length, place = _varint(request, place)
                    field = fields.get(key >> 3)
                    if field is not None and field.message_type is not None:
                        nested.append((place, place + length, field.message_type, f"{path}{field.name}."))
                    elif field is not None and field.is_repeated and field.type not in _NOT_PACKED:
                        for _ in _check_numbers(request, place, place + length, path + field.name):
                            yield num_fields
                    place += length
                else:
                    # The others begin or end a group, and have no content of their own.
                    place += _FIXED_BYTES.get(wire_type, 0)
    except IndexError:
        return
    yield num_fields


def _varint(request: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it. Raises IndexError if there is none."""
    value = request[place]
    if value < 128:
        return value, place + 1
    value &= 127
    for length in range(1, _MOST_VARINT_BYTES):
        byte = request[place + length]
        value |= (byte & 127) << 7 * length
        if byte < 128:
            return value, place + length + 1
    raise IndexError("the number has no end")


def _check_numbers(request: bytes, begin: int, end: int, name: str) -> Iterator[None]:
    """Raises InvalidArgumentError if the packed list in [begin, end) is too long; yields now and then."""
    if end - begin <= MAX_NUMBERS:
        return
    num_numbers = 0
    for place in range(begin, min(end, len(request)), _BYTES_IN_A_PIECE):
        piece = request[place : min(end, place + _BYTES_IN_A_PIECE)]
        num_numbers += len(piece.translate(None, _CONTINUED))
        yield
    if num_numbers > MAX_NUMBERS:
        raise InvalidArgumentError(name, f"{num_numbers} numbers", f"at most {MAX_NUMBERS}")
