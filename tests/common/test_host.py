"""Scheduling of threads, read back from the kernel."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from slipstream.common.host import STREAM_SLICE_NS, SchedulingAttributes, work_as_stream, yield_to_streams

SYS_SCHED_GETATTR = 315
FIRST_WITH_SLICES = (6, 12)


def attributes_after(*calls) -> SchedulingAttributes:
    """Reads the scheduling attributes of a new thread from the kernel, after it has made some calls."""
    attributes = SchedulingAttributes()

    def work() -> None:
        for call in calls:
            call()
        size = ctypes.sizeof(attributes)
        assert ctypes.CDLL(None).syscall(SYS_SCHED_GETATTR, 0, ctypes.byref(attributes), size, 0) == 0

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert attributes.size >= ctypes.sizeof(attributes)
    return attributes


def test_threads_beside_a_stream_wait_their_turn():
    assert attributes_after(yield_to_streams).policy == os.SCHED_BATCH


def test_the_thread_of_a_stream_does_not_wait():
    assert attributes_after(yield_to_streams, work_as_stream).policy == os.SCHED_OTHER


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < FIRST_WITH_SLICES, reason="the kernel knows no slices"
)
def test_the_thread_of_a_stream_has_a_shorter_slice():
    before, after = attributes_after(yield_to_streams), attributes_after(yield_to_streams, work_as_stream)
    assert after.runtime == STREAM_SLICE_NS < before.runtime
