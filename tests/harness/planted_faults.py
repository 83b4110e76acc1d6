"""Faults in the processes that a test starts: at a named point the process dies, hangs or stops.

    PlantedFaults(tmp_path / "record", "verify.after_publish:kill@7", "gateway.before_commit:hang@3")

At its seventh time at the point verify kills itself, the gateway's thread hangs at its third. The product knows nothing
of it: PYTHONPATH has Python import `at_start/sitecustomize.py` in each process with the environment, and `plant` wraps
the methods of POINTS when their modules are imported. A point that fails leaves a file in the record's folder, and
fails no other time: not in the process that a supervisor starts next.
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

VARIABLE = "TEST_FAIL_POINTS"
RECORD_VARIABLE = "TEST_FAIL_RECORD"
EXIT_STATUS = 70
"""Exit status of a process that ended at a point with the action `exit`."""
ROOT = Path(__file__).parents[2]
_POINT = re.compile(r"(?P<name>[a-z._]+):(?P<action>[a-z]+)@(?P<at>[1-9][0-9]{0,8})")


class Method(NamedTuple):
    """A method whose calls are a point."""

    module: str
    name: str
    """As in `Class.method`."""
    is_after: bool = False
    """True if the point is reached when a call returns, not when it begins."""
    applies: Callable[..., bool] = lambda *_: True
    """Whether a call with these arguments reaches the point."""
    is_on_stream: bool = False
    """True if the stream reaches the point, not the thread that enqueues: the method's argument is the stream."""


def _gateway(module: str, name: str, *, is_after: bool = False) -> Method:
    return Method(f"slipstream.gateway.{module}", name, is_after)


def _loop(module: str, name: str, *, is_after: bool = False) -> Method:
    return Method(f"slipstream.scheduler.{module}", name, is_after)


def _attach(name: str, role: str) -> Method:
    return Method("slipstream.scheduler.link", name, applies=lambda link, *_: link.role.value == role)


def _engine(name: str, role: str) -> Method:
    return Method(
        "slipstream.services.worker.engine", name, applies=lambda engine, *_: engine.description.role.value == role
    )


def _signal(fence: str, *, is_after: bool) -> Method:
    return Method(
        *("slipstream.services.worker.epoch", "SharedMemory.signal", is_after),
        applies=lambda _memory, _stream, point: point.fence.name == fence,
        is_on_stream=True,
    )


POINTS: Mapping[str, tuple[Method, ...]] = {
    "gateway.before_submit": (_gateway("scheduler", "SchedulerStream.send"),),
    "gateway.before_delivery": (_gateway("jobs", "JobManager.deliver"),),
    "gateway.before_commit": (_gateway("journal_file", "JournalFile.commit"),),
    "gateway.after_commit": (_gateway("journal_file", "JournalFile.commit", is_after=True),),
    "gateway.before_output": (_gateway("jobs", "JobManager._apply"),),
    "gateway.before_write": (_gateway("stream", "StreamWriter.write"),),
    "scheduler.before_attach": (_attach("Link.attach", "verify"),),
    "scheduler.before_attach_draft": (_attach("Link.attach_region", "verify"),),
    "scheduler.before_send": (_loop("link", "Dispatch.send"),),
    "scheduler.after_send": (_loop("link", "Dispatch.send", is_after=True),),
    "scheduler.before_take_in": (_loop("batch", "Batch.apply"),),
    "scheduler.before_delivery": (_loop("results", "Outgoing.deliveries"),),
    "scheduler.before_output": (_loop("service", "SchedulerServicer.put"),),
    "verify.before_attach": (_engine("Engine._attach", "verify"),),
    "verify.before_step": (_engine("Engine._enqueue", "verify"),),
    "verify.before_publish": (_signal("VERIFY_PUBLISH", is_after=False),),
    "verify.after_publish": (_signal("VERIFY_PUBLISH", is_after=True),),
    "verify.before_stash": (_signal("VERIFY_STASH", is_after=False),),
    "verify.after_stash": (_signal("VERIFY_STASH", is_after=True),),
    "rank.before_forward": (Method("slipstream.services.worker.follower", "Follower.forward"),),
    "draft.before_ready": (Method("slipstream.services.draft.drafters", "StandaloneDrafter.__init__"),),
    "draft.before_attach": (_engine("Engine._attach", "draft"),),
    "draft.before_step": (_engine("Engine._enqueue", "draft"),),
    "draft.before_proposed": (_signal("DRAFT_PROPOSED", is_after=False),),
    "draft.after_proposed": (_signal("DRAFT_PROPOSED", is_after=True),),
    "draft.before_prefilled": (_signal("DRAFT_PREFILLED", is_after=False),),
    "draft.after_prefilled": (_signal("DRAFT_PREFILLED", is_after=True),),
}
"""All points, by process, then place."""


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
    RAISE = "raise"
    """The call raises RuntimeError."""


