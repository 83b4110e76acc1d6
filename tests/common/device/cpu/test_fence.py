"""Streams and fences of the CPU: order, failure, their end, and what becomes of a wait whose producer is gone."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.common.device.cpu.device import HostArena, HostDevice, HostStream
from slipstream.common.device.cpu.fence import HostFence
from slipstream.common.device.interface import Fence
from slipstream.common.errors import DeadlineExceededError
from slipstream.common.wire.step import FenceName
from tests.common.device.conftest import MakeStream
from tests.harness.other_process import FenceUser


def test_a_wait_may_be_enqueued_before_its_signal(arena: HostArena, make_stream: MakeStream) -> None:
    consumer, producer = make_stream("consumer"), make_stream("producer")
    fence, order = arena.fence(FenceName.DRAFT_PROPOSED), list[str]()
    fence.wait(consumer, 1)
    consumer.enqueue(lambda: order.append("consumed"))
    with pytest.raises(DeadlineExceededError):
        consumer.synchronize(0.02)
    producer.enqueue(lambda: order.append("produced"))
    fence.signal(producer, 1)
    consumer.synchronize(10.0)
    assert order == ["produced", "consumed"]


def test_a_later_signal_covers_an_earlier_wait(arena: HostArena, make_stream: MakeStream) -> None:
    consumer, producer = make_stream("consumer"), make_stream("producer")
    fence = arena.fence(FenceName.VERIFY_STASH)
    fence.wait(consumer, 3)
    fence.signal(producer, 7)
    consumer.synchronize(10.0)
    assert fence.poll() == 7
    assert fence.wait_on_host(7, 0.0)
    assert not fence.wait_on_host(8, 0.01)


@pytest.mark.parametrize("seed", range(3))
def test_two_streams_hand_a_value_to_and_fro(arena: HostArena, make_stream: MakeStream, seed: int) -> None:
    """Each adds to what it read of the other; any step out of order would show in the sum."""
    rng = random.Random(seed)
    streams = make_stream("left"), make_stream("right")
    fences = arena.fence(FenceName.DRAFT_PROPOSED), arena.fence(FenceName.VERIFY_STASH)
    cell = arena.tensor("lengths")[0]

    def double_and_add(value: int) -> None:
        cell[0] = cell[0] * 2 % 1_000_003 + value

    # All of one stream's work is enqueued before the other's, in random portions.
    turns = {side: [step for step in range(1, 101) if step % 2 == side] for side in (0, 1)}
    while turns[0] or turns[1]:
        side = rng.choice([side for side in (0, 1) if turns[side]])
        for _ in range(min(rng.randrange(1, 30), len(turns[side]))):
            step = turns[side].pop(0)
            fences[1 - side].wait(streams[side], step - 1)
            streams[side].enqueue(lambda step=step: double_and_add(step))  # type: ignore[misc]
            fences[side].signal(streams[side], step)
    for stream in streams:
        stream.synchronize(10.0)
    expected = 0
    for step in range(1, 101):
        expected = expected * 2 % 1_000_003 + step
    assert int(cell[0]) == expected


def test_release_never_lowers_the_counter(arena: HostArena, make_stream: MakeStream) -> None:
    fence, stream = arena.fence(FenceName.DRAFT_PROPOSED), make_stream()
    fence.signal(stream, 9)
    stream.synchronize(10.0)
    fence.release(4)
    assert fence.poll() == 9


def test_the_owner_releases_the_wait_for_a_killed_producer(arena: HostArena, make_stream: MakeStream) -> None:
    fence, stream, reached = arena.fence(FenceName.DRAFT_PROPOSED), make_stream(), list[int]()
    with FenceUser.at(arena.manifest.path, _offset(arena, FenceName.DRAFT_PROPOSED)) as producer:
        fence.wait(stream, 1)
        producer.tell("store 1")
        stream.synchronize(10.0)
        fence.wait(stream, 2)
        stream.enqueue(lambda: reached.append(2))
        producer.kill()
    with pytest.raises(DeadlineExceededError):
        stream.synchronize(0.05)
    assert reached == []
    fence.release(2)
    stream.synchronize(10.0)
    assert reached == [2]
    assert _is_usable(stream_fence=fence, make_stream=make_stream)


def test_a_released_stream_stays_usable_though_a_late_write_sets_the_counter_back(
    arena: HostArena, make_stream: MakeStream
) -> None:
    fence, stream = arena.fence(FenceName.VERIFY_STASH), make_stream()
    with FenceUser.at(arena.manifest.path, _offset(arena, FenceName.VERIFY_STASH)) as late:
        fence.wait(stream, 5)
        fence.release(5)
        stream.synchronize(10.0)
        late.tell("store 3")
        assert late.answer() == "stored"
        assert fence.poll() == 3
        fence.wait(stream, 5)
        fence.release(5)
        stream.synchronize(10.0)


def _is_usable(*, stream_fence: Fence, make_stream: MakeStream) -> bool:
    """A new producer takes over the counter."""
    consumer, producer = make_stream("consumer"), make_stream("producer")
    stream_fence.wait(consumer, 3)
    stream_fence.signal(producer, 3)
    consumer.synchronize(10.0)
    return stream_fence.poll() == 3


def _offset(arena: HostArena, name: FenceName) -> int:
    return next(word.offset for word in arena.manifest.fences if word.fence is name)


OFFSET = 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A page of zeros."""
    file = tmp_path / "words"
    file.write_bytes(bytes(4096))
    return file


@pytest.fixture
def word(path: Path) -> Iterator[HostFence]:
    """A counter in it."""
    with path.open("r+b") as file:
        yield HostFence(memoryview(mmap.mmap(file.fileno(), 0)), OFFSET)


