"""How many streams write at a time, and which: on a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from slipstream.client import AsyncClient
from slipstream.gateway.pending_writes import LONGEST_S, MAX_PENDING, PendingWrites
from tests.harness.generation_server import collect, generation_server, tokens_of
from tests.harness.hand_clock import HandClockLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def loop() -> Iterator[HandClockLoop]:
    """Closed in the end."""
    loop = HandClockLoop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.advance()
    loop.close()


class Streams:
    """Streams by their numbers, which write when they are told to."""

    def __init__(self, loop: HandClockLoop) -> None:
        self.loop = loop
        self.pending = PendingWrites()
        self.writing: list[int] = []
        """Those whose writes have begun, in that order."""
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, *numbers: int) -> None:
        """Streams want to write."""
        for number in numbers:
            self.tasks[number] = self.loop.create_task(self._begin(number))
        self.loop.advance()

    def end(self, number: int) -> None:
        """A stream's write is over."""
        self._leave(number, self.pending.end)

    def forget(self, number: int) -> None:
        """A stream is over."""
        self._leave(number, self.pending.forget)

    def fill(self, first: int = 1000) -> list[int]:
        """As many streams as may write at a time begin to. Returns their numbers."""
        numbers = list(range(first, first + MAX_PENDING))
        self.begin(*numbers)
        assert self.writing[-MAX_PENDING:] == numbers
        return numbers

    def _leave(self, number: int, leave: Callable[[int], None]) -> None:
        self.writing.remove(number)
        self.loop.call_soon(leave, number)
        self.loop.advance()

    async def _begin(self, number: int) -> None:
        await self.pending.begin(number)
        self.writing.append(number)


def test_a_stream_waits_until_another_has_written(loop: HandClockLoop) -> None:
    streams = Streams(loop)
    first, second, *others = streams.fill()
    streams.begin(1, 2, 3)
    assert streams.writing == [first, second, *others]
    streams.end(second)
    assert streams.writing == [first, *others, 1]
    streams.tasks[2].cancel()
    streams.end(first)
    assert streams.writing == [*others, 1, 3]


def test_a_stream_that_ends_in_the_midst_of_a_write_leaves_its_place(loop: HandClockLoop) -> None:
    streams = Streams(loop)
    first, *_ = streams.fill()
    streams.begin(1)
    streams.forget(first)
    assert streams.writing[-1] == 1


def test_writes_that_wait_for_their_clients_keep_no_other_stream_waiting(loop: HandClockLoop) -> None:
    streams = Streams(loop)
    blocked = streams.fill()
    streams.begin(*range(MAX_PENDING))
    assert streams.writing == blocked
    loop.advance(1.5 * LONGEST_S)
    assert streams.writing == [*blocked, *range(MAX_PENDING)]
    # Their writes end at last; the next ones begin at once, though there is no room.
    for number in blocked[:2]:
        streams.end(number)
        streams.begin(number)
    assert streams.writing[-2:] == blocked[:2]
    # One was quick, and needs a place again; the other was not.
    streams.end(blocked[0])
    streams.begin(blocked[0])
    assert streams.writing[-1] == blocked[1]
    loop.advance(0.5 * LONGEST_S)
    streams.end(0)
    assert streams.writing[-1] == blocked[0]
    loop.advance(LONGEST_S)
    streams.end(blocked[1])
    streams.fill(2000)
    streams.begin(blocked[1])
    assert streams.writing[-1] == blocked[1]
    # One that is over is forgotten.
    streams.forget(blocked[1])
    streams.begin(blocked[1])
    assert blocked[1] not in streams.writing


async def test_all_streams_of_a_gateway_share_the_places_and_leave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, seen = PendingWrites.begin, []

    async def counted(pending: PendingWrites, stream: object) -> None:
        await begin(pending, stream)
        seen.append((pending, len(pending._begun)))

    monkeypatch.setattr(PendingWrites, "begin", counted)
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        await client.create_job([5, 6], job_id="mine", max_new_tokens=30)
        watchers = [asyncio.create_task(collect(client.watch_job("mine"))) for _ in range(4 * MAX_PENDING)]
        server.loop.may_step.set()
        for chunks in await asyncio.gather(*watchers):
            assert tokens_of(chunks) == [5, 6] * 15
    assert len({pending for pending, _ in seen}) == 1
    assert 1 < max(num for _, num in seen) <= MAX_PENDING
    assert not seen[0][0]._begun
    assert not seen[0][0]._slow
