"""Streams to clients: how often one gets a message, how many write at a time, and when one is cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import cast

import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.gateway.config import Shard, shard_of
from slipstream.gateway.peers import Forwarding, Peers
from slipstream.gateway.stream import LONGEST_S, MAX_PENDING, PendingWrites, StreamWriter, StreamWrites
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import collect, generation_server, tokens_of
from tests.harness.waiting import block_until, until


class HandClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets: due callbacks run when it advances."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def time(self) -> float:
        """The test's clock."""
        return self.now

    def advance(self, seconds: float = 0.0) -> None:
        """Moves the clock on by `seconds` and runs the callbacks that are due by then."""
        self.now += seconds
        for _ in range(3):
            self.call_soon(self.stop)
            self.run_forever()


@pytest.fixture
def loop() -> Iterator[HandClockLoop]:
    """Closed in the end."""
    loop = HandClockLoop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.advance()
    loop.close()


TIMEOUT_S = 10.0


class Streams:
    """Streams by their numbers, which write when they are told to."""

    def __init__(self, loop: HandClockLoop) -> None:
        self.loop = loop
        self.pending = PendingWrites(loop)
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
        place = self.pending.begin(number)
        if place is not None:
            await place
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


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PendingWrites, int]]:
    """For each write of a gateway that begins: the gateway's object, and the writes that are under way."""
    begin, seen = PendingWrites.begin, []

    def counted(pending: PendingWrites, stream: object) -> asyncio.Future[None] | None:
        place = begin(pending, stream)
        seen.append((pending, len(pending._begun)))
        return place

    monkeypatch.setattr(PendingWrites, "begin", counted)
    return seen


async def test_all_streams_of_a_gateway_share_the_places_and_leave_them(seen: list[tuple[PendingWrites, int]]) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        await client.create_job([5, 6], job_id="mine", max_new_tokens=30)
        watchers = [asyncio.create_task(collect(client.watch_job("mine"))) for _ in range(4 * MAX_PENDING)]
        server.loop.may_step.set()
        for chunks in await asyncio.gather(*watchers):
            assert tokens_of(chunks) == [5, 6] * 15
    assert len({pending for pending, _ in seen}) == 1
    assert max(num for _, num in seen) <= MAX_PENDING
    assert not seen[0][0]._begun
    assert not seen[0][0]._slow


