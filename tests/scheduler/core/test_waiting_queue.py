"""Tests the queue of waiting jobs, which one thread fills and another empties."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream.common.api.sampling import SamplingParams
from slipstream.common.api.sequence import SequenceSpec
from slipstream.common.errors import ResourceExhaustedError, UnavailableError
from slipstream.scheduler.core.sequence import Sequence
from slipstream.scheduler.core.waiting_queue import WaitingQueue


def make_job(name: str = "job") -> Sequence:
    """A job that is not submitted."""
    spec = SequenceSpec(
        job_id=name, prompt=(1,), max_new_tokens=1, sampling=SamplingParams(), stop_token_ids=frozenset()
    )
    return Sequence(spec)


def open_queue(capacity: int = 2) -> WaitingQueue:
    """A queue that takes jobs."""
    queue = WaitingQueue(capacity)
    queue.open()
    return queue


def test_first_come_first_served_while_there_is_room() -> None:
    queue, jobs = open_queue(), [make_job("a"), make_job("b")]
    for job in jobs:
        queue.add(job)
    assert queue.take_next(lambda job: job is jobs[1]) is None
    assert queue.take_next(lambda _: True) is jobs[0]
    assert len(queue) == 1
    assert queue.take_all() == [jobs[1]]
    assert queue.take_next(lambda _: True) is None


def test_a_full_queue_says_when_to_try_again() -> None:
    queue = open_queue(1)
    queue.add(make_job())
    with pytest.raises(ResourceExhaustedError, match="the queue is full: 1 jobs are waiting") as caught:
        queue.add(make_job())
    assert caught.value.retry_after_ms > 0


def test_all_of_several_jobs_come_in_or_none() -> None:
    queue, jobs = open_queue(3), [make_job(name) for name in "abcd"]
    queue.add(*jobs[:2])
    with pytest.raises(ResourceExhaustedError, match="too full for 2 more: 2 jobs are waiting, of at most 3"):
        queue.add(*jobs[2:])
    queue.add(jobs[2])
    assert queue.take_all() == jobs[:3]


def test_a_closed_queue_says_why() -> None:
    queue = WaitingQueue(2)
    with pytest.raises(UnavailableError, match="has not started yet"):
        queue.add(make_job())
    queue.open()
    waiting = make_job()
    queue.add(waiting)
    queue.close("verify is lost")
    with pytest.raises(UnavailableError, match="verify is lost"):
        queue.add(make_job())
    assert queue.take_all() == [waiting]


def test_a_cancelled_job_waits_no_more() -> None:
    queue, first, second = open_queue(), make_job("a"), make_job("b")
    queue.add(first)
    queue.add(second)
    queue.cancel(first)
    running = make_job("runs")
    queue.cancel(running)
    assert queue.take_cancelled() == [first, running]
    assert queue.take_cancelled() == []
    assert queue.take_next(lambda _: True) is second


@pytest.mark.parametrize("change", ["submit", "cancel", "stop"])
def test_every_change_wakes_the_loop(change: str) -> None:
    queue, job = open_queue(), make_job()
    changes = {"submit": lambda: queue.add(job), "cancel": lambda: queue.cancel(job), "stop": queue.stop}
    waiter = threading.Thread(target=queue.wait_for_change, args=(30.0,))
    waiter.start()
    changes[change]()
    waiter.join(10.0)
    assert not waiter.is_alive()


def test_only_the_end_wakes_who_waits_for_it() -> None:
    queue = open_queue()
    queue.add(make_job())
    started = time.monotonic()
    queue.wait_for_stop(0.02)
    assert time.monotonic() - started >= 0.02
    assert not queue.is_stopped
    queue.stop()
    queue.wait_for_stop(30.0)
    assert queue.is_stopped


def test_workers_that_come_back_do_not_open_a_queue_that_was_shut() -> None:
    queue = open_queue()
    queue.shut("the server is shutting down")
    queue.close("verify is lost")
    queue.open()
    assert queue.is_shut
    with pytest.raises(UnavailableError, match="shutting down"):
        queue.add(make_job())
