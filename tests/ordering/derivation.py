"""The plan as it follows from the accesses of the commands: the oracle of the table in `scheduler/plan.py`.

Derives the waits of a command from the accesses that the commands declare (`accesses.py`) and from what the
command's stream already knows, so that no wait is missing and none redundant.

A conflict with a read of the scheduler cannot be waited for on a device. Only the rule orders it that
step n is sent once step n-R-1 is consumed; a step that is planned too early is an OrderingError.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.common.errors import OrderingError
from slipstream.common.wire.layout import ring_rows
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import BufferGroup, Command
from tests.ordering.knowledge import (
    CONSUMED,
    NOTHING_KNOWN,
    GroupHistory,
    Known,
    Signal,
    join,
    latest,
    record,
    signal,
    without_implied,
)
from tests.ordering.parts import DRAFT, GRAMMAR, SCHEDULER, PlannedAccess, StepPart, parts_of, row_masks


class DerivedState(NamedTuple):
    """Everything that the plan of the next step depends on. Its size does not grow with the steps."""

    draft: DraftTraits
    run_ahead: int
    step: int
    """The last step planned."""
    knows: tuple[Known, Known, Known, Known]
    """The knowledge of draft, verify, the scheduler and the grammar worker."""
    histories: tuple[GroupHistory, ...]
    """By the number of the BufferGroup."""
    published: tuple[Signal, ...]
    """The publish signals of the steps that are not consumed yet, oldest first."""
    consumed: int = 0
    """The last step that the scheduler consumed."""
    stashed: int = 0
    """Mask of the slots that verify has stashed for since draft is there."""


def initial_state(draft: DraftTraits, run_ahead: int) -> DerivedState:
    """The state before the first step of an epoch."""
    knows = (NOTHING_KNOWN, NOTHING_KNOWN, NOTHING_KNOWN, NOTHING_KNOWN)
    nothing_done = (GroupHistory(),) * len(BufferGroup)
    return DerivedState(draft, run_ahead, 0, knows, nothing_done, ())


def with_draft(state: DerivedState, draft: DraftTraits) -> DerivedState:
    """The state when draft has left or another one has joined: it knows nothing, and its memory is its own."""
    histories = tuple(
        GroupHistory() if group.is_in_region else history
        for group, history in zip(BufferGroup, state.histories, strict=True)
    )
    state = _without(state, DRAFT, *_OF_DRAFT)
    return state._replace(draft=draft, histories=histories, stashed=0)


def with_grammar(state: DerivedState) -> DerivedState:
    """The state when another grammar worker has joined: it knows nothing, and its memory is its own."""
    histories = list(state.histories)
    histories[BufferGroup.COPIED_TOKENS] = histories[BufferGroup.MASKS] = GroupHistory()
    histories[BufferGroup.RESULTS_FOR_GRAMMAR] = GroupHistory(histories[BufferGroup.RESULTS_FOR_GRAMMAR].writes)
    state = _without(state, GRAMMAR, FenceName.VERIFY_COPIED, FenceName.GRAMMAR_READY)
    return state._replace(histories=tuple(histories))


_OF_DRAFT = (FenceName.DRAFT_PROPOSED, FenceName.DRAFT_PREFILLED, FenceName.VERIFY_STASH)


def _without(state: DerivedState, stream: int, *fences: FenceName) -> DerivedState:
    """The state in which a stream knows nothing, and no stream anything of these fences."""

    def others(known: Known) -> Known:
        return tuple(0 if counter in fences else value for counter, value in enumerate(known))

    draft, verify, scheduler, grammar = (
        NOTHING_KNOWN if number == stream else others(known) for number, known in enumerate(state.knows)
    )
    published = tuple(one._replace(known=others(one.known)) for one in state.published)
    return state._replace(knows=(draft, verify, scheduler, grammar), published=published)


def plan_step(state: DerivedState, command: Command) -> tuple[FenceOps | None, FenceOps, FenceOps | None, DerivedState]:
    """Returns the waits and signals of the commands of draft, verify and the grammar worker, and the state after them.

    Raises OrderingError when the step cannot be ordered now, naming the accesses that collide.
    """
    if command.step != state.step + 1:
        raise OrderingError(f"step {command.step} is planned after step {state.step}")
    if command.kept & ~command.rows or (command.is_drafted and not command.kept):
        raise OrderingError(f"step {command.step}: draft has no part for rows with draft tokens")
    if command.kept & ~state.stashed:
        raise OrderingError(f"step {command.step}: draft reads what was never stashed for it")
    planning = _Planning(state, command)
    draft, verify, reads_result, grammar = planning.fence_ops()
    assert reads_result == FenceOps((FenceWait(FenceName.VERIFY_PUBLISH, command.step),)), "as the scheduler does"
    return draft if draft.signals else None, verify, grammar if grammar.signals else None, planning.state_after()


def consume(state: DerivedState, step: int) -> DerivedState:
    """The state when the scheduler has consumed `step`: commands sent from now on know what it knows.

    Raises OrderingError unless `step` is the oldest one that is not consumed.
    """
    if not state.published or step != state.published[0].value:
        raise OrderingError(f"step {step} is consumed after step {state.consumed} of {state.step}")
    seen = join(state.knows[SCHEDULER], state.published[0].known)
    draft, verify, _, grammar = state.knows
    knows = (draft, verify, signal(seen, CONSUMED, step).known, grammar)
    return state._replace(knows=knows, published=state.published[1:], consumed=step)


class _Planning:
    """One step in the making."""

    __slots__ = ("_command", "_histories", "_knows", "_masks", "_published", "_state", "_unsignalled")

    def __init__(self, state: DerivedState, command: Command) -> None:
        self._state = state
        self._command = command
        self._masks = row_masks(command, ring_rows(state.run_ahead), state.consumed)
        self._knows = list(state.knows)
        self._histories = list(state.histories)
        self._published = state.published
        # Accesses after which their stream has signalled nothing yet.
        self._unsignalled: tuple[PlannedAccess, ...] = ()

    def fence_ops(self) -> list[FenceOps]:
        """Plans the parts, each knowing what those before it do; by the number of the stream."""
        ops = [FenceOps()] * len(self._knows)
        for part in parts_of(self._command.form, self._state.draft):
            known, waits = self._waits(part)
            self._unsignalled += part.accesses
            self._record(self._signals(part, known))
            before = ops[part.stream]
            ops[part.stream] = FenceOps(
                (*before.waits, *(FenceWait(FenceName(wait.counter), wait.value, part.place) for wait in waits)),
                (*before.signals, *(FencePoint(fence, self._command.step) for fence in part.signals)),
            )
        return ops

    def state_after(self) -> DerivedState:
        """The state when the step is planned."""
        state = self._state
        draft, verify, scheduler, grammar = self._knows
        return DerivedState(
            state.draft,
            state.run_ahead,
            self._command.step,
            (draft, verify, scheduler, grammar),
            tuple(self._histories),
            self._published,
            state.consumed,
            state.stashed | self._command.rows | self._command.prompts if state.draft.is_present else 0,
        )

    def _waits(self, part: StepPart) -> tuple[Known, list[Signal]]:
        # Everything is waited for at the start of the part, in one go. Returns what is known then, too.
        known = join(self._knows[part.stream], self._knows[SCHEDULER])
        missing: list[Signal] = []
        for access in part.accesses:
            if access.is_polled:
                continue
            history = self._histories[access.group]
            others = history.reads if access.is_write else history.writes
            last = latest(others, self._masks[access.rows])
            if last is None or last.value <= known[last.counter]:
                continue
            if last.counter == CONSUMED:
                raise OrderingError(self._too_early(access, last))
            missing.append(last)
        waits = without_implied(missing)
        for wait in waits:
            known = join(known, wait.known)
        return known, waits

    def _signals(self, part: StepPart, known: Known) -> dict[int, Signal]:
        signals: dict[int, Signal] = {}
        for fence in part.signals:
            signals[fence] = signal(known, fence, self._command.step)
            known = signals[fence].known
        if FenceName.VERIFY_PUBLISH in signals:
            self._published = (*self._published, signals[FenceName.VERIFY_PUBLISH])
        if part.stream != SCHEDULER:
            self._knows[part.stream] = known
        return signals

    def _record(self, signals: dict[int, Signal]) -> None:
        accesses, self._unsignalled = self._unsignalled, ()
        for access in accesses:
            if access.counter != CONSUMED and access.counter not in signals:
                self._unsignalled += (access,)
                continue
            after = signals.get(access.counter) or self._consumption(access)
            history = self._histories[access.group]
            rows = self._masks[access.rows]
            if access.is_write:
                history = GroupHistory(record(history.writes, rows, after, self._knows[SCHEDULER]), history.reads)
            else:
                history = GroupHistory(history.writes, record(history.reads, rows, after, self._knows[SCHEDULER]))
            self._histories[access.group] = history

    def _consumption(self, access: PlannedAccess) -> Signal:
        step = self._command.step + 1 if access.is_polled else self._command.step
        return Signal(CONSUMED, step, NOTHING_KNOWN)

    def _too_early(self, access: PlannedAccess, last: Signal) -> str:
        step, consumed = self._command.step, self._state.consumed
        reads = f"{BufferGroup(access.group).reader.value}'s read of the same row"
        return (
            f"{access.declared} in step {step} collides with {reads}, "
            f"which is over when step {last.value} is consumed; consumed so far: {consumed}"
        )
