"""A role that records what it is to do, and a worker with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.common.wire.step import FenceName, Role, StepCommand, WaitPlace
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.epoch import EpochState
from slipstream.services.worker.future_map import Region
from tests.harness.workers import LocalWorker, SharedArenas, attach, describe

PUBLISH, STASH, PROPOSED = FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH, FenceName.DRAFT_PROPOSED


class Recorder:
    """A role whose work is to say that it is done."""

    def __init__(self, role: Role = Role.DRAFT) -> None:
        self.done: list[str] = []
        self.has_room = True
        self.is_open = False
        self.description = describe(role)

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        if not self.has_room:
            raise MemoryError("no room for the pages")
        self.is_open = True

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self.is_open = False

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        names = (PUBLISH, STASH) if self.description.role is Role.VERIFY else (PROPOSED,)
        places = (WaitPlace.START, None)
        return [
            Phase(self._does(f"{command.step} {name.name}"), (name,), place)
            for name, place in zip(names, places, strict=False)
        ]

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        """See `RoleEngine.prepare`."""
        return iter(())

    def _does(self, what: str) -> Callable[[], None]:
        return lambda: self.done.append(what)


@contextmanager
def attached(role: Recorder, **changes: object) -> Iterator[tuple[LocalWorker, SharedArenas]]:
    """A worker in epoch 1."""
    arenas = SharedArenas()
    worker = LocalWorker(role)
    attach(worker, arenas, **changes)
    yield worker, arenas
    worker.close()
    arenas.close()
