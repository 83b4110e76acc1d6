"""A step whose number is not known yet: what a graph is captured for, that will be replayed for many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from slipstream.common.worker.layout import BufferName


class CapturedAccess(NamedTuple):
    """An access to a shared buffer that every replay makes."""

    buffer: BufferName
    is_write: bool


@dataclass(slots=True)
class CapturedStep:
    """Goes where the FutureMap wants a step's number, while a graph is captured."""

    ring_row: torch.Tensor
    """[1] int64 on the device: the step's row of the ring, when the graph is replayed."""
    accesses: list[CapturedAccess] = field(default_factory=list)
    """What was accessed since the list was last emptied, for the log of a replay."""

    def take_accesses(self) -> tuple[CapturedAccess, ...]:
        """What was accessed since this was last called."""
        taken = tuple(dict.fromkeys(self.accesses))
        self.accesses.clear()
        return taken
