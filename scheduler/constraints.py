"""The grammar worker beside the steps, on the loop's side: who may start, what it is sent, and when it is lost.

A sequence with a constraint starts once a grammar worker is attached and has compiled its grammar: no step waits
for that. When the grammar worker is lost or late, its word is released, and all sequences with a constraint give up
their slots as those that are preempted do: results of their steps under way are dropped, and they go on with the tokens
that they have once another grammar worker has their grammars. The other sequences wait for it once, at most for the
watchdog's time. The word is released again until no step under way waits for it, as a late write may set it back.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.common.errors import DeadlineExceededError, InternalError, SlipstreamError, UnavailableError
from slipstream.common.wire.layout import GRAMMAR_GIVEN_FENCES, GRAMMAR_OWN_FENCES, GrammarShape
from slipstream.common.wire.sequence import grammar_digest
from slipstream.common.wire.step import FenceName, GrammarRow, Role, StepCommand
from slipstream.common.wire.worker import OfferedRegion
from slipstream.scheduler.waiting_queue import MOST_HELD

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.interface import Arena, Device, Fence
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.step import FenceOps
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.batch import Batch
    from slipstream.scheduler.link import Link
    from slipstream.scheduler.observer import SentStep
    from slipstream.scheduler.records import Sequence, SlotLease, Step, StepResult

MOST_ASKED = 2 * MOST_HELD
"""Compilations that are known: more than sequences wait for at a time."""
MOST_LOST = 6
"""Grammar workers that may be lost in a row while a sequence runs, without a token of it: then it fails."""

TOKEN_S = 5e-6
"""Time that a worker may take for each token that a command brings it, beside the timeout: with sequences that go on
after a loss all their output arrives, perhaps of many at once. It takes less than a microsecond."""


class CompileState(enum.Enum):
    """The state of a compilation."""

    ASKED = "asked"
    OVER = "over"
    """The worker has answered."""
    DROPPED = "dropped"
    """No sequence waits for it."""


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar that a worker is asked to compile, before the first sequence with it starts."""

    grammar: str
    state: CompileState = CompileState.ASKED
    """Written by the listener; by the loop, too, for one that it forgets."""
    fault: SlipstreamError | None = None
    """Why the grammar cannot be compiled."""
    waiting: dict[tuple[int, int], Sequence] = field(default_factory=dict)
    """The sequences that wait for it, written by the loop; none once the listener is done with it."""

    def drop_if_unwanted(self) -> bool:
        """Drops it if all the sequences are over, as those are that were cancelled; returns whether it is dropped."""
        if all(sequence.is_over for sequence in list(self.waiting.values())):
            self.state = CompileState.DROPPED
        return self.state is CompileState.DROPPED


class GrammarState(enum.Enum):
    """The state of a grammar worker."""

    ACTIVE = "active"
    """Takes part in the steps."""
    LEAVING = "leaving"
    """Lost; steps under way refer to it."""
    LEFT = "left"
    """No step refers to it, so that it may be detached."""


class GrammarWorker:
    """A grammar worker that is attached beside an epoch of verify, with a number and memory of its own."""

    def __init__(
        self,
        number: int,
        link: Link,
        description: WorkerDescription,
        shape: GrammarShape,
        device: Device,
        *,
        epoch: int,
    ) -> None:
        """Takes the memory. `number`: new to both. `epoch`: verify's."""
        self.number = number
        self.description = description
        self.link = link
        self.state = GrammarState.ACTIVE
        self.last_step = 0
        """The last step of verify that refers to it."""
        self._own: Arena = device.create_arena(shape.own_specs(), GRAMMAR_OWN_FENCES, on_host=True)
        try:
            self._given: Arena = device.create_arena(shape.given_specs(), GRAMMAR_GIVEN_FENCES, on_host=True)
        except BaseException:
            self._own.close()
            raise
        own, given = self._own.manifest, self._given.manifest
        self.region = OfferedRegion(epoch=epoch, attachment=number, own=own, given=given)
        self.ready: Fence = self._own.fence(FenceName.GRAMMAR_READY)
        self.copied: Fence = self._given.fence(FenceName.VERIFY_COPIED)

    def seal(self) -> None:
        """Called once both sides have mapped the memory."""
        self._own.seal()
        self._given.seal()

    def close(self) -> None:
        """Gives the memory back. On a CPU a mapping keeps its own."""
        self._own.close()
        self._given.close()


