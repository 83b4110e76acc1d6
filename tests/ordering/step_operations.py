"""The operations of the streams in a planned step, laid out as its commands declare them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.worker.access_log import LogOp, StreamName
from slipstream.common.worker.layout import ring_rows
from slipstream.common.worker.step import FenceName, FenceOps, FencePoint, Role, StepKind
from slipstream.scheduler.core.plan import catch_up
from slipstream.scheduler.records import OrderedStep
from tests.ordering.accesses import BufferGroup, Phase, Rows, declared_accesses
from tests.ordering.checker import Operation

if TYPE_CHECKING:
    from slipstream.scheduler.records import DraftTraits, PlannedStep
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
    """Lays out what the streams do for a command that brings a draft known tokens."""
    layout = _Layout(OrderedStep(number, StepKind.CATCH_UP, 0), draft, run_ahead, attachment)
    draft_lane = layout.worker(StreamName.DRAFT, catch_up(number), _DRAFT_PHASES)
    return draft_lane, (), (layout.send(Role.DRAFT),)


@cache
def step_operations(
    command: OrderedStep, planned: PlannedStep, draft: DraftTraits, run_ahead: int, attachment: int = ATTACHMENT
) -> StepOperations:
    """Lays out everything that the streams do in a step, as the commands declare it.

    `attachment`: the number of the draft's, whose memory and fences are apart from those of every other one.
    """
    layout = _Layout(command, draft, run_ahead, attachment)
    reads_result = FenceOps((FencePoint(FenceName.VERIFY_PUBLISH, command.step),))
    sends = [layout.send(Role.VERIFY)]
    if planned.draft is not None:
        sends.insert(0, layout.send(Role.DRAFT, command.drafted))
    if planned.draft_prompts is not None:
        sends.append(layout.send(Role.DRAFT))
    return StepOperations(
        sends=tuple(sends),
        draft=(
            *(layout.worker(StreamName.DRAFT, planned.draft, _DRAFT_PHASES, command.drafted) if planned.draft else ()),
            *(layout.worker(StreamName.DRAFT, prompts, _TAKE_IN_PHASES) if (prompts := planned.draft_prompts) else ()),
        ),
        verify=layout.worker(StreamName.VERIFY, planned.verify, _VERIFY_PHASES),
        consume=(*layout.waits(StreamName.SCHEDULER, reads_result), *layout.accesses(Phase.CONSUME)),
        consume_next=layout.stamps(),
    )


_DRAFT_PHASES = ((Phase.DRAFT, FenceName.DRAFT_DONE),)
_TAKE_IN_PHASES = ((Phase.TAKE_IN, FenceName.DRAFT_DONE),)
_VERIFY_PHASES = (
    (Phase.COPY_IN, None),
    (Phase.PUBLISH, FenceName.VERIFY_PUBLISH),
    (Phase.STASH, FenceName.VERIFY_STASH),
)


class _Layout:
    """The operations of one step."""

    def __init__(self, command: OrderedStep, draft: DraftTraits, run_ahead: int, attachment: int) -> None:
        self._attachment = attachment
        self._step = command.step
        self._draft = draft
        self._declared = declared_accesses(command.kind, draft, is_mixed=bool(command.prompts))
        ring, drafted = ring_rows(run_ahead), command.drafted
        self._rows = {
            Rows.SLOTS: _slots(command.rows | command.prompts),
            Rows.DECODING: _slots(command.rows),
            Rows.RING: (command.step % ring,),
            Rows.DRAFTED: (drafted % ring,),
            Rows.LAST_TWO: tuple(sorted({(drafted - 1) % ring, drafted % ring})),
            Rows.SPARE: ((command.step + 1) % ring,),
            Rows.WHOLE: (0,),
        }

    def worker(
        self,
        stream: StreamName,
        ops: FenceOps,
        phases: tuple[tuple[Phase, FenceName | None], ...],
        number: int | None = None,
    ) -> tuple[Operation, ...]:
        """A worker's command: waits, then each phase and the signal that ends it. `number`: None is the step's."""
        epoch = self._attachment if stream is StreamName.DRAFT else 0
        received = Operation(LogOp.RECV, stream, self._step if number is None else number, epoch)
        laid_out = [received, *self.waits(stream, ops)]
        values = {point.fence: point.value for point in ops.signals}
        for phase, fence in phases:
            laid_out.extend(self.accesses(phase))
            if fence in values:
                laid_out.append(self._fence_op(LogOp.SIGNAL, stream, fence, values[fence]))
        return tuple(laid_out)

    def send(self, role: Role, number: int | None = None) -> Operation:
        """The scheduler sends a command. `number`: None is the step's."""
        epoch = self._attachment if role is Role.DRAFT else 0
        return Operation(LogOp.SEND, StreamName.SCHEDULER, self._step if number is None else number, epoch, role=role)

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
        """The reads of the stamps; in the draft's own memory behind a poll of its fence."""
        laid_out: list[Operation] = []
        for access in self._declared:
            if access.phase is Phase.CONSUME_NEXT:
                if access.group is BufferGroup.LATE_STAMPS:
                    fence = FenceName.DRAFT_DONE
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
        epoch = self._attachment if access.group.is_in_region else 0
        return [Operation(op, stream, self._step, epoch, buffer=buffer, rows=rows) for buffer in buffers]

    def _fence_op(self, op: LogOp, stream: StreamName, fence: FenceName, value: int) -> Operation:
        epoch = 0 if fence is FenceName.VERIFY_PUBLISH else self._attachment
        return Operation(op, stream, self._step, epoch, fence=fence, value=value)


def _slots(mask: int) -> tuple[int, ...]:
    return tuple(row for row in range(mask.bit_length()) if mask >> row & 1)