class PlantedFaults:
    """Points at which processes with this environment fail, each of them once."""

    def __init__(self, record: Path, *points: str) -> None:
        """`points`: as "gateway.before_commit:kill@2". `record`: a folder, made here. Raises ValueError."""
        self._points = {FailPoint(text, record).name: text for text in points}
        self._record = record
        record.mkdir()

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of this process, with the faults."""
        paths = str(Path(__file__).parent / "at_start"), str(ROOT), os.environ.get("PYTHONPATH", "")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            VARIABLE: ",".join(self._points.values()),
            RECORD_VARIABLE: str(self._record),
        }

    @property
    def have_failed(self) -> bool:
        """True once every point has failed."""
        return all((self._record / name).exists() for name in self._points)


class FailPoint:
    """A fault at a named point. Any thread may reach it."""

    def __init__(self, text: str, record: Path) -> None:
        """`text`: as "gateway.before_commit:kill@2". The folder `record` says whether it has failed.

        Raises ValueError.
        """
        found = _POINT.fullmatch(text)
        if found is None or found["action"] not in tuple(Action):
            raise ValueError(f"{text!r} is not NAME:ACTION@TIME, with an action of {', '.join(Action)}")
        if found["name"] not in POINTS:
            raise ValueError(f"{text!r} is not at one of {', '.join(sorted(POINTS))}")
        self.name = found["name"]
        self._action = Action(found["action"])
        self._at = int(found["at"])
        self._record = record / self.name
        self._times = itertools.count(1)

    def reach(self) -> None:
        """Called whenever the process reaches the point."""
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
            case Action.RAISE:
                raise RuntimeError(f"planted at {self.name}")


def plant() -> None:
    """Plants the faults of the environment in the modules that this process imports from now on."""
    record = Path(os.environ[RECORD_VARIABLE])
    sys.meta_path.insert(0, _Planter([FailPoint(text, record) for text in os.environ[VARIABLE].split(",")]))


class _Planter(MetaPathFinder):
    """Wraps the methods of points when their module has been imported."""

    def __init__(self, points: Iterable[FailPoint]) -> None:
        self._wanted = [(method, point) for point in points for method in POINTS[point.name]]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        wanted = [(method, point) for method, point in self._wanted if method.module == fullname]
        if not wanted:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"there is no {fullname}, which has a point")
        load = spec.loader.exec_module

        def load_with_faults(module: ModuleType) -> None:
            load(module)
            for method, point in wanted:
                wrap(module, method, point.reach)

        spec.loader.exec_module = load_with_faults  # type: ignore[method-assign]
        return spec


def wrap(module: ModuleType, method: Method, reach: Callable[[], None]) -> None:
    """Has `reach` called by the calls of a method that apply. Raises AttributeError if there is no such method."""
    class_name, _, name = method.name.partition(".")
    owner = getattr(module, class_name)
    work = getattr(owner, name)

    @functools.wraps(work)
    def failing(*arguments: Any, **options: Any) -> Any:
        if not method.applies(*arguments):
            return work(*arguments, **options)
        reach_point = functools.partial(arguments[1].enqueue, reach) if method.is_on_stream else reach
        if not method.is_after:
            reach_point()
        result = work(*arguments, **options)
        if method.is_after:
            reach_point()
        return result

    setattr(owner, name, failing)


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()
