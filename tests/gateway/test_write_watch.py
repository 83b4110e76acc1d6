"""When a stream is given up because its client reads nothing: on a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from slipstream.gateway.write_watch import WriteWatch
from tests.harness.hand_clock import HandClockLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 10.0


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
            with WriteWatch(timeout, TIMEOUT_S) as watch:
                while True:
                    await self._may_write.wait()
                    self._may_write.clear()
                    watch.begin()
                    await self._is_written.wait()
                    self._is_written.clear()
                    watch.end()

    def begin(self) -> None:
        """The next write begins."""
        self._may_write.set()
        self.loop.advance()

    def end(self) -> None:
        """It is done."""
        self._is_written.set()
        self.loop.advance()


@pytest.fixture
def loop() -> Iterator[HandClockLoop]:
    """Closed in the end."""
    loop = HandClockLoop()
    yield loop
    loop.close()


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
