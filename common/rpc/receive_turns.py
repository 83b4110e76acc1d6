"""Bounds the bytes of requests that arrive: a call asks for its message when it is let in, and when it is its turn.

Until a call asks, gRPC takes in `WINDOW_BYTES` of its message; then all that a message may have.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

from slipstream.common.errors import RETRY_AFTER_MS, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable

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
