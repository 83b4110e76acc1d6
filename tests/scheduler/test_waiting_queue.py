"""The queue of sequences, which one thread fills and another empties."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import ResourceExhaustedError
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.scheduler.records import Sequence
from slipstream.scheduler.waiting_queue import MOST_OVERTAKING, WaitingQueue
from tests.harness.waiting import block_until

SPEC = SequenceSpec(job_id="", prompt=(1,), max_new_tokens=1, sampling=SamplingParams(), stop_token_ids=frozenset())
_numbers = count(1)


def make(stream: int = 0, *, priority: int = 0, arrival: int = 0, deadline_ns: int = 0) -> Sequence:
    """A sequence that is not submitted."""
    spec = replace(SPEC, priority=priority, arrival=arrival, deadline_ns=deadline_ns)
    return Sequence(spec, next(_numbers), stream)


def open_queue(capacity: int = 8) -> WaitingQueue:
    """A queue that takes sequences."""
    queue = WaitingQueue(capacity)
    queue.open(1)
    return queue


def take_all(queue: WaitingQueue) -> list[Sequence]:
    """All that wait, in order."""
    taken = []
    while (sequence := queue.take_next(lambda _: True)) is not None:
        taken.append(sequence)
    return taken


def test_first_come_first_served_while_there_is_room() -> None:
    queue, both = open_queue(), [make(), make()]
    for sequence in both:
        assert queue.add(sequence)
    assert queue.take_next(lambda _: False) is None
    assert queue.take_next(lambda _: True) is both[0]
    assert len(queue) == 1
    assert take_all(queue) == [both[1]]


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=8))
def test_the_order_is_by_priority_then_arrival_then_submission(kinds: list[tuple[int, int]]) -> None:
    queue = open_queue()
    added = [make(priority=priority, arrival=arrived) for priority, arrived in kinds]
    queue.add(*added)
    assert take_all(queue) == sorted(added, key=lambda one: (-one.spec.priority, one.spec.arrival))


def test_a_full_queue_says_when_to_try_again_and_counts_what_runs() -> None:
    queue, first = open_queue(2), make()
    queue.add(first)
    assert queue.take_next(lambda _: True) is first
    with pytest.raises(ResourceExhaustedError, match="full: it has 1 sequences, of at most 2") as caught:
        queue.add(make(), make())
    assert caught.value.retry_after_ms > 0
    assert (len(queue), queue.num_held) == (0, 1), "all come in or none"
    queue.release([first])
    assert queue.add(make(), make())


def test_sequences_for_another_epoch_are_left_out_and_a_closed_queue_forgets_all() -> None:
    queue = WaitingQueue(2)
    assert not queue.add(make())
    queue.open(2)
    assert not queue.add(make(), epoch=1)
    assert queue.add(make(deadline_ns=1), epoch=2)
    queue.cancel(0, [next(_numbers) - 1])
    queue.close()
    assert (len(queue), queue.num_held) == (0, 0)
    queue.open(3)
    assert queue.take_cancelled() == queue.take_expired() == take_all(queue) == []


def test_a_cancelled_sequence_waits_no_more() -> None:
    queue, runs, first, second = open_queue(), make(), make(), make()
    queue.add(runs)
    assert take_all(queue) == [runs]
    queue.add(first, second)
    queue.cancel(0, [first.id, runs.id, 9999])
    assert queue.take_cancelled() == [first, runs]
    assert queue.take_cancelled() == []
    assert take_all(queue) == [second]


def test_the_end_of_a_stream_cancels_its_sequences_alone() -> None:
    queue, one, other = open_queue(), make(1), make(2)
    queue.add(one, other)
    queue.drop(1)
    queue.cancel(1, [other.id])
    assert queue.take_cancelled() == [one]
    assert take_all(queue) == [other]


def test_what_waits_past_its_deadline_is_taken_wherever_it_waits() -> None:
    queue, now = open_queue(), time.monotonic_ns()
    first, late, later = make(), make(deadline_ns=now), make(deadline_ns=now + 10**12)
    taken, cancelled = make(deadline_ns=now, priority=1), make(deadline_ns=now)
    queue.add(first, late, later, taken, cancelled)
    assert queue.take_next(lambda _: True) is taken
    queue.cancel(0, [cancelled.id])
    assert queue.take_cancelled() == [cancelled]
    assert queue.take_expired() == [late]
    assert queue.take_expired() == []
    assert take_all(queue) == [first, later]
    assert queue.num_held == 4


def test_what_is_put_back_waits_where_it_did_and_has_no_deadline_any_more() -> None:
    queue, now = open_queue(), time.monotonic_ns()
    urgent, late = make(priority=1, deadline_ns=now + 10**12), make(priority=1, deadline_ns=now + 2 * 10**7)
    first, second, third = make(arrival=1), make(arrival=2), make(arrival=3)
    queue.add(urgent, late, first, second, third)
    assert take_all(queue) == [urgent, late, first, second, third]
    for sequence in (late, first, second, third):
        sequence.was_preempted = True
    queue.release([third])
    queue.put_back([third, second, late, first])
    while time.monotonic_ns() < late.spec.deadline_ns:
        queue.wait_for_stop(0.005)
    assert queue.take_expired() == []
    queue.cancel(0, [first.id])
    assert queue.take_cancelled() == [first]
    assert take_all(queue) == [late, second], "one that is over does not come back"


def test_one_that_does_not_fit_is_overtaken_by_a_few() -> None:
    queue, large, larger = open_queue(100), make(), make()
    small = [make() for _ in range(3 * MOST_OVERTAKING)]
    queue.add(large, *small[:1], larger, *small[1:])
    taken = []
    while (sequence := queue.take_next(lambda one: one not in (large, larger))) is not None:
        taken.append(sequence)
    assert taken == small[:MOST_OVERTAKING]
    assert queue.take_next(lambda one: one is not large) is None
    assert queue.take_next(lambda _: True) is large
    assert queue.take_next(lambda one: one is not larger) is small[MOST_OVERTAKING], "one had overtaken it less often"
    assert queue.take_next(lambda one: one is not larger) is None
    assert take_all(queue) == [larger, *small[MOST_OVERTAKING + 1 :]]


def test_no_more_than_the_first_are_looked_at() -> None:
    queue, seen = open_queue(100), list[Sequence]()
    waiting = [make() for _ in range(50)]
    queue.add(*waiting)
    assert queue.take_next(lambda one: bool(seen.append(one))) is None  # type: ignore[func-returns-value]
    assert seen == waiting[: MOST_OVERTAKING + 1]


def test_what_was_cancelled_is_not_kept_behind_one_that_does_not_fit() -> None:
    queue = open_queue(100_000)
    queue.add(make(priority=9))
    for _ in range(40):
        gone = [make(deadline_ns=2**60) for _ in range(100)]
        queue.add(*gone)
        queue.cancel(0, [sequence.id for sequence in gone])
        queue.release(queue.take_cancelled())
    assert max(len(queue._waiting), len(queue.deadlines)) < 300
    assert len(queue) == 1


@pytest.mark.parametrize("change", ["submit", "cancel", "stop"])
def test_every_change_wakes_the_loop(change: str) -> None:
    queue, running = open_queue(), make()
    queue.add(running)
    take_all(queue)
    changes = {"submit": lambda: queue.add(make()), "cancel": lambda: queue.drop(0), "stop": queue.stop}
    waiter = threading.Thread(target=queue.wait_for_change, args=(30.0,))
    waiter.start()
    changes[change]()
    waiter.join(25.0)
    assert not waiter.is_alive()


def test_only_the_end_wakes_who_waits_for_it() -> None:
    queue = open_queue()
    queue.add(make())
    started = time.monotonic()
    queue.wait_for_stop(0.02)
    assert time.monotonic() - started >= 0.02
    assert not queue.is_stopped
    queue.stop()
    queue.wait_for_stop(30.0)
    assert queue.is_stopped


def test_waits_until_nothing_is_held() -> None:
    queue, last = open_queue(), make()
    queue.add(last)
    assert not queue.wait_until_empty(0.01)
    releases = threading.Timer(0.01, queue.release, ([last],))
    releases.start()
    assert queue.wait_until_empty(30.0)
    releases.join()


def test_the_loop_is_woken_also_where_another_thread_waits_for_the_end() -> None:
    queue, empty = open_queue(), threading.Event()
    ending = threading.Thread(target=lambda: queue.wait_until_empty(30.0) and empty.set())
    queue.add(first := make())
    queue.take_next(lambda _: True)
    ending.start()
    block_until(lambda: bool(queue._changed._waiters))  # it waits before the loop does
    looping = threading.Thread(target=queue.wait_for_change, args=(30.0,))
    looping.start()
    block_until(lambda: len(queue._changed._waiters) == 2)
    queue.add(second := make())
    looping.join(5.0)
    assert not looping.is_alive()
    queue.release([first, second])
    ending.join()
    assert empty.is_set()