def test_keeps_what_was_stored(word: HostFence) -> None:
    assert word.poll() == 0
    word.store(2**64 - 1)
    assert word.poll() == 2**64 - 1


@pytest.mark.parametrize(("stored", "wanted"), [(0, 0), (5, 5), (6, 5), (2**32, 2**32 - 1), (2**33, 2**32)])
def test_does_not_sleep_when_the_value_is_reached(word: HostFence, stored: int, wanted: int) -> None:
    word.store(stored)
    assert word.wait_on_host(wanted, 0.0)


@pytest.mark.parametrize(("stored", "wanted"), [(0, 1), (2**32, 2**32 + 1), (2**32 - 1, 2**32), (7, 2**64 - 1)])
def test_gives_up_when_the_time_is_over(word: HostFence, stored: int, wanted: int) -> None:
    word.store(stored)
    started = time.monotonic()
    assert not word.wait_on_host(wanted, 0.02)
    assert time.monotonic() - started >= 0.02


def test_wakes_every_thread_whose_value_is_reached_and_no_other(word: HostFence) -> None:
    outcomes: dict[int, bool] = {}

    def wait_for(value: int, timeout_s: float) -> None:
        outcomes[value] = word.wait_on_host(value, timeout_s)

    waiters = [threading.Thread(target=wait_for, args=(value, 30.0)) for value in (1, 2, 3)]
    too_far = threading.Thread(target=wait_for, args=(4, 0.2))
    for thread in (*waiters, too_far):
        thread.start()
    for value in (1, 2, 3):
        word.store(value)
        waiters[value - 1].join()
    too_far.join()
    assert outcomes == {1: True, 2: True, 3: True, 4: False}


def test_two_processes_take_turns(word: HostFence, path: Path) -> None:
    with FenceUser.at(str(path), OFFSET) as other:
        for turn in range(1, 20, 2):
            other.tell(f"wait {turn} 30")
            word.store(turn)
            assert other.answer() == str(turn)
            other.tell(f"store {turn + 1}")
            assert word.wait_on_host(turn + 1, 30.0)
            assert other.answer() == "stored"


def test_sees_what_was_written_before_the_signal(arena: HostArena) -> None:
    """A process that waited for another's signal sees everything that the other wrote before it."""
    word, cell = arena.manifest.fences[0], arena.manifest.buffers[0].offset
    counter, tensor = arena.fence(word.fence), arena.tensor("lengths")
    with FenceUser.at(arena.manifest.path, word.offset) as other:
        other.tell(f"follow 200 {cell}")
        for turn in range(1, 400, 2):
            tensor[0, 0] = turn
            counter.release(turn)
            assert counter.wait_on_host(turn + 1, 30.0)
        assert other.answer().split() == [str(turn) for turn in range(1, 400, 2)]


def _fail(error: Exception) -> None:
    raise error


def test_runs_in_order_and_apart_from_the_caller(make_stream: MakeStream) -> None:
    stream, go, done = make_stream(), threading.Event(), list[int]()
    stream.enqueue(lambda: go.wait() and None)
    for number in range(200):
        stream.enqueue(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    go.set()
    stream.synchronize(10.0)
    assert done == list(range(200))


def test_two_streams_do_not_wait_for_each_other(make_stream: MakeStream) -> None:
    held, free, go = make_stream("held"), make_stream("free"), threading.Event()
    held.enqueue(lambda: go.wait() and None)
    free.synchronize(10.0)
    with pytest.raises(DeadlineExceededError, match="held"):
        held.synchronize(0.01)
    go.set()
    held.synchronize(10.0)


def test_a_stamp_is_the_time_at_which_the_stream_comes_to_it(make_stream: MakeStream) -> None:
    stream, device, times = make_stream(), HostDevice(), list[int]()
    stamps, row = torch.zeros(3, dtype=torch.int64), torch.tensor([2])
    go = threading.Event()
    stream.enqueue(lambda: go.wait() and None)
    stream.enqueue(lambda: times.append(time.monotonic_ns()))
    device.stamp(stream, stamps[0])
    device.stamp_row(stream, stamps, row)
    stream.enqueue(lambda: times.append(time.monotonic_ns()))
    enqueued = time.monotonic_ns()
    go.set()
    stream.synchronize(10.0)
    first, unused, second = stamps.tolist()
    assert enqueued <= times[0] <= first <= second <= times[1]
    assert unused == 0


def test_drops_everything_behind_a_failure_and_tells_once(make_stream: MakeStream) -> None:
    stream, done, error = make_stream(), list[str](), ValueError("broken")
    stream.enqueue(lambda: done.append("before"))
    stream.enqueue(lambda: _fail(error))
    stream.enqueue(lambda: done.append("after"))
    stream.enqueue(lambda: _fail(ValueError("again")))
    with pytest.raises(ValueError, match="broken"):
        stream.synchronize(10.0)
    assert done == ["before"]
    assert stream.failure is error
    assert make_stream.failures == [error]


def test_ends_after_what_is_enqueued() -> None:
    stream, done = HostStream("ends", _fail), list[int]()
    for number in range(50):
        stream.enqueue(lambda number=number: done.append(number))  # type: ignore[misc]
    stream.close()
    assert done == list(range(50))


def test_ends_after_a_failure() -> None:
    failures: list[BaseException] = []
    stream = HostStream("broken", failures.append)
    stream.enqueue(lambda: _fail(ValueError("broken")))
    stream.close()
    assert [str(error) for error in failures] == ["broken"]
