"""`RoleEngine`: a worker's own device work, draft's or verify's. It comes to the engine in `Phase`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.common.wire.step import FenceName, StepCommand, WaitPlace
    from slipstream.common.wire.worker import StepTokens, WorkerDescription
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region


@dataclass(frozen=True, slots=True)
class Phase:
    """A piece of a step's work. The waits of its place come before it, the signals of its fences after it."""

    work: Callable[[], None]
    fences: tuple[FenceName, ...] = ()
    """In the order in which they are signalled."""
    place: WaitPlace | None = None
    """None: no wait stands before it."""
    part: int = 0
    """The place in the worker's stamps of the part that it belongs to; the phases of a part follow each other."""
    is_stamped: bool = False
    """True if the work of the part's first phase stamps its start, and that of the last one its end, by itself."""


class RoleEngine(Protocol):
    """The device work of a draft or a verify service."""

    description: WorkerDescription
    """The worker's description, for the scheduler."""

    def open(self, state: EpochState) -> StepTokens | None:
        """Allocates what an epoch needs, warms up; verify may return a step's tokens. Raises MismatchError, others."""

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """Returns the step's work in order; each part is stream work and holds all it needs."""

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        """Verify: makes what steps with a draft need; other steps may run between two items. Raises MismatchError."""

    def close(self) -> None:
        """Frees what `open` allocated."""
