"""Work of many clients on a few threads: turns, bounds, and work that is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.common.errors import ResourceExhaustedError
from slipstream.gateway.tokenize_queue import TokenizeQueue


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """One thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Works:
    """Pieces of work that note their order; the first one waits until it is let go."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_end = threading.Event()

    def named(self, name: str) -> Callable[[], str]:
        def work() -> str:
            assert self.may_end.wait(10)
            self.done.append(name)
            return name

        return work


def start(turns: TokenizeQueue, works: Works, *clients: str, num_bytes: int = 1) -> list[asyncio.Task[str]]:
    """One piece of work for each of the named clients, in order."""
    return [asyncio.create_task(turns.run(client, num_bytes, works.named(client))) for client in clients]


async def test_clients_take_turns(executor: ThreadPoolExecutor) -> None:
    turns, works = TokenizeQueue(executor, num_threads=1), Works()
    tasks = start(turns, works, *["greedy"] * 4, "a", "b")
    await asyncio.sleep(0)
    works.may_end.set()
    await asyncio.gather(*tasks)
    assert works.done == ["greedy", "greedy", "a", "b", "greedy", "greedy"]


async def test_waiting_work_is_bounded_and_running_work_is_not_counted(executor: ThreadPoolExecutor) -> None:
    turns, works = TokenizeQueue(executor, num_threads=1, max_waiting_bytes=10), Works()
    running, waiting = start(turns, works, "a", "a", num_bytes=8)
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="8 bytes of text wait") as caught:
        await turns.run("b", 3, works.named("b"))
    assert caught.value.retry_after_ms
    works.may_end.set()
    assert await asyncio.gather(running, waiting) == ["a", "a"]
    assert await turns.run("b", 3, works.named("b")) == "b"


async def test_work_that_is_given_up_gives_its_turn_away(executor: ThreadPoolExecutor) -> None:
    turns, works = TokenizeQueue(executor, num_threads=1), Works()
    tasks = start(turns, works, "a", "b", "c")
    await asyncio.sleep(0)
    tasks[1].cancel()
    works.may_end.set()
    assert await asyncio.gather(tasks[0], tasks[2]) == ["a", "c"]
    assert works.done == ["a", "c"]
    assert await turns.run("d", 1, works.named("d")) == "d"


async def test_a_turn_that_was_given_as_its_client_left_goes_to_the_next(executor: ThreadPoolExecutor) -> None:
    turns, works = TokenizeQueue(executor, num_threads=1), Works()

    async def pass_on_and_cancel() -> None:
        await turns.run("a", 1, works.named("a"))
        second.cancel()  # it has its turn, and has not run since

    first = asyncio.create_task(pass_on_and_cancel())
    await asyncio.sleep(0)
    second, third = start(turns, works, "b", "c")
    await asyncio.sleep(0)
    works.may_end.set()
    await first
    assert await asyncio.wait_for(third, 10) == "c"
    assert works.done == ["a", "c"]
    assert second.cancelled()


async def test_an_error_ends_a_turn_like_a_result(executor: ThreadPoolExecutor) -> None:
    turns = TokenizeQueue(executor, num_threads=1)

    def fail() -> None:
        raise ValueError("broken")

    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            await turns.run("a", 1, fail)
