"""The operations of the streams in a planned step, laid out as its commands declare them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.events import LogOp, StreamName
from slipstream.common.wire.layout import ring_rows
from slipstream.common.wire.step import FenceName, FenceOps, FenceWait, Role
from slipstream.scheduler.plan import catch_up
from tests.ordering.accesses import BufferGroup, Command, Phase, declared_accesses
from tests.ordering.checker import Operation
from tests.ordering.parts import ROWS_ORDER, row_masks

if TYPE_CHECKING:
    from slipstream.common.wire.step import FencePoint
    from slipstream.scheduler.records import DraftTraits
    from tests.ordering.accesses import Access


ATTACHMENT = 1000
"""Number of an attachment where there is one."""

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


def catch_up_operations(number: int, draft: DraftTraits, run_ahead: int, attachment: int = ATTACHMENT) -> Lanes:
    """Lays out what the streams do for a command that brings a draft known tokens: as a language model's prefill."""
    layout = _Layout(Command(number, prompts=1), replace(draft, reads_hidden=False), run_ahead, attachment)
    draft_lane = layout.worker(StreamName.DRAFT, catch_up(number), (Phase.DRAFT_PREFILL,))
    return draft_lane, (), (layout.send(Role.DRAFT),)


@cache
def step_operations(
    command: Command,
    planned: tuple[FenceOps | None, FenceOps],
    draft: DraftTraits,
    run_ahead: int,
    attachment: int = ATTACHMENT,
) -> StepOperations:
    """Lays out everything that the streams do in a step, as the commands declare it.

    `planned`: waits and signals of draft's command and of verify's. `attachment`: the number of the draft's, whose
    memory and fences are apart from those of every other one.
    """
    layout = _Layout(command, draft, run_ahead, attachment)
    reads_result = FenceOps((FenceWait(FenceName.VERIFY_PUBLISH, command.step),))
    for_draft, for_verify = planned
    return StepOperations(
        sends=tuple(layout.send(role) for role in Role if role is Role.VERIFY or for_draft is not None),
        draft=() if for_draft is None else layout.worker(StreamName.DRAFT, for_draft, _DRAFT_PHASES),
        verify=layout.worker(StreamName.VERIFY, for_verify, _VERIFY_PHASES),
        consume=(*layout.waits(Phase.CONSUME, reads_result), *layout.accesses(Phase.CONSUME)),
        consume_next=layout.stamps(),
    )


_DRAFT_PHASES = (Phase.DRAFT_DECODE, Phase.DRAFT_PREFILL)
_VERIFY_PHASES = (Phase.COPY_IN, Phase.LEAVE_STATES, Phase.PUBLISH, Phase.STASH)


class _Layout:
    """The operations of one step."""

    def __init__(self, command: Command, draft: DraftTraits, run_ahead: int, attachment: int) -> None:
        self._attachment = attachment
        self._step = command.step
        self._draft = draft
        self._declared = declared_accesses(command.form, draft)
        masks = row_masks(command, ring_rows(run_ahead))
        self._rows = {rows: _slots(mask) for rows, mask in zip(ROWS_ORDER, masks, strict=True)}

    def worker(self, stream: StreamName, ops: FenceOps, phases: tuple[Phase, ...]) -> tuple[Operation, ...]:
        """A worker's command: of each phase the waits, the accesses, and the signal that ends it."""
        epoch = self._attachment if stream is StreamName.DRAFT else 0
        laid_out = [Operation(LogOp.RECV, stream, self._step, epoch)]
        for phase in phases:
            laid_out += self.waits(phase, ops)
            laid_out += self.accesses(phase)
            laid_out += [
                self._fence_op(LogOp.SIGNAL, stream, point) for point in ops.signals if point.fence is phase.signal
            ]
        return tuple(laid_out)

    def send(self, role: Role) -> Operation:
        """The scheduler sends a command."""
        epoch = self._attachment if role is Role.DRAFT else 0
        return Operation(LogOp.SEND, StreamName.SCHEDULER, self._step, epoch, role=role)

    def waits(self, phase: Phase, ops: FenceOps) -> list[Operation]:
        """The waits before a phase."""
        return [self._fence_op(LogOp.WAIT, phase.stream, wait) for wait in ops.waits if wait.place is phase.place]

    def accesses(self, phase: Phase) -> list[Operation]:
        """The accesses of a phase, buffer by buffer."""
        return [
            operation
            for access in self._declared
            if access.phase is phase
            for operation in self._buffer_by_buffer(access)
        ]

    def stamps(self) -> tuple[Operation, ...]:
        """The reads of the stamps; in the draft's own memory after a poll of its fence."""
        laid_out: list[Operation] = []
        for access in self._declared:
            if access.phase is Phase.CONSUME_NEXT:
                if access.group is BufferGroup.LATE_STAMPS:
                    prefilled = FenceWait(FenceName.DRAFT_PREFILLED, self._step)
                    laid_out.append(self._fence_op(LogOp.POLL, StreamName.SCHEDULER, prefilled))
                laid_out.extend(self._buffer_by_buffer(access))
        return tuple(laid_out)

    def _buffer_by_buffer(self, access: Access) -> list[Operation]:
        op = LogOp.WRITE if access.is_write else LogOp.READ
        rows = self._rows[access.rows]
        if not rows:
            return []
        stream = access.phase.stream
        buffers = access.group.buffers(self._draft)
        epoch = self._attachment if access.group.is_in_region else 0
        return [Operation(op, stream, self._step, epoch, buffer=buffer, rows=rows) for buffer in buffers]

    def _fence_op(self, op: LogOp, stream: StreamName, point: FencePoint | FenceWait) -> Operation:
        epoch = 0 if point.fence is FenceName.VERIFY_PUBLISH else self._attachment
        return Operation(op, stream, self._step, epoch, fence=point.fence, value=point.value)


def _slots(mask: int) -> tuple[int, ...]:
    return tuple(row for row in range(mask.bit_length()) if mask >> row & 1)
