"""The queue for work that takes a thread for long, as tokenising: fair to clients, and bounded."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, TypeVar

from slipstream.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

T = TypeVar("T")

NUM_THREADS = 2
"""Threads that tokenise."""
MAX_WAITING_BYTES = 64 * 2**20
"""Bytes of the requests that wait for a thread."""
TOKENIZE_RETRY_MS = 1000


class TokenizeQueue:
    """Runs the long work of many clients, as tokenising, on a few threads: clients take turns, what waits is bounded.

    A client with forty long texts delays another's text by one of them, not by forty. Belongs to the event loop.
    """

    def __init__(
        self, executor: Executor, *, num_threads: int = NUM_THREADS, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        """`executor` has `num_threads` threads, only for this object."""
        self._executor = executor
        self._num_free = num_threads
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client, in the order of their turns."""

    async def run(self, client: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which holds `num_bytes` of a request, when it was the client's turn.

        Raises ResourceExhaustedError if too much waits already, and whatever `work` raises.
        """
        if self._num_free == 0:
            await self._wait(client, num_bytes)
        else:
            self._num_free -= 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._pass_on()

    async def _wait(self, client: str, num_bytes: int) -> None:
        if self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            message = f"{self._waiting_bytes} bytes of text wait to be tokenised, of at most {self._max_waiting_bytes}"
            raise ResourceExhaustedError(message, retry_after_ms=TOKENIZE_RETRY_MS)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise
        finally:
            self._waiting_bytes -= num_bytes

    def _pass_on(self) -> None:
        """Gives a thread that is free again to the next client, and puts that client after the others."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._num_free += 1
