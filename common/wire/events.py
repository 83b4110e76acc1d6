"""Events of a process: what it did in which step, and when.

The last ones are in a ring at all times, for a trace. Those in which a thread was blocked are added up by site, for the
metrics of stalls.

In debug mode a file takes every access to shared memory and every fence operation as well, for the happens-before
checker: each stream of work has a file of its own, in the order of the stream (the order in which work was enqueued on
it). `python -m tests.ordering.replay DIR` joins the files of all processes and names every pair of accesses that
nothing ordered. A draft's epoch is its attachment, and so is a grammar worker's, which gives verify's epoch with what
it reads of the results. Verify and the scheduler give the attachment with what they do to its region: buffers and
fences of different attachments have the same names. The scheduler logs as one stream, in the
order of its loop: what it learned from a copy (the wait, and the reads) when it *consumes* the result, not when it
enqueues the copy.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

from slipstream.common.errors import ConfigError
from slipstream.common.wire.step import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from slipstream.common.wire.step import FenceName

CAPACITY = 8192
"""Events that are kept: those of a thousand steps in every process, and more."""
BUFFER_BYTES = 1 << 20


class Site(enum.IntEnum):
    """The activity that an event is about."""

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
    """Worker, host: the command arrived, until it went to the thread that enqueues it."""
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
    """Scheduler, loop: the step is under way and takes long; the next one is held back for requests that may arrive."""
    PREFILL = 13
    """Draft, stream: its prefill part of the step, after its waits. On the stamps' clock."""
    DRAFT_BACKLOG = 14
    """Scheduler, loop: the wait for a draft that was a whole ring of steps late."""
    ACKNOWLEDGEMENT = 15
    """Scheduler, loop: the wait until a worker acknowledged a step. Worker, host: the wait for the step's end."""
    ATTACH = 16
    """Worker, host: an epoch was opened, and its graphs were captured."""
    STAGING = 17
    """Worker, host: the wait for a device that was a whole ring of steps late."""
    DRAIN = 18
    """Worker, host: the wait for the end of an epoch's work."""
    MASKS = 19
    """Verify, stream: the wait for masks, between the end of a step's forward and its sampling. On the stamps' clock;
    it is added with a later such wait."""
    COLLECTIVES = 20
    """Rank of verify after the first: how long its work that begins then was in collectives, all of them together."""


WORKER_STALLS = (Site.ATTACH, Site.STAGING, Site.ACKNOWLEDGEMENT, Site.DRAIN, Site.MASKS)
"""Sites at which a worker's threads are blocked."""


class Event(NamedTuple):
    """An activity with its begin and end."""

    site: Site
    step: int
    """Number of the step; of a gateway, number of the request's job."""
    begin_ns: int
    """CLOCK_MONOTONIC of the host, or the clock of the stamps."""
    end_ns: int


class StreamName(enum.StrEnum):
    """A stream of work that is in order by itself."""

    DRAFT = "draft"
    VERIFY = "verify"
    SCHEDULER = "scheduler"
    GRAMMAR = "grammar"


class LogOp(enum.StrEnum):
    """The kind of operation that a line of a log is about."""

    READ = "read"
    WRITE = "write"
    SIGNAL = "signal"
    WAIT = "wait"
    POLL = "poll"
    """A poll that was seen true; one that was not says nothing about the order."""
    RELEASE = "release"
    """The owner of a fence signals in place of a producer that is gone."""
    SEND = "send"
    RECV = "recv"


FenceLogOp = Literal[LogOp.SIGNAL, LogOp.WAIT, LogOp.POLL]


