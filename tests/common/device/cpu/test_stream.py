"""The stream of the CPU: order, failure, and its end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice, HostStream
from slipstream.common.errors import DeadlineExceededError

if TYPE_CHECKING:
    from tests.common.device.conftest import MakeStream


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
