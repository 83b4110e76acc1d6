"""The plan and the checker run side by side: every step that is planned is carried out and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from slipstream.common.access_log import LogOp
from slipstream.common.step import StepKind
from slipstream.scheduler.ordering.checker import Checker, run
from slipstream.scheduler.ordering.halves import DRAFT, SCHEDULER, VERIFY
from slipstream.scheduler.ordering.operations import Operation, step_operations
from slipstream.scheduler.ordering.plan import consume, initial_state, plan_step, with_draft

if TYPE_CHECKING:
    from slipstream.scheduler.ordering.accesses import DraftTraits
    from slipstream.scheduler.ordering.checker import Race, Stuck
    from slipstream.scheduler.ordering.operations import StepOperations
    from slipstream.scheduler.ordering.plan import OrderedStep, PlannedStep

NUM_LANES = 3

Alteration = Callable[[StepKind, Operation], Operation | None]
"""What is carried out in place of an operation of a step of that kind; None for nothing."""


class Model:
    """A run of the three streams, as far as it is planned.

    The devices are as fast as they can be: a command is done when it is sent. That takes no race away,
    since the checker goes by what orders two accesses and not by when they happened, and it shows that
    no command waits for one that is not sent yet.
    """

    def __init__(self, draft: DraftTraits, run_ahead: int, *, alter: Alteration | None = None) -> None:
        """`alter`: makes a hole in what was planned, to see what becomes of it."""
        self.state = initial_state(draft, run_ahead)
        self.checker = Checker(NUM_LANES, trusts_polls=False)
        self.stuck: list[Stuck] = []
        self._alter = alter
        # Of the steps that are not consumed, and of the last that is.
        self._steps: dict[int, tuple[StepKind, StepOperations]] = {}

    def copy(self, *, alter: Alteration | None = None) -> Model:
        """An independent model in the same state, altered from here on."""
        twin = Model.__new__(Model)
        twin.state = self.state
        twin.checker = self.checker.copy()
        twin.stuck = self.stuck.copy()
        twin._alter = alter or self._alter
        twin._steps = self._steps.copy()
        return twin

    @property
    def problems(self) -> list[Race | Stuck]:
        """Everything that is wrong so far."""
        return [*self.checker.races, *self.stuck]

    def send(self, command: OrderedStep) -> PlannedStep:
        """Plans the step, sends its commands, and carries them out."""
        planned, self.state = plan_step(self.state, command)
        operations = step_operations(command, planned, self.state.draft, self.state.run_ahead)
        self._steps[command.step] = command.kind, operations
        self._carry_out(command.kind, {SCHEDULER: operations.sends})
        self._carry_out(command.kind, {DRAFT: operations.draft, VERIFY: operations.verify})
        return planned

    def consume(self) -> None:
        """The scheduler consumes the oldest step that it has not consumed."""
        step = self.state.consumed + 1
        self.state = consume(self.state, step)
        kind, operations = self._steps[step]
        self._carry_out(kind, {SCHEDULER: operations.consume})
        if step - 1 in self._steps:
            kind, operations = self._steps.pop(step - 1)
            self._carry_out(kind, {SCHEDULER: operations.consume_next})

    def change_draft(self, draft: DraftTraits) -> None:
        """Draft is lost, or another one joins."""
        self.state = with_draft(self.state, draft)
        self.checker.restart(DRAFT)

    def _carry_out(self, kind: StepKind, operations: dict[int, tuple[Operation, ...]]) -> None:
        lanes = [self._altered(kind, operations.get(lane, ())) for lane in range(NUM_LANES)]
        self.stuck.extend(run(self.checker, lanes))

    def _altered(self, kind: StepKind, operations: Iterable[Operation]) -> Iterator[Operation]:
        if self._alter is None:
            return iter(operations)
        altered = (self._alter(kind, operation) for operation in operations)
        return (operation for operation in altered if operation is not None)


def needless_waits(before: Model, act: Callable[[Model], object]) -> list[Operation]:
    """The waits of `act` that a weaker one, or none, could stand in for: without a race in what `act` does."""
    waits: list[Operation] = []

    def note(_kind: StepKind, operation: Operation) -> Operation:
        if operation.op is LogOp.WAIT:
            waits.append(operation)
        return operation

    act(before.copy(alter=note))
    return [wait for wait in waits if not _races(before.copy(alter=_weakened(before.checker, wait)), act)]


def _weakened(checker: Checker, wait: Operation) -> Alteration:
    assert wait.fence is not None, "a wait names the fence"
    value = checker.signalled_before(wait.epoch, wait.fence, wait.value)
    weaker = None if value is None else wait._replace(value=value)
    return lambda _kind, operation: weaker if operation == wait else operation


def _races(model: Model, act: Callable[[Model], object]) -> bool:
    act(model)
    return bool(model.checker.races)
