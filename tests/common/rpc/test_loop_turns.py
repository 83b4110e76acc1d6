"""Work in turns of the event loop: a few milliseconds at a time, and all of it comes to its end."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from slipstream.common.rpc import loop_turns as loop_turns_module
from slipstream.common.rpc.loop_turns import MANY_WAITING, SLICE_S, WOKEN_IN_A_TURN, LoopTurns

if TYPE_CHECKING:
    import pytest

NUM = 10 * WOKEN_IN_A_TURN


def work(seconds: float) -> None:
    """Holds the event loop."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        pass


async def loop_turns(counts: list[int]) -> None:
    """Appends a number for each turn of the loop."""
    while True:
        counts.append(0)
        await asyncio.sleep(0)


async def test_work_that_comes_together_is_done_in_many_turns() -> None:
    turns, counts = LoopTurns(), [0]

    async def piece() -> None:
        await turns.begin()
        counts[-1] += 1
        work(SLICE_S / 4)

    counting = asyncio.create_task(loop_turns(counts))
    async with asyncio.timeout(30):
        await asyncio.gather(*(piece() for _ in range(NUM)))
    counting.cancel()
    assert sum(counts) == NUM
    # The time is looked at before each piece, so that the last one may end late.
    assert max(counts) <= 5


async def test_a_piece_that_takes_too_long_leaves_none_waiting() -> None:
    turns = LoopTurns()

    async def piece() -> None:
        for _ in range(3):
            await turns.begin()
            work(2 * SLICE_S)

    async with asyncio.timeout(30):
        await asyncio.gather(*(piece() for _ in range(40)))


async def test_many_are_woken_in_many_turns_and_each_of_them_once() -> None:
    turns, counts = LoopTurns(), [0]
    futures = [asyncio.get_running_loop().create_future() for _ in range(NUM)]
    futures[-1].cancel()
    counting = asyncio.create_task(loop_turns(counts))

    async def one(future: asyncio.Future[None]) -> None:
        await future
        counts[-1] += 1

    tasks = [asyncio.create_task(one(future)) for future in futures[:-1]]
    await asyncio.sleep(0)
    turns.wake(futures)
    turns.wake(futures)
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)
    counting.cancel()
    assert sum(counts) == NUM - 1
    assert max(counts) <= WOKEN_IN_A_TURN


async def test_turns_are_short_where_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop_turns_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    turns, counts = LoopTurns(), [0]

    async def piece() -> None:
        await turns.begin()
        counts[-1] += 1
        now[0] += SLICE_S / 16

    counting = asyncio.create_task(loop_turns(counts))
    async with asyncio.timeout(30):
        await asyncio.gather(*(piece() for _ in range(MANY_WAITING + NUM)))
    counting.cancel()
    assert sum(counts) == MANY_WAITING + NUM
    in_order = [count for count in counts if count]
    assert in_order[1:20] == [4] * 19
    assert max(in_order[20:]) == 16