class EventLog:
    """The events of one stream of work. One thread or several add events; one logs the order; any may read.

    Accesses and fence operations belong to the epoch of the last send or recv. Their lines reach the file with the next
    `send` or `recv` at the latest, so the file of a killed process lacks no more than its last command.
    """

    def __init__(self, stream: StreamName = StreamName.SCHEDULER, path: Path | None = None) -> None:
        """`path`: a file to be made (`*.jsonl`), one for each incarnation of a process. Raises OSError."""
        self.epoch = 0
        """The epoch that the steps of the events are numbered in."""
        self.stalled_ns = [0] * (max(Site) + 1)
        """How long threads were blocked, by site; each site belongs to one thread. A list's index needs no hash."""
        self._events: deque[tuple[Site, int, int, int]] = deque(maxlen=CAPACITY)
        self._blocked = threading.local()
        self._stream = stream
        self._seq = 0
        self._ordered_epoch = 0
        self._file: IO[str] | None = None
        if path is not None:
            self._file = path.open("x", encoding="utf-8", buffering=BUFFER_BYTES)
        self.is_enabled = path is not None
        """True if the order is logged; only then may it be, and need a caller collect the rows."""

    def add(self, site: Site, step: int, begin_ns: int, end_ns: int) -> None:
        """Adds an event, in about 0.2 us; the oldest one goes."""
        self._events.append((site, step, begin_ns, end_ns))

    def stall(self, site: Site, step: int, begin_ns: int, end_ns: int) -> None:
        """Adds an event in which a thread was blocked."""
        self._events.append((site, step, begin_ns, end_ns))
        self.stalled_ns[site] += end_ns - begin_ns

    @contextmanager
    def blocked(self, site: Site, step: int = 0) -> Iterator[None]:
        """Adds the block as an event in which the thread is blocked; within another such block, adds nothing."""
        if getattr(self._blocked, "is_counted", False):
            yield
            return
        begin_ns, self._blocked.is_counted = time.monotonic_ns(), True
        try:
            yield
        finally:
            self._blocked.is_counted = False
            self.stall(site, step, begin_ns, time.monotonic_ns())

    def begin_epoch(self, epoch: int) -> None:
        """Forgets all events: steps are numbered anew."""
        self._events.clear()
        self.epoch = epoch

    def since(self, step: int) -> list[Event]:
        """The events of steps from this one on, in the order in which they were added."""
        return [Event(*event) for event in self._events.copy() if event[1] >= step]

    def access(self, buffer: str, rows: Sequence[int], *, is_write: bool, step: int, attachment: int = 0) -> None:
        """Logs that the stream reads or writes `rows` of `buffer`, a `BufferName`, as part of `step`.

        `attachment`: 0 stands for the results.
        """
        op = LogOp.WRITE if is_write else LogOp.READ
        text = ",".join(map(str, rows))
        self._append(op, step, f'"buffer":"{buffer}","rows":[{text}],"attachment":{attachment}')

    def fence(self, op: FenceLogOp, fence: FenceName, value: int, *, step: int, attachment: int = 0) -> None:
        """Logs that the stream signals `value`, or has passed it by a wait or by a poll that was seen true."""
        self._append(op, step, f'"fence":"{fence.name}","value":{value},"attachment":{attachment}')

    def release(self, fence: FenceName, value: int, *, epoch: int, attachment: int = 0) -> None:
        """Logs that the scheduler releases all waits in `epoch` for up to `value`."""
        current, self._ordered_epoch = self._ordered_epoch, epoch
        self._append(LogOp.RELEASE, value, f'"fence":"{fence.name}","value":{value},"attachment":{attachment}')
        self._ordered_epoch = current

    def send(self, role: Role, *, epoch: int, step: int) -> None:
        """Logs that the scheduler is about to send the worker its command of `step`."""
        current, self._ordered_epoch = self._ordered_epoch, epoch
        self._append(LogOp.SEND, step, f'"role":"{role.value}"')
        if role is not Role.VERIFY:
            # The scheduler's own epoch is verify's.
            self._ordered_epoch = current
        self._flush()

    def recv(self, *, epoch: int, step: int) -> None:
        """Logs that the worker begins with the command of `step`: before its first wait."""
        self._flush()
        self._ordered_epoch = epoch
        self._append(LogOp.RECV, step)

    def close(self) -> None:
        """Writes out what is buffered. Nothing may be logged after it."""
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        assert self._file is not None, "the order is logged only where it is enabled"
        self._file.flush()

    def _append(self, op: LogOp, step: int, fields: str = "") -> None:
        assert self._file is not None, "the order is logged only where it is enabled"
        # Written by hand, which takes a third of the time of json.dumps: every value is a number or an enum's.
        where = f'"op":"{op.value}","step":{step},"epoch":{self._ordered_epoch}'
        head = f'{{"stream":"{self._stream.value}","seq":{self._seq},{where}'
        self._file.write(f"{head},{fields}}}\n" if fields else f"{head}}}\n")
        self._seq += 1


def make_log_directory(directory: Path | None) -> None:
    """Makes the directory of the files, if there is to be one. Raises ConfigError if it cannot be made."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = f"a directory that this user can make ({error.strerror})"
        raise ConfigError("access_log_dir", str(directory), accepted) from error


def open_event_log(directory: Path | None, stream: StreamName, instance: int) -> EventLog:
    """Opens a new log for an instance of a stream, with a file where there is a directory.

    Raises OSError if the file cannot be made.
    """
    if directory is None:
        return EventLog(stream)
    # In a container the process id is always the same.
    return EventLog(stream, directory / f"{stream.value}-{instance}-{time.time_ns()}.jsonl")
