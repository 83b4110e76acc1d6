"""The operations of the streams in a planned step, laid out as its commands declare them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.worker.access_log import LogOp, StreamName
from slipstream.common.worker.layout import ring_rows
from slipstream.common.worker.step import FenceName, Role
from tests.ordering.accesses import BufferGroup, Phase, Rows, declared_accesses, has_draft_half
from tests.ordering.checker import Operation

if TYPE_CHECKING:
    from slipstream.common.worker.step import FenceOps
    from slipstream.scheduler.core.plan import DraftTraits, OrderedStep, PlannedStep
    from tests.ordering.accesses import Access


Lanes = tuple[tuple[Operation, ...], tuple[Operation, ...], tuple[Operation, ...]]
"""The operations of draft, verify and the scheduler."""


class StepOperations(NamedTuple):
    """The operations of one step, each part in the order of its stream."""

    sends: tuple[Operation, ...]
    draft: tuple[Operation, ...]
    verify: tuple[Operation, ...]
    consume: tuple[Operation, ...]
    """The scheduler's, when it consumes the step."""
    consume_next: tuple[Operation, ...]
    """The scheduler's, when it consumes the step after."""

    @property
    def send_lanes(self) -> Lanes:
        """The operations of the lanes when the step is sent."""
        return self.draft, self.verify, self.sends


@cache
def step_operations(command: OrderedStep, planned: PlannedStep, draft: DraftTraits, run_ahead: int) -> StepOperations:
    """Lays out everything that the streams do in a step, as the commands declare it."""
    layout = _Layout(command, draft, run_ahead)
    roles = (Role.VERIFY,) if planned.draft is None else (Role.DRAFT, Role.VERIFY)
    return StepOperations(
        sends=tuple(Operation(LogOp.SEND, StreamName.SCHEDULER, command.step, role=role) for role in roles),
        draft=layout.worker(StreamName.DRAFT, planned.draft, _DRAFT_PHASES) if planned.draft else (),
        verify=layout.worker(StreamName.VERIFY, planned.verify, _VERIFY_PHASES),
        consume=(*layout.waits(StreamName.SCHEDULER, planned.copy), *layout.accesses(Phase.CONSUME)),
        consume_next=layout.stamps(),
    )


_DRAFT_PHASES = ((Phase.DRAFT, FenceName.DRAFT_DONE),)
_VERIFY_PHASES = (
    (Phase.COPY_IN, None),
    (Phase.PUBLISH, FenceName.VERIFY_PUBLISH),
    (Phase.STASH, FenceName.VERIFY_STASH),
)


class _Layout:
    """The operations of one step."""

    def __init__(self, command: OrderedStep, draft: DraftTraits, run_ahead: int) -> None:
        self._step = command.step
        self._draft = draft
        self._declared = declared_accesses(command.kind, draft)
        self._has_draft_half = has_draft_half(command.kind, draft)
        ring = ring_rows(run_ahead)
        self._rows = {
            Rows.SLOTS: tuple(row for row in range(command.rows.bit_length()) if command.rows >> row & 1),
            Rows.RING: (command.step % ring,),
            Rows.SPARE: ((command.step + 1) % ring,),
            Rows.WHOLE: (0,),
        }

    def worker(
        self, stream: StreamName, ops: FenceOps, phases: tuple[tuple[Phase, FenceName | None], ...]
    ) -> tuple[Operation, ...]:
        """A worker's command: waits, then each phase and the signal that ends it."""
        laid_out = [Operation(LogOp.RECV, stream, self._step), *self.waits(stream, ops)]
        values = {point.fence: point.value for point in ops.signals}
        for phase, fence in phases:
            laid_out.extend(self.accesses(phase))
            if fence in values:
                laid_out.append(self._fence_op(LogOp.SIGNAL, stream, fence, values[fence]))
        return tuple(laid_out)

    def waits(self, stream: StreamName, ops: FenceOps) -> list[Operation]:
        """The waits at the beginning of a command."""
        return [self._fence_op(LogOp.WAIT, stream, point.fence, point.value) for point in ops.waits]

    def accesses(self, phase: Phase) -> list[Operation]:
        """The accesses of a phase, buffer by buffer."""
        return [
            operation
            for access in self._declared
            if access.phase is phase
            for operation in self._buffer_by_buffer(access)
        ]

    def stamps(self) -> tuple[Operation, ...]:
        """The reads of the stamps, each behind the poll of the fence that its writer signals after them."""
        fences = {BufferGroup.VERIFY_STAMPS: FenceName.VERIFY_STASH, BufferGroup.DRAFT_STAMPS: FenceName.DRAFT_DONE}
        laid_out: list[Operation] = []
        for access in self._declared:
            if access.phase is Phase.CONSUME_NEXT:
                fence = fences[access.group]
                laid_out.append(self._fence_op(LogOp.POLL, StreamName.SCHEDULER, fence, self._step))
                laid_out.extend(self._buffer_by_buffer(access))
        return tuple(laid_out)

    def _buffer_by_buffer(self, access: Access) -> list[Operation]:
        op = LogOp.WRITE if access.is_write else LogOp.READ
        rows = self._rows[access.rows]
        if not rows:
            return []
        stream = access.phase.stream
        buffers = access.group.buffers(self._draft)
        return [Operation(op, stream, self._step, buffer=buffer, rows=rows) for buffer in buffers]

    def _fence_op(self, op: LogOp, stream: StreamName, fence: FenceName, value: int) -> Operation:
        return Operation(op, stream, self._step, fence=fence, value=value)
