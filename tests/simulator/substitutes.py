"""The clock and the threads of the simulated world in the place of the host's.

The real code reads the clock and makes threads through the modules `time` and `threading`. For a run, the names `time`
and `threading` of the modules under test stand for a world's clock and threads: none of them knows of the simulation.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from slipstream.scheduler import attachment, draft_session, epoch, grammar_session, session, sizes
from tests.harness.random_choice import RandomChoice
from tests.simulator.threads import SimulatedCondition, SimulatedEvent, SimulatedFuture, SimulatedThread
from tests.simulator.world import Process, World

_UNDER_TEST = ("slipstream.gateway.", "slipstream.scheduler.", "slipstream.common.rpc.loop_turns")


class _NoLinks:
    """Stands in for the thread of the links to real services: a session of the simulation has other links."""

    loop = None

    def close(self) -> None:
        """See `LinkThread.close`."""


class _NoHeartbeats:
    """Stands in for health checks, which count for metrics alone."""

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """See `Heartbeats.start`."""


def _process_ids(world: World) -> Any:
    """Stands in for `ProcessId`: the world knows which of its processes live."""

    def of(pid: int) -> Any:
        process = world.processes[pid - 1]
        return _ProcessId(process)

    return SimpleNamespace(of=of)


class _ProcessId:
    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def is_gone(self) -> bool:
        return not self._process.is_alive


def _clock(world: World) -> SimpleNamespace:
    return SimpleNamespace(
        monotonic=world.monotonic,
        monotonic_ns=lambda: round(world.monotonic() * 1e9),
        time=world.unix,
        time_ns=lambda: round(world.unix() * 1e9),
        sleep=world.sleep,
    )


def _threads(world: World) -> SimpleNamespace:
    return SimpleNamespace(
        Thread=partial(SimulatedThread, world),
        Condition=partial(SimulatedCondition, world),
        Event=partial(SimulatedEvent, world),
        Lock=threading.Lock,
    )


@contextmanager
def substituted(world: World) -> Iterator[None]:
    """Puts the world's clock and threads into the modules under test; takes them out again."""
    clock, threads = _clock(world), _threads(world)
    before: list[tuple[Any, str, Any]] = []

    def put(module: Any, name: str, value: Any) -> None:
        if hasattr(module, name):
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)

    for name, module in sorted(sys.modules.items()):
        if name.startswith(_UNDER_TEST):
            put(module, "time", clock)
            put(module, "threading", threads)
    for module in (session, draft_session, grammar_session):
        put(module, "LinkThread", _NoLinks)
        put(module, "Heartbeats", _NoHeartbeats)
        put(module, "Future", partial(SimulatedFuture, world))
        put(module, "name_this_thread", lambda _: None)
    if world.seed % 2:  # small steps differ from others then, at sizes such as these
        put(sizes, "LEAST_SMALL", 1)
    put(attachment, "ProcessId", _process_ids(world))
    put(epoch, "DraftChoice", lambda *_: RandomChoice(world.random, changes=0.3))
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for module, name, value in reversed(before):
            setattr(module, name, value)