class ConstraintsListener(Protocol):
    """Gets what becomes of grammar workers, on the loop's thread; must return at once."""

    def wants(self, worker: GrammarWorker, compilation: Compilation) -> None:
        """Called for a grammar that the worker is to compile."""
        ...

    def lost(self, worker: GrammarWorker, reason: str) -> None:
        """Called when it takes part in no further step."""
        ...

    def gone(self, worker: GrammarWorker) -> None:
        """Called when no step under way refers to it any more."""
        ...


class _Given(NamedTuple):
    """The part of a sequence that a grammar worker was sent."""

    worker: GrammarWorker
    lease: SlotLease
    num_tokens: int


class Constraints:
    """Belongs to the loop's thread, but for `offer` and `refuse`."""

    def __init__(
        self,
        batch: Batch,
        verify: Link,
        listener: ConstraintsListener,
        *,
        timeout_s: Callable[[], float],
        log: EventLog,
    ) -> None:
        """`timeout_s` returns the time that a step may wait for masks now."""
        self.active: GrammarWorker | None = None
        self.problem: SlipstreamError | None = None
        """Why no grammar worker can be attached, so that sequences are refused; None while one may arrive."""
        self._batch = batch
        self._verify = verify
        self._listener = listener
        self._consumed = 0
        self._timeout_s = timeout_s
        self._log = log
        self._offered: deque[GrammarWorker] = deque()
        self._leaving: tuple[GrammarWorker, ...] = ()
        self._asked: dict[str, Compilation] = {}
        """By grammar, those that the active worker was asked for, the last MOST_ASKED."""
        self._given: dict[int, _Given] = {}
        """By slot."""

    def offer(self, worker: GrammarWorker) -> None:
        """Has a worker take part. Any thread; wake the loop after it."""
        self.problem = None
        self._offered.append(worker)

    def refuse(self, problem: SlipstreamError) -> None:
        """Has sequences with a constraint refused until a worker is offered. Any thread; wake the loop after it."""
        self.problem = problem

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence must not start yet: its grammar is not compiled."""
        grammar, active = sequence.spec.grammar, self.active
        if not grammar or self.fault_of(sequence) is not None:
            return False
        if active is None:
            return True
        asked = self._asked.get(grammar)
        if asked is None or asked.state is CompileState.DROPPED:
            self._asked.pop(grammar, None)
            if len(self._asked) == MOST_ASKED:
                self._asked.pop(next(iter(self._asked))).state = CompileState.DROPPED
            self._asked[grammar] = asked = Compilation(grammar, waiting={sequence.key: sequence})
            self._listener.wants(active, asked)
        elif asked.state is CompileState.ASKED:
            asked.waiting[sequence.key] = sequence
        return asked.state is not CompileState.OVER

    def fault_of(self, sequence: Sequence) -> SlipstreamError | None:
        """Why a sequence cannot be run; None if it can, or may be later."""
        if not sequence.spec.grammar:
            return None
        if sequence.num_lost >= MOST_LOST:
            return InternalError(f"{MOST_LOST} grammar workers were lost while this sequence ran")
        if self.active is None:
            return self.problem
        asked = self._asked.get(sequence.spec.grammar)
        return None if asked is None else asked.fault

    def command(self, step: Step, ops: FenceOps, consumed: int) -> StepCommand:
        """Makes the active worker's command of a step. `consumed`: the last step that was."""
        assert self.active is not None, "a step with a constraint has a grammar worker"
        num_draft_tokens = dict(zip(step.decoded.slots, step.num_draft_tokens, strict=False))
        rows = tuple([self._row(self.active, slot, num_draft_tokens.get(slot, 0)) for slot in step.constrained])
        self.active.last_step = step.number
        return StepCommand(epoch=self.active.number, step=step.number, ops=ops, grammar_rows=rows, consumed=consumed)

    def send(self, command: StepCommand) -> None:
        """Sends the active worker a command that was made for it."""
        if self.active is not None and self.active.number == command.epoch:
            if self._log.is_enabled:
                self._log.send(Role.GRAMMAR, epoch=command.epoch, step=command.step)
            try:
                self.active.link.send(command)
            except SlipstreamError as error:
                self.lose(error)

    def lose(self, error: SlipstreamError, *, may_be_cause: bool = True) -> None:
        """Goes on without the active worker. `may_be_cause`: a sequence that runs, as masks may take too long."""
        worker, self.active = self.active, None
        if worker is None:
            return
        self._batch.preempt_constrained(may_be_cause=may_be_cause)
        self._given.clear()
        self._asked.clear()
        worker.state = GrammarState.LEAVING
        self._leaving = (*self._leaving, worker)
        self._release(worker)
        self._listener.lost(worker, str(error))
        self._forget()

    def check(self) -> None:
        """Takes in a worker that was offered, and looks at the link of the active one."""
        while self._offered:
            self.lose(UnavailableError("another grammar worker has arrived"), may_be_cause=False)
            self.active = self._offered.popleft()
        if self.active is not None and (failure := self.active.link.failure) is not None:
            self.lose(UnavailableError(str(failure)))

    def watch(self, sent: SentStep, since: float) -> None:
        """Looks at the workers while the loop waits for a step. `since`: when it began to wait for nothing else."""
        self.check()
        for worker in self._leaving:
            self._release(worker)
        active, number = self.active, sent.step.number
        if active is None or active.number != sent.grammar or active.ready.poll() >= number:
            return
        now = time.monotonic()
        if sent.step.copies_tokens and active.copied.poll() < number:
            # It waits for verify, which may wait for its draft.
            sent.masks_since = now
        waited_s = now - max(since, sent.masks_since)
        if waited_s > self._timeout_s() + TOKEN_S * sent.num_brought:
            reason = f"the grammar worker had no masks for step {number} within {waited_s:.3f} s"
            self.lose(DeadlineExceededError(reason))

    def consumed(self, sent: SentStep, result: StepResult) -> None:
        """Notes that a step was consumed, before its result is taken in: the worker is lost if it had no masks."""
        self._consumed = number = sent.step.number
        if result.unmasked and self.active is not None and self.active.number == sent.grammar:
            self.lose(InternalError(f"the grammar worker signalled step {number} without its masks"))
        self._forget()

    def end(self) -> None:
        """Releases all workers, as the epoch is over."""
        for worker in (*self._leaving, *([] if self.active is None else [self.active])):
            self._release(worker)
            worker.state = GrammarState.LEFT

    def _forget(self) -> None:
        """Has the workers detached that no step under way refers to."""
        for worker in self._leaving:
            if worker.last_step <= self._consumed:
                self._leaving = tuple(one for one in self._leaving if one is not worker)
                worker.state = GrammarState.LEFT
                self._listener.gone(worker)

    def _release(self, worker: GrammarWorker) -> None:
        if worker.last_step:
            self._verify.release_draft(worker.region.epoch, worker.number)
            worker.ready.release(worker.last_step)
            if self._log.is_enabled:
                ready, epoch = FenceName.GRAMMAR_READY, worker.region.epoch
                self._log.release(ready, worker.last_step, epoch=epoch, attachment=worker.number)

    def _row(self, worker: GrammarWorker, slot: int, num_draft_tokens: int) -> GrammarRow:
        sequence, committed = self._batch.running(slot), self._batch.committed
        first = len(sequence.spec.prompt)
        given = self._given.get(slot)
        is_known = given is not None and given.worker is worker and given.lease is sequence.lease
        num_known = given.num_tokens if given is not None and is_known else 0
        num_tokens = committed.num_tokens(slot) - first
        self._given[slot] = _Given(worker, sequence.lease, num_tokens)
        return GrammarRow(
            slot=slot,
            digest=b"" if is_known else grammar_digest(sequence.spec.grammar),
            num_known=num_known,
            tokens=committed.read(slot, first + num_known, first + num_tokens),
            num_draft_tokens=num_draft_tokens,
        )