async def test_streams_that_are_forwarded_share_the_places_too(
    seen: list[tuple[PendingWrites, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.gateway.stream.MAX_PENDING", 2)
    writes = StreamWrites(60.0, lambda: None)
    job_id = next(name for name in map(str, range(1000)) if shard_of(name, 2) == 1)
    async with generation_server() as home, grpc.aio.insecure_channel(home.address) as channel:
        forwarding = Forwarding(cast("Peers", Neighbour(channel)), writes)
        async with generation_server(message_interceptors=(forwarding,)) as front, AsyncClient(front.address) as client:
            home.loop.may_step.clear()
            await client.create_job([5, 6], job_id=job_id, max_new_tokens=30)
            watchers = [asyncio.create_task(collect(client.watch_job(job_id))) for _ in range(20)]
            home.loop.may_step.set()
            for chunks in await asyncio.gather(*watchers):
                assert tokens_of(chunks) == [5, 6] * 15
    nums = [num for pending, num in seen if pending is writes._pending]
    assert len(nums) >= 20
    assert 1 <= max(nums) <= 2


class Neighbour:
    """The other one of two gateways, as the first one reaches it."""

    shard = Shard(0, 2)

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def channel(self, index: int) -> grpc.aio.Channel:
        assert index == 1
        return self._channel


class Stream:
    """Writes when it is told to, and each write takes until the test says that it is done."""

    def __init__(self, loop: HandClockLoop) -> None:
        self.loop = loop
        self._may_write = asyncio.Event()
        self._is_written = asyncio.Event()
        self.task = loop.create_task(self._run())
        loop.advance()

    async def _run(self) -> None:
        timeout = asyncio.timeout(None)
        async with timeout:
            with StreamWriter(self._write, PendingWrites(self.loop), timeout, TIMEOUT_S) as writer:
                while True:
                    await self._may_write.wait()
                    self._may_write.clear()
                    await writer.write(b"")

    async def _write(self, _: bytes) -> None:
        await self._is_written.wait()
        self._is_written.clear()

    def begin(self) -> None:
        """The next write begins."""
        self._may_write.set()
        self.loop.advance()

    def end(self) -> None:
        """It is done."""
        self._is_written.set()
        self.loop.advance()


def cancel(stream: Stream) -> None:
    """Ends a stream that was not given up."""
    stream.task.cancel()
    stream.loop.advance()
    assert stream.task.cancelled()


def test_a_write_that_takes_too_long_ends_the_stream(loop: HandClockLoop) -> None:
    stream = Stream(loop)
    loop.advance(0.7 * TIMEOUT_S)
    stream.begin()
    # The time is that of the write, not that of the stream.
    loop.advance(0.9 * TIMEOUT_S)
    assert not stream.task.done()
    loop.advance(0.11 * TIMEOUT_S)
    assert isinstance(stream.task.exception(), TimeoutError)


def test_many_short_writes_may_take_longer_together(loop: HandClockLoop) -> None:
    stream = Stream(loop)
    for _ in range(10):
        stream.begin()
        loop.advance(0.9 * TIMEOUT_S)
        stream.end()
    assert not stream.task.done()
    cancel(stream)


def test_nothing_to_write_is_no_write(loop: HandClockLoop) -> None:
    stream = Stream(loop)
    stream.begin()
    stream.end()
    for _ in range(10):
        loop.advance(0.9 * TIMEOUT_S)
    assert not stream.task.done()
    cancel(stream)


NUM_TOKENS = 600


async def test_each_step_is_a_message_without_an_interval() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        num_messages = 0
        async for chunk in client.generate([5, 6], max_new_tokens=30):
            num_messages += 1
            assert 0 < chunk.published_ns <= time.monotonic_ns()
            server.loop.pause_tokens += TOKENS_PER_STEP
        assert num_messages == 10
        assert server.metric("publish_to_send_seconds_count") == 10
        assert server.metric("coalesced_messages_total") == 0


async def test_first_tokens_and_ends_do_not_wait_for_the_interval() -> None:
    async with generation_server(stream_interval_s=1000.0) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        stream = client.generate([5, 6], max_new_tokens=3000)
        first = await anext(stream)
        server.loop.pause_tokens = None
        (rest,) = await asyncio.wait_for(collect(stream), 20)
        assert len(first.token_ids) == TOKENS_PER_STEP
        assert tokens_of([first, rest]) == [5, 6] * 1500


async def test_an_output_that_comes_at_once_ends_at_once() -> None:
    async with generation_server(stream_interval_s=1000.0) as server, AsyncClient(server.address) as client:
        chunks = await asyncio.wait_for(collect(client.generate([5, 6], max_new_tokens=1)), 20)
        assert tokens_of(chunks) == [5]
        assert server.metric("coalesced_messages_total") == 0


async def test_more_comes_when_the_interval_is_over() -> None:
    interval_s = 0.2
    async with generation_server(stream_interval_s=interval_s) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 300
        chunks = client.generate([5, 6], max_new_tokens=303)
        began_at, num_tokens = time.monotonic(), len((await anext(chunks)).token_ids)
        while num_tokens < 300:
            num_tokens += len((await anext(chunks)).token_ids)
            assert time.monotonic() - began_at > interval_s / 2
        server.loop.pause_tokens = None
        assert num_tokens + len(tokens_of(await collect(chunks))) == 303


async def test_a_gateway_that_is_behind_coalesces() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        chunks = client.generate([5, 6], max_new_tokens=NUM_TOKENS)
        assert len((await anext(chunks)).token_ids) == TOKENS_PER_STEP
        await until(lambda: server.metric("publish_to_send_seconds_count") == 1)
        server.loop.pause_tokens = None
        block_until(lambda: not server.loop.running)  # holding up the event loop is the point
        assert len(tokens_of(await collect(chunks))) == NUM_TOKENS - TOKENS_PER_STEP
        assert server.metric("coalesced_messages_total") >= 1
