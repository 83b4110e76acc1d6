"""The order of the steps as a table: what each command waits for and signals.

`plan_step` is a pure function over a small immutable state. Nothing else decides an order. `last` is the last step
that touched it; a wait that the stream's knowledge covers is left out.

    step                            draft waits for         draft signals   verify waits for        verify signals
    decode n                        stash >= last of slots  done = n        done >= n               publish, stash = n
    prefill n, draft reads hidden   stash >= n              done = n        done >= last reader     publish, stash = n
    prefill n, language-model draft                         done = n                                publish, stash = n
    mixed n: drafted decode,        stash >= last of slots  done = n-1      done >= n-1             publish, stash = n
             then the prefill       as in prefill n         done = n
    plain n                                                                                         publish, stash = n
    any n without a draft                                                                           publish = n
    catch-up, number n                                      done = n

A mixed step takes in prompts beside decoding. Where it is drafted it has two numbers and draft two commands, the first
of which drafts: its tokens are needed before verify's work, and the target's states of the prompts are there behind it.
One that drafts none is ordered alike, as draft reads the stash in it. Without a draft it is ordered as a prefill of all
its slots.

Stash and done are those of the draft's attachment, which has memory and fences of its own: nothing of an earlier draft
counts for the next one. It joins behind a plain step n-1 that stashes for it: then decode n is as after any other step.
A draft catches up outside the order of the steps, with tokens that are in the command.

The scheduler itself waits for publish >= n before it reads the result of step n. Fences cannot order its own reads
before the next writes of the same ring row: step n is planned once step n-R-1 is consumed, and not before.

`tests/ordering/` derives the same waits from the accesses that commands make to shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.common.errors import OrderingError
from slipstream.common.worker.step import FenceName, FenceOps, FencePoint, StepKind
from slipstream.scheduler.records import DraftTraits, OrderedStep, PlannedStep

_DONE, _PUBLISH, _STASH = FenceName.DRAFT_DONE, FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH


class PlanState(NamedTuple):
    """Everything that the plan of the next step depends on. Its size is bounded by the run-ahead."""

    draft: DraftTraits
    run_ahead: int
    step: int = 0
    """The last step planned."""
    consumed: int = 0
    """The last step that the scheduler consumed."""
    rows: tuple[tuple[int, int], ...] = ()
    """Number, and mask of the slots, of step `consumed` and those after it, oldest first. All steps stash for their
    slots; a step that is older has stashed before the publish of step `consumed`, which the scheduler has seen."""
    stash_known: int = 0
    """The last stash that draft's stream has waited for."""
    done_known: int = 0
    """The last `draft.done` that verify's stream has waited for."""
    hidden_read: int = 0
    """The last step in which draft read `prefill_hidden`."""
    stashed: int = 0
    """Mask of the slots that verify has stashed for since the draft is there."""


def initial_state(draft: DraftTraits, run_ahead: int) -> PlanState:
    """The state before the first step of an epoch."""
    return PlanState(draft, run_ahead)


def with_draft(state: PlanState, draft: DraftTraits) -> PlanState:
    """The state when draft has left or another one has joined.

    The other one has waited for nothing and read nothing; its fence was never waited for, nor anything stashed for it.
    """
    return state._replace(draft=draft, stash_known=0, done_known=0, hidden_read=0, stashed=0)


def catch_up(number: int) -> FenceOps:
    """Returns the waits and signals of a command that brings a draft tokens which the scheduler knows."""
    return FenceOps((), (FencePoint(_DONE, number),))


def plan_step(state: PlanState, command: OrderedStep) -> tuple[PlannedStep, PlanState]:
    """Returns the waits and signals of the next step's commands, and the state after it.

    Raises OrderingError when the step cannot be ordered now.
    """
    draft, run_ahead, _, consumed, rows, stash_known, done_known, hidden_read, stashed = state
    step, kind, slots, prompts = command
    drafted = command.drafted
    _check(state, command, drafted)
    takes_prompts = kind is StepKind.PREFILL or prompts != 0
    published, stash = FencePoint(_PUBLISH, step), FencePoint(_STASH, step)
    draft_commands: list[FenceOps] = []
    verify_waits: tuple[FencePoint, ...] = ()
    if kind is StepKind.DECODE:
        last, done = _last_stash(state, slots), FencePoint(_DONE, drafted)
        draft_commands.append(FenceOps((FencePoint(_STASH, last),) if last > stash_known else (), (done,)))
        verify_waits, stash_known, done_known = (done,), max(last, stash_known), done.value
    if takes_prompts and draft.is_present:
        draft_waits: tuple[FencePoint, ...] = ()
        if draft.reads_hidden:
            if hidden_read > done_known:
                verify_waits, done_known = (FencePoint(_DONE, hidden_read),), hidden_read
            draft_waits, stash_known, hidden_read = (stash,), step, step
        draft_commands.append(FenceOps(draft_waits, (FencePoint(_DONE, step),)))
    planned = PlannedStep(
        draft=draft_commands[0] if draft_commands else None,
        verify=FenceOps(verify_waits, (published, stash) if draft.is_present else (published,)),
        draft_prompts=draft_commands[1] if len(draft_commands) > 1 else None,
    )
    known = stash_known, done_known, hidden_read, stashed | slots | prompts if draft.is_present else 0
    return planned, PlanState(draft, run_ahead, step, consumed, (*rows, (step, slots | prompts)), *known)


def consume(state: PlanState, step: int) -> PlanState:
    """The state when the scheduler has consumed `step`: commands sent from now on know what it knows.

    Raises OrderingError unless `step` is the oldest one that is not consumed.
    """
    draft, run_ahead, last, consumed, rows, *known = state
    unconsumed = [row for row in rows if row[0] > consumed]
    if not unconsumed or step != unconsumed[0][0]:
        raise OrderingError(f"step {step} is consumed after step {consumed} of {last}")
    return PlanState(draft, run_ahead, last, step, tuple(unconsumed), *known)


def last_consumed(step: int, run_ahead: int) -> int:
    """Returns the step that must have been consumed before `step` is sent; 0 or less if there is none."""
    return step - run_ahead - 1


def _check(state: PlanState, command: OrderedStep, drafted: int) -> None:
    step, kind, slots, _ = command
    if drafted != state.step + 1:
        raise OrderingError(f"step {step} is planned after step {state.step}")
    if kind is StepKind.DECODE and not state.draft.is_present:
        raise OrderingError(f"step {step} is a {kind.name} step, and there is no draft")
    if kind is StepKind.DECODE and slots & ~state.stashed:
        raise OrderingError(
            f"step {step} is a {kind.name} step of slots that nothing was stashed for since draft joined"
        )
    before = last_consumed(step, state.run_ahead)
    if state.consumed < before:
        raise OrderingError(
            f"step {step} is planned before step {before} is consumed, whose row of the results it writes to; "
            f"consumed so far: {state.consumed}"
        )


def _last_stash(state: PlanState, slots: int) -> int:
    """The last step that stashed for one of these slots; 0 if that is known to the scheduler."""
    for step, rows in reversed(state.rows):
        if rows & slots:
            return step
    return 0
