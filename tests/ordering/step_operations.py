"""The operations of the streams in a planned step, laid out as its commands declare them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from slipstream.common.wire.events import LogOp, StreamName
from slipstream.common.wire.layout import ring_rows
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, Role
from slipstream.scheduler.plan import catch_up
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import Access, BufferGroup, Command, Phase, Rows, declared_accesses
from tests.ordering.checker import Operation

ATTACHMENT = 1000
"""Number of a draft's attachment where there is one."""
GRAMMAR_ATTACHMENT = -1000
"""Number of a grammar worker's first attachment; the next ones are below it."""

Lanes = tuple[tuple[Operation, ...], ...]
"""The operations of draft, verify, the scheduler and the grammar worker."""


class StepOperations(NamedTuple):
    """The operations of one step, each part in the order of its stream."""

    sends: tuple[Operation, ...]
    draft: tuple[Operation, ...]
    verify: tuple[Operation, ...]
    grammar: tuple[Operation, ...]
    consume: tuple[Operation, ...]
    """The scheduler's, when it consumes the step."""
    consume_next: tuple[Operation, ...]
    """The scheduler's, when it consumes the step after."""

    @property
    def send_lanes(self) -> Lanes:
        """The operations of the lanes when the step is sent."""
        return self.draft, self.verify, self.sends, self.grammar


def catch_up_operations(number: int, draft: DraftTraits, run_ahead: int, attachment: int = ATTACHMENT) -> Lanes:
    """Lays out what the streams do for a command that brings a draft known tokens: as a language model's prefill."""
    layout = _Layout(Command(number, prompts=1), replace(draft, reads_hidden=False), run_ahead, number - 1, attachment)
    draft_lane = layout.worker(StreamName.DRAFT, catch_up(number), (Phase.DRAFT_PREFILL,))
    return draft_lane, (), (layout.send(Role.DRAFT),), ()


@cache
def step_operations(
    command: Command,
    planned: tuple[FenceOps | None, FenceOps, FenceOps | None],
    draft: DraftTraits,
    run_ahead: int,
    consumed: int,
    attachment: int = ATTACHMENT,
    grammar: int = GRAMMAR_ATTACHMENT,
) -> StepOperations:
    """Lays out everything that the streams do in a step, as the commands declare it.

    `planned`: waits and signals of the commands of draft, verify and the grammar worker. `consumed`: the last step that
    was consumed before. `attachment`, `grammar`: the numbers of the draft's and the grammar worker's, whose memory and
    fences are apart from those of every other one.
    """
    layout = _Layout(command, draft, run_ahead, consumed, attachment, grammar)
    reads_result = FenceOps((FenceWait(FenceName.VERIFY_PUBLISH, command.step),))
    for_draft, for_verify, for_grammar = planned
    commands = zip((Role.DRAFT, Role.VERIFY, Role.GRAMMAR), planned, strict=True)
    return StepOperations(
        sends=tuple(layout.send(role) for role, ops in commands if ops is not None),
        draft=() if for_draft is None else layout.worker(StreamName.DRAFT, for_draft, _DRAFT_PHASES),
        verify=layout.worker(StreamName.VERIFY, for_verify, _VERIFY_PHASES),
        grammar=() if for_grammar is None else layout.worker(StreamName.GRAMMAR, for_grammar, (Phase.MASK,)),
        consume=(*layout.waits(Phase.CONSUME, reads_result), *layout.accesses(Phase.CONSUME)),
        consume_next=layout.stamps(),
    )


_DRAFT_PHASES = (Phase.DRAFT_DECODE, Phase.DRAFT_PREFILL)
_VERIFY_PHASES = (Phase.COPY_IN, Phase.COPY_OUT, Phase.LEAVE_STATES, Phase.PUBLISH, Phase.STASH)


_OF_GRAMMAR = (FenceName.VERIFY_COPIED, FenceName.GRAMMAR_READY)


class _Layout:
    """The operations of one step."""

    def __init__(
        self,
        command: Command,
        draft: DraftTraits,
        run_ahead: int,
        consumed: int,
        attachment: int,
        grammar: int = GRAMMAR_ATTACHMENT,
    ) -> None:
        self._attachment = attachment
        self._grammar = grammar
        self._step = command.step
        self._draft = draft
        self._declared = declared_accesses(command.form, draft)
        self._rows = _rows_of(command, ring_rows(run_ahead), consumed)

    def worker(self, stream: StreamName, ops: FenceOps, phases: tuple[Phase, ...]) -> tuple[Operation, ...]:
        """A worker's command: of each phase the waits, the accesses, and the signal that ends it."""
        epoch = self._epoch_of(Role(stream))
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
        return Operation(LogOp.SEND, StreamName.SCHEDULER, self._step, self._epoch_of(role), role=role)

    def _epoch_of(self, role: Role) -> int:
        return {Role.DRAFT: self._attachment, Role.VERIFY: 0, Role.GRAMMAR: self._grammar}[role]

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
        epoch = self._attachment if access.group.is_in_region else self._grammar if access.group.is_of_grammar else 0
        return [Operation(op, stream, self._step, epoch, buffer=buffer, rows=rows) for buffer in buffers]

    def _fence_op(self, op: LogOp, stream: StreamName, point: FencePoint | FenceWait) -> Operation:
        of_others = {FenceName.VERIFY_PUBLISH: 0} | dict.fromkeys(_OF_GRAMMAR, self._grammar)
        epoch = of_others.get(point.fence, self._attachment)
        return Operation(op, stream, self._step, epoch, fence=point.fence, value=point.value)


def _rows_of(command: Command, num_ring_rows: int, consumed: int) -> dict[Rows, tuple[int, ...]]:
    """The rows that a step touches. `consumed`: the last step consumed when it is sent."""
    before, row, after = (number % num_ring_rows for number in range(command.step - 1, command.step + 2))
    return {
        Rows.SLOTS: _slots(command.rows | command.prompts),
        Rows.KEPT: _slots(command.kept),
        Rows.RING: (row,),
        Rows.DECODE_PART: (2 * row,),
        Rows.PREFILL_PART: (2 * row + 1,),
        Rows.PREFILL_PART_BEFORE: (2 * before + 1,),
        Rows.UNCONSUMED: tuple(number % num_ring_rows for number in range(consumed + 1, command.step)),
        Rows.MASKED: _slots(command.masked),
        Rows.SPARE: (after,),
        Rows.WHOLE: (0,),
    }


def _slots(mask: int) -> tuple[int, ...]:
    return tuple(row for row in range(mask.bit_length()) if mask >> row & 1)
