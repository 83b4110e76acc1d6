"""The plan and the checker run side by side: every step that is planned is carried out and checked."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.common.wire.step import FenceOps, FenceWait, WaitPlace
from slipstream.scheduler.plan import PlanState, consume, initial_state, plan_grammar, plan_step, with_draft
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import Command
from tests.ordering.checker import Operation, Race, Stuck, run
from tests.ordering.plan_checker import PlanChecker, Unwritten
from tests.ordering.step_operations import (
    ATTACHMENT,
    GRAMMAR_ATTACHMENT,
    Lanes,
    StepOperations,
    catch_up_operations,
    step_operations,
)

DRAFT, GRAMMAR, NUM_LANES = 0, 3, 4
LAST_PLACES = (WaitPlace.PREFILL_HIDDEN, WaitPlace.SAMPLING, WaitPlace.START)
"""The last place of waits in a command of draft, verify and the grammar worker."""

Planned = tuple[FenceOps | None, ...]
"""Waits and signals of the commands of draft, verify and the grammar worker."""

Alteration = Callable[[Command, Operation], Operation | None]
"""Returns the operation to carry out in place of one of a step; None for none."""


class Model:
    """A run of the four streams, as far as it is planned.

    The devices are as fast as they can be: a command is done when it is sent. That takes no race away,
    since the checker goes by what orders two accesses and not by when they happened, and it shows that
    no command waits for one that is not sent yet.
    """

    def __init__(self, draft: DraftTraits, run_ahead: int, *, alter: Alteration | None = None) -> None:
        """`alter`: makes a hole in what was planned, to see what becomes of it."""
        self.state = initial_state(draft, run_ahead)
        self.checker = PlanChecker(NUM_LANES)
        self.stuck: list[Stuck] = []
        self.attachment = ATTACHMENT
        """The draft's; each has memory and fences of its own."""
        self.grammar = GRAMMAR_ATTACHMENT
        """The grammar worker's."""
        self.last_sent: Command | None = None
        self._alter = alter
        # Of the steps that are not consumed, and of the last that is.
        self._steps: dict[int, tuple[Command, StepOperations]] = {}

    def copy(self, *, alter: Alteration | None = None) -> Model:
        """An independent model in the same state, altered from here on."""
        twin = Model.__new__(Model)
        twin.state = self.state
        twin.checker = self.checker.copy()
        twin.stuck = self.stuck.copy()
        twin.attachment = self.attachment
        twin.grammar = self.grammar
        twin.last_sent = self.last_sent
        twin._alter = alter or self._alter
        twin._steps = self._steps.copy()
        return twin

    @property
    def problems(self) -> list[Race | Unwritten | Stuck]:
        """Everything that is wrong so far."""
        return [*self.checker.races, *self.checker.unwritten, *self.stuck]

    @property
    def has_unconsumed(self) -> bool:
        """True if a step is sent and not consumed."""
        return self.state.consumed < self.state.step

    @property
    def unconsumed(self) -> list[int]:
        """The steps that are sent and not consumed, oldest first."""
        return [step for step in sorted(self._steps) if step > self.state.consumed]

    def send(self, command: Command) -> tuple[FenceOps | None, FenceOps, FenceOps | None]:
        """Plans the step, sends its commands, and carries them out.

        Returns what the commands of draft, verify and the grammar worker were told.
        """
        draft, verify, grammar, self.state = plan_all(self.state, command)
        operations = self._operations(command, (draft, verify, grammar))
        self._steps[command.step] = command, operations
        self._carry_out(command, operations.send_lanes)
        self.last_sent = command
        return draft, verify, grammar

    def early_waits(self, command: Command) -> list[FenceWait]:
        """The waits of a step, if it is sent now, that could stand at the next place of their command."""
        *planned, _ = plan_all(self.state, command)
        waits = [(worker, wait) for worker, ops in enumerate(planned) if ops is not None for wait in ops.waits]
        return [
            wait
            for worker, wait in waits
            if wait.place < LAST_PLACES[worker] and not self._has_race_with_later(command, planned, worker, wait)
        ]

    def _has_race_with_later(
        self, command: Command, planned: list[FenceOps | None], worker: int, wait: FenceWait
    ) -> bool:
        later, ops = wait._replace(place=WaitPlace(wait.place + 1)), planned[worker]
        assert ops is not None, "it has a wait"
        moved = FenceOps(tuple(later if other is wait else other for other in ops.waits), ops.signals)
        twin = self.checker.copy()
        run(twin, self._operations(command, (*planned[:worker], moved, *planned[worker + 1 :])).send_lanes)
        return bool(twin.races)

    def _operations(self, command: Command, planned: Planned) -> StepOperations:
        state = self.state
        return step_operations(
            command, planned, state.draft, state.run_ahead, state.consumed, self.attachment, self.grammar
        )

    def consume(self) -> None:
        """The scheduler consumes the oldest step that it has not consumed."""
        step = self.unconsumed[0]
        before = self.state.consumed
        self.state = consume(self.state, step)
        command, operations = self._steps[step]
        self._carry_out(command, ((), (), operations.consume, ()))
        if before in self._steps:
            command, operations = self._steps.pop(before)
            self._carry_out(command, ((), (), operations.consume_next, ()))

    def change_draft(self, draft: DraftTraits) -> None:
        """Draft is lost, or another one joins, which catches up with what it has missed."""
        self.state = with_draft(self.state, draft)
        self.checker.restart(DRAFT)
        self.attachment += 1
        if draft.is_present and self.state.step:
            number = self.state.step
            lanes = catch_up_operations(number, draft, self.state.run_ahead, self.attachment)
            self._carry_out(Command(number), lanes)

    def change_grammar(self) -> None:
        """The grammar worker is lost, and another one joins."""
        self.checker.restart(GRAMMAR)
        self.grammar -= 1

    def operations(self, step: int) -> StepOperations:
        """The operations of a step that is not consumed."""
        _, operations = self._steps[step]
        return operations

    def _carry_out(self, command: Command, lanes: Lanes) -> None:
        if self._alter is not None:
            lanes = _altered(command, lanes, self._alter)
        self.stuck.extend(run(self.checker, lanes))


def _altered(command: Command, lanes: Lanes, alter: Alteration) -> Lanes:
    return tuple(
        tuple(altered for operation in lane if (altered := alter(command, operation)) is not None) for lane in lanes
    )


def plan_all(state: PlanState, command: Command) -> tuple[FenceOps | None, FenceOps, FenceOps | None, PlanState]:
    """The plan of all commands of a step: draft's, verify's, the grammar worker's; and the state after it."""
    grammar = plan_grammar(state, command.step, copies=command.copies) if command.masked else None
    draft, verify, state = plan_step(
        state,
        *command[:4],
        is_drafted=command.is_drafted,
        is_masked=bool(command.masked),
        copies=command.copies,
    )
    return draft, verify, grammar, state
