"""Logs of the accesses to shared memory and of the fence operations, for the happens-before checker.

Debug mode only: each stream of work has a log of its own, in the order of the stream (the order in
which work was enqueued on it). `python -m tests.ordering.replay DIR` joins the logs
of all processes and names every pair of accesses that nothing ordered.

A draft's epoch is its attachment. Verify and the scheduler give the attachment with what they do to its region: buffers
and fences of different attachments have the same names.

The scheduler logs as one stream, in the order of its loop: what it learned from a copy (the wait,
and the reads) when it *consumes* the result, not when it enqueues the copy.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Literal

from slipstream.common.errors import ConfigError
from slipstream.common.wire.step import Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from slipstream.common.wire.layout import BufferName
    from slipstream.common.wire.step import FenceName

BUFFER_BYTES = 1 << 20


class StreamName(enum.StrEnum):
    """A stream of work that is in order by itself."""

    DRAFT = "draft"
    VERIFY = "verify"
    SCHEDULER = "scheduler"


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


class AccessLog:
    """The log of one stream. Accesses and fence operations belong to the epoch of the last send or recv.

    This base class keeps nothing: it is the log of a process that is not debugged.
    """

    is_enabled = False
    """False where nothing is kept: then a caller need not even collect the rows."""

    def access(
        self, buffer: BufferName, rows: Sequence[int], *, is_write: bool, step: int, attachment: int = 0
    ) -> None:
        """The stream reads or writes `rows` of `buffer` as part of `step`; 0 stands for the results."""

    def fence(self, op: FenceLogOp, fence: FenceName, value: int, *, step: int, attachment: int = 0) -> None:
        """The stream signals `value`, or has come past it by a wait or by a poll that was seen true."""

    def release(self, fence: FenceName, value: int, *, epoch: int, attachment: int = 0) -> None:
        """The scheduler releases all waits in `epoch` for up to `value`."""

    def send(self, role: Role, *, epoch: int, step: int) -> None:
        """The scheduler is about to send the worker its command of `step`."""

    def recv(self, *, epoch: int, step: int) -> None:
        """The worker begins with the command of `step`: before its first wait."""

    def close(self) -> None:
        """Writes out what is buffered. Nothing may be logged after it."""


class JsonLinesAccessLog(AccessLog):
    """Writes one JSON object a line, from one thread.

    Lines reach the file with the next `send` or `recv` at the latest, so the log of a killed process lacks no more
    than its last command.
    """

    is_enabled = True

    def __init__(self, path: Path, stream: StreamName) -> None:
        """Creates `path`; each incarnation of a process needs a file of its own (`*.jsonl`)."""
        self._file = path.open("x", encoding="utf-8", buffering=BUFFER_BYTES)
        self._stream = stream
        self._seq = 0
        self._epoch = 0

    def access(
        self, buffer: BufferName, rows: Sequence[int], *, is_write: bool, step: int, attachment: int = 0
    ) -> None:
        op = LogOp.WRITE if is_write else LogOp.READ
        text = ",".join(map(str, rows))
        self._append(op, step, f'"buffer":"{buffer.value}","rows":[{text}],"attachment":{attachment}')

    def fence(self, op: FenceLogOp, fence: FenceName, value: int, *, step: int, attachment: int = 0) -> None:
        self._append(op, step, f'"fence":"{fence.name}","value":{value},"attachment":{attachment}')

    def release(self, fence: FenceName, value: int, *, epoch: int, attachment: int = 0) -> None:
        current, self._epoch = self._epoch, epoch
        self._append(LogOp.RELEASE, value, f'"fence":"{fence.name}","value":{value},"attachment":{attachment}')
        self._epoch = current

    def send(self, role: Role, *, epoch: int, step: int) -> None:
        current, self._epoch = self._epoch, epoch
        self._append(LogOp.SEND, step, f'"role":"{role.value}"')
        if role is Role.DRAFT:
            # The scheduler's own epoch is verify's.
            self._epoch = current
        self._file.flush()

    def recv(self, *, epoch: int, step: int) -> None:
        self._file.flush()
        self._epoch = epoch
        self._append(LogOp.RECV, step)

    def close(self) -> None:
        self._file.close()

    def _append(self, op: LogOp, step: int, fields: str = "") -> None:
        # Written by hand, which takes a third of the time of json.dumps: every value is a number or an enum's.
        head = (
            f'{{"stream":"{self._stream.value}","seq":{self._seq},"op":"{op.value}","step":{step},"epoch":{self._epoch}'
        )
        self._file.write(f"{head},{fields}}}\n" if fields else f"{head}}}\n")
        self._seq += 1


def make_log_directory(directory: Path | None) -> None:
    """Makes the directory of access logs, if there is to be one. Raises ConfigError if it cannot be made."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = f"a directory that this user can make ({error.strerror})"
        raise ConfigError("access_log_dir", str(directory), accepted) from error


def open_access_log(directory: Path | None, stream: StreamName, instance: int) -> AccessLog:
    """Opens a new log for an instance of a stream; one that keeps nothing where there is no directory.

    Raises OSError if the file cannot be made.
    """
    if directory is None:
        return AccessLog()
    # In a container the process id is always the same.
    return JsonLinesAccessLog(directory / f"{stream.value}-{instance}-{time.time_ns()}.jsonl", stream)
