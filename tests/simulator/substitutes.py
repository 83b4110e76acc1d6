"""The clock and the threads of the simulated world in the place of the host's.

The real code reads the clock and makes threads through the modules `time` and `threading`. For a run, the names `time`
and `threading` of the modules under test stand for a world's clock and threads: none of them knows of the simulation.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slipstream.scheduler.workers import session
from tests.simulator.threads import SimulatedCondition, SimulatedEvent, SimulatedThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulator.world import World

_UNDER_TEST = ("slipstream.gateway.", "slipstream.scheduler.", "slipstream.common.rpc.loop_turns")
_UNIX_S = 1.8e9


class _NoLinks:
    """Stands in for the thread of the links to real services: a session of the simulation has other links."""

    loop = None

    def close(self) -> None:
        """See `LinkThread.close`."""


def _clock(world: World) -> SimpleNamespace:
    return SimpleNamespace(
        monotonic=lambda: world.now,
        monotonic_ns=lambda: round(world.now * 1e9),
        time=lambda: _UNIX_S + world.now,
        time_ns=lambda: round((_UNIX_S + world.now) * 1e9),
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
    put(session, "LinkThread", _NoLinks)
    put(session, "name_this_thread", lambda _: None)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for module, name, value in reversed(before):
            setattr(module, name, value)
