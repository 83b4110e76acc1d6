"""Buffers in shared memory as a worker sees them, and the steps that graphs are captured for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.layout import SLOT_BUFFERS, BufferName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from slipstream.common.wire.access_log import AccessLog


class CapturedAccess(NamedTuple):
    """An access to a shared buffer that every replay makes."""

    buffer: BufferName
    is_write: bool


@dataclass(frozen=True, slots=True)
class StampPlace:
    """Where the stamp of a step goes, which the device finds by itself."""

    column: torch.Tensor
    """[ring] int64, perhaps with a stride."""
    ring_row: torch.Tensor
    """[1] int64: the step's row."""

    def stamp(self) -> None:
        """Stream work where the device is the host."""
        self.column.index_fill_(0, self.ring_row, time.monotonic_ns())


@dataclass(slots=True)
class CapturedStep:
    """Stands for a step's number while a graph is captured that will be replayed for many steps."""

    ring_row: torch.Tensor
    """[1] int64 on the device: the step's row of the ring, when the graph is replayed."""
    region_words: torch.Tensor
    """[words of `RegionWord`] int64 on the device: the region of the draft that takes part, for verify."""
    start: StampPlace | None = None
    """Where what reads a slot's state first stamps that the worker's own work begins."""
    end: StampPlace | None = None
    """Where what a worker writes last stamps that it ends: a draft's tokens, or verify's stash."""
    accesses: list[CapturedAccess] = field(default_factory=list)
    """Accesses since the list was last emptied, for the log of a replay."""

    def take_accesses(self) -> tuple[CapturedAccess, ...]:
        """Returns the accesses since the last call."""
        taken = tuple(dict.fromkeys(self.accesses))
        self.accesses.clear()
        return taken


StepNumber = int | CapturedStep
"""A step's number, or its substitute while a graph is captured."""


class SharedBuffers:
    """Buffers in shared memory and the log of their accesses.

    Every operation of a subclass is device work: it belongs into the worker's stream, or into a graph.
    """

    def __init__(
        self, buffers: Mapping[BufferName, torch.Tensor], stamps: BufferName, log: AccessLog, attachment: int
    ) -> None:
        """`stamps`: the buffer with the times of a worker's own work. `attachment`: 0 for the results."""
        self.attachment = attachment
        """The number of the attachment; 0 for the results."""
        self._buffers = buffers
        self._stamps = stamps
        self._log = log
        self._ring = len(buffers[stamps])
        # Views made once, so that a step only writes. A draft has stamps of two parts, verify of one.
        self._stamp_parts = buffers[stamps].view(self._ring, -1, 2)
        self._stamp_rows = [[(part[0], part[1]) for part in row.unbind()] for row in self._stamp_parts.unbind()]

    def stamps(self, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The places for the stamps of start and end of a part of the worker's own work in `step`: two [] int64."""
        return self._stamp_rows[step % self._ring][part]

    def stamp_columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the first part's stamps in all rows of the ring: two [ring] int64."""
        return self._stamp_parts[:, 0, 0], self._stamp_parts[:, 0, 1]

    def log_stamps(self, step: int, part: int) -> None:
        """Logs that the stamps of a part of `step` were written. In the log each part has a row."""
        row = step % self._ring * len(self._stamp_rows[0]) + part
        self.access(self._stamps, [row], step, is_write=True)

    def buffer(self, name: BufferName) -> torch.Tensor:
        """Returns a buffer, for accesses that are logged elsewhere."""
        return self._buffers[name]

    def log_replay(self, accesses: Iterable[CapturedAccess], step: int, slots: Sequence[int]) -> None:
        """Logs the accesses of a graph that is replayed for `step` and these slots."""
        if self._log.is_enabled:
            for name, is_write in accesses:
                self.access(name, slots if name in SLOT_BUFFERS else [step % self._ring], step, is_write=is_write)

    def access(self, name: BufferName, rows: Sequence[int], step: int, *, is_write: bool) -> torch.Tensor:
        """Returns a buffer of which these rows are read or written, as is logged."""
        if self._log.is_enabled:
            self._log.access(name, rows, is_write=is_write, step=step, attachment=self.attachment)
        return self._buffers[name]

    def _slot_read(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        self._declare(name, rows, step, is_write=False)
        return self._buffers[name].index_select(0, rows)

    def _to_write(self, name: BufferName, rows: Sequence[int], step: int) -> torch.Tensor:
        return self.access(name, rows, step, is_write=True)

    def _declare(self, name: BufferName, rows: torch.Tensor, step: StepNumber, *, is_write: bool) -> None:
        if isinstance(step, CapturedStep):
            step.accesses.append(CapturedAccess(name, is_write))
        elif self._log.is_enabled:
            self.access(name, rows.tolist(), step, is_write=is_write)


def stamp_start(step: StepNumber) -> None:
    """Stream work where the device is the host: the start of a captured step's own work."""
    if isinstance(step, CapturedStep) and step.start is not None:
        step.start.stamp()


def stamp_end(step: StepNumber) -> None:
    """As `stamp_start`, of its end."""
    if isinstance(step, CapturedStep) and step.end is not None:
        step.end.stamp()
