"""The flight recorder: times of a process's last steps, kept all the time in a bounded ring."""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple


class Site(enum.IntEnum):
    """The activity that a record is about."""

    SEND = 1
    """Scheduler, loop: the step was decided on, and its commands were handed over."""
    RESULT = 2
    """Scheduler, result: from the sending of the step until the loop saw that verify had published it."""
    WAIT = 3
    """Scheduler, loop: the wait for the step's result."""
    TAKE_IN = 4
    """Scheduler, loop: the result became progress of its requests."""
    IDLE = 5
    """Scheduler, loop: nothing to do; the step is the last one that was sent before."""
    RECEIVE = 6
    """Worker, host: the command came, until it went to the thread that enqueues it."""
    ENQUEUE = 7
    """Worker, host: the step was enqueued."""
    STREAM = 8
    """Worker, stream: its own work of the step, after its waits; of draft, its decode part. On the stamps' clock."""
    TOKENISE = 9
    """Gateway: a request was received, until its prompt was tokenised and all of it was checked."""
    SUBMIT = 10
    """Gateway: from there, until it was sent to the scheduler."""
    FIRST_TOKEN = 11
    """Gateway: from there, until its first token was sent to a client."""
    HOLD = 12
    """Scheduler, loop: the step is under way and takes long; the next one is held back for requests that may come."""
    PREFILL = 13
    """Draft, stream: its prefill part of the step, after its waits. On the stamps' clock."""


class Record(NamedTuple):
    """An activity with its begin and end."""

    site: Site
    step: int
    """Number of the step; of a gateway, number of the request's job."""
    begin_ns: int
    """CLOCK_MONOTONIC of the host, or the clock of the stamps."""
    end_ns: int


CAPACITY = 8192
"""Records that are kept: a thousand steps in every process, and their neighbours."""


class FlightRecorder:
    """A ring of records. One thread or several add; any may read."""

    __slots__ = ("_records", "epoch")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[tuple[Site, int, int, int]] = deque(maxlen=capacity)
        self.epoch = 0
        """The epoch that the steps are numbered in."""

    def add(self, site: Site, step: int, begin_ns: int, end_ns: int) -> None:
        """Adds a record, in about 0.2 us; the oldest one goes."""
        self._records.append((site, step, begin_ns, end_ns))

    def begin_epoch(self, epoch: int) -> None:
        """Forgets all records: steps are numbered anew."""
        self._records.clear()
        self.epoch = epoch

    def since(self, step: int) -> list[Record]:
        """The records of steps from this one on, in the order in which they were added."""
        return [Record(*record) for record in self._records.copy() if record[1] >= step]
