"""Gaps in what clients saw, and how soon a draft is as good as before."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from slipstream.benchmarks.streams import JobLog, Message, Streams
from slipstream.benchmarks.swap import BIN_TOKENS, NUM_BINS, Recovery

STEP = (True, True, True, False)
"""Three accepted draft tokens, and the bonus token."""


def job(*times: float, is_draft: tuple[bool, ...] = STEP) -> JobLog:
    return JobLog([Message(at, is_draft) for at in times])


@pytest.mark.parametrize(
    ("start", "end", "begun_after", "gaps"),
    [
        (0.0, 20.0, 0.0, [1.0, 3.0]),
        (1.05, 8.0, 0.0, [0.1]),
        (0.5, 0.6, 0.0, [1.0]),
        (0.0, 20.0, 0.5, [0.5, 3.0]),
        (2.0, 8.0, 0.0, []),
    ],
)
def test_a_gap_is_between_messages_of_one_job(start: float, end: float, begun_after: float, gaps: list[float]) -> None:
    streams = Streams("unix:nowhere", 2, 1000)
    streams.streams[0].jobs = [job(0.0, 1.0, 1.1), job(9.0, 9.5)]
    streams.streams[1].jobs = [job(15.0, 18.0)]
    assert streams.longest_gaps(start, end, begun_after=begun_after) == pytest.approx(gaps)


async def test_what_this_process_does_holds_up_no_client_unseen() -> None:
    streams = Streams("unix:nowhere", 1, 1000)
    (stream,) = streams.streams
    stream.jobs = [job(0.0, 1.0), job(2.0)]
    threshold = gc.get_threshold()
    async with streams.running():
        streams.errors.append("stops the clients")
        assert gc.get_threshold()[2] > 1000 * threshold[2]
    assert gc.get_threshold() == threshold
    streams.errors.clear()
    settling = asyncio.create_task(streams.settle())
    await asyncio.sleep(0)
    assert (settling.done(), len(stream.jobs)) == (False, 1)
    stream.jobs[-1].messages.append(Message(time.monotonic() + 1.0, STEP))
    streams._news.set()
    await settling


async def test_acceptance_is_back_where_steps_are_as_few_as_with_the_draft_from_the_beginning() -> None:
    streams = Streams("unix:nowhere", 2, 1000)
    reference = list(STEP) * 200
    slow = [Message(at, (False,)) for at in range(50)]
    after = [Message(100.0 + at, STEP) for at in range(100)]
    poor = [Message(60.0 + at, (False,)) for at in range(30)]
    # One stream has no draft for the first 30 tokens after the return; the job of the other began behind it.
    streams.streams[0].jobs = [JobLog([*slow, *poor, *after])]
    streams.streams[1].jobs = [JobLog(after)]
    recovery = Recovery()
    recovery.add(streams, 55.0, [reference, reference])
    assert recovery.shares[0] == pytest.approx(0.25, abs=0.03)
    assert recovery.shares[1] < 0.95
    assert recovery.shares[2:] == pytest.approx([1.0] * (NUM_BINS - 2), abs=0.2)
    assert recovery.tokens is not None
    assert recovery.tokens >= 2 * BIN_TOKENS


def test_acceptance_that_does_not_come_back_is_said() -> None:
    recovery = Recovery()
    assert recovery.tokens is None
    recovery.steps, recovery.expected_steps = [20] * NUM_BINS, [10] * NUM_BINS
    assert recovery.tokens is None
    recovery.expected_steps = [10] + [20] * (NUM_BINS - 1)
    assert recovery.tokens == BIN_TOKENS
    recovery.expected_steps = [20, 10, *[20] * (NUM_BINS - 2)]
    assert recovery.tokens == 0, "one place that is poor by chance does not count"
    recovery.expected_steps = [20, 10] + [10] * (NUM_BINS - 2)
    assert recovery.tokens is None
