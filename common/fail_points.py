"""Faults that tests plant in real processes: at a named point the process dies, hangs or stops.

    SLIPSTREAM_FAIL_POINTS="verify.after_publish:kill@7,gateway.before_commit:hang@3"
    SLIPSTREAM_FAIL_RECORD=DIR

At its seventh time at the point verify kills itself, the gateway's thread hangs at its third. A point is left in DIR as
a file when it fails, and fails no other time: not in the process that a supervisor starts next. A service refuses the
first variable without the second. A point costs nothing where it is not planted.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
import signal
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "SLIPSTREAM_FAIL_POINTS"
RECORD_VARIABLE = "SLIPSTREAM_FAIL_RECORD"
EXIT_STATUS = 70
"""Exit status of a process that ended at a point with the action `exit`."""

NAMES = frozenset(
    {
        *("gateway.before_submit", "gateway.before_delivery", "gateway.before_commit", "gateway.after_commit"),
        "gateway.before_write",
        *("scheduler.before_attach", "scheduler.before_attach_draft", "scheduler.before_send", "scheduler.after_send"),
        *("scheduler.before_take_in", "scheduler.before_output"),
        *("verify.before_attach", "verify.before_step", "verify.before_publish", "verify.after_publish"),
        *("verify.before_stash", "verify.after_stash"),
        *("draft.before_attach", "draft.before_step", "draft.before_done", "draft.after_done"),
    }
)
"""All points: process, then place."""
_POINT = re.compile(r"(?P<name>[a-z._]+):(?P<action>[a-z]+)@(?P<at>[1-9][0-9]{0,8})")


class Action(enum.StrEnum):
    """The fault at a point."""

    KILL = "kill"
    """The process kills itself with SIGKILL."""
    EXIT = "exit"
    """The process ends with EXIT_STATUS, and cleans nothing up."""
    HANG = "hang"
    """The thread stays there."""
    STOP = "stop"
    """The process stops until it gets SIGCONT."""


class FailPoint:
    """A fault at a named point. Any thread may come there."""

    def __init__(self, name: str, action: Action, at: int, record: Path) -> None:
        """It fails the `at`-th time, unless the directory `record` says that it did already."""
        self._action = action
        self._at = at
        self._record = record / name
        self._times = itertools.count(1)

    def reach(self) -> None:
        """Called whenever the process comes to the point."""
        if next(self._times) == self._at and self._is_first():
            self._fail()

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        return True

    def _fail(self) -> None:
        match self._action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.EXIT:
                os._exit(EXIT_STATUS)
            case Action.HANG:
                _hang()
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)


def failing_before(name: str, work: Callable[P, T]) -> Callable[P, T]:
    """Returns `work` itself; where a test planted a fault at `name`, work that comes to the point before it begins."""
    point = planted(name)
    if point is None:
        return work

    def failing(*args: P.args, **kwargs: P.kwargs) -> T:
        point.reach()
        return work(*args, **kwargs)

    return failing


def failing_after(name: str, work: Callable[P, T]) -> Callable[P, T]:
    """Returns `work` itself; where a test planted a fault at `name`, work that comes to the point when it is done."""
    point = planted(name)
    if point is None:
        return work

    def failing(*args: P.args, **kwargs: P.kwargs) -> T:
        result = work(*args, **kwargs)
        point.reach()
        return result

    return failing


def planted(name: str) -> FailPoint | None:
    """Returns the fault at a point, the same one each time; None if there is none. Raises ConfigError."""
    assert name in NAMES, f"{name} is not among the names of points"
    return check_fail_points().get(name)


def check_fail_points() -> Mapping[str, FailPoint]:
    """Returns the faults that the environment plants, by their names. Raises ConfigError if they are refused."""
    text = os.environ.get(VARIABLE)
    return {} if text is None else _parse(text, os.environ.get(RECORD_VARIABLE))


@cache
def _parse(text: str, record: str | None) -> Mapping[str, FailPoint]:
    if record is None or not Path(record).is_dir():
        accepted = f"nothing: it is for tests, which set {RECORD_VARIABLE} to a directory as well"
        raise ConfigError(VARIABLE, text, accepted)
    points: dict[str, FailPoint] = {}
    for part in text.split(","):
        found = _POINT.fullmatch(part)
        if found is None or found["action"] not in tuple(Action):
            raise ConfigError(VARIABLE, part, f"NAME:ACTION@TIME, with an action of {', '.join(Action)}")
        if found["name"] not in NAMES:
            raise ConfigError(VARIABLE, part, ", ".join(sorted(NAMES)))
        points[found["name"]] = FailPoint(found["name"], Action(found["action"]), int(found["at"]), Path(record))
    return points


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()
