"""The order of the steps as a table: what each command waits for and signals.

`plan_step` is a pure function over a small immutable state. Nothing else decides an order. `last` is the last step
that touched it; a wait that the stream's knowledge covers is left out.

    step                            draft waits for         draft signals   verify waits for        verify signals
    decode n                        stash >= last of slots  done = n        done >= n               publish, stash = n
    prefill n, draft reads hidden   stash >= n              done = n        done >= last reader     publish, stash = n
    prefill n, language-model draft                         done = n                                publish, stash = n
    plain n                                                                                         publish, stash = n
    any n without a draft                                                                           publish = n
    catch-up, number n                                      done = n

Stash and done are those of the draft's attachment, which has memory and fences of its own: nothing of an earlier draft
counts for the next one. It joins behind a plain step n-1 that stashes for it: then decode n is as after any other step.
A draft catches up outside the order of the steps, with tokens that are in the command.

The scheduler's copy of the result of step n waits for publish >= n. Fences cannot order the scheduler's own reads
before the next writes of the same ring row: step n is planned once step n-R-1 is consumed, and not before.

`tests/ordering/` derives the same waits from the accesses that commands make to shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import OrderingError
from slipstream.common.worker.layout import last_consumed
from slipstream.common.worker.step import FenceName, FenceOps, FencePoint, StepKind

if TYPE_CHECKING:
    from collections.abc import Iterable

_DONE, _PUBLISH, _STASH = FenceName.DRAFT_DONE, FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """The properties of the attached draft that the order of the steps depends on."""

    is_present: bool
    reads_hidden: bool = False
    """True if it reads the target's hidden states."""


class OrderedStep(NamedTuple):
    """A step as the plan sees it."""

    step: int
    kind: StepKind
    rows: int
    """Mask of the slots that take part."""


class PlannedStep(NamedTuple):
    """The waits and signals of a step's commands."""

    draft: FenceOps | None
    """None where the step has no command for draft."""
    verify: FenceOps
    copy: FenceOps
    """For the scheduler's copy of the result."""


class PlanState(NamedTuple):
    """Everything that the plan of the next step depends on. Its size is bounded by the run-ahead."""

    draft: DraftTraits
    run_ahead: int
    step: int = 0
    """The last step planned."""
    consumed: int = 0
    """The last step that the scheduler consumed."""
    rows: tuple[int, ...] = ()
    """Masks of the slots of the steps after `consumed - 1`, oldest first. All steps stash for their slots; a step
    that is older has stashed before the publish of step `consumed`, which the scheduler has seen."""
    stash_known: int = 0
    """The last stash that draft's stream has waited for."""
    done_known: int = 0
    """The last `draft.done` that verify's stream has waited for."""
    hidden_read: int = 0
    """The last step in which draft read `prefill_hidden`."""
    stashed: int = 0
    """Mask of the slots that verify has stashed for since the draft is there."""


def mask_of(slots: Iterable[int]) -> int:
    """The slots as a mask of rows."""
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask


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
    step, kind, slots = command
    _check(state, command)
    has_draft = draft.is_present and kind is not StepKind.PLAIN
    done, published, stash = FencePoint(_DONE, step), FencePoint(_PUBLISH, step), FencePoint(_STASH, step)
    draft_waits: tuple[FencePoint, ...] = ()
    verify_waits: tuple[FencePoint, ...] = ()
    if kind is StepKind.DECODE:
        last = _last_stash(state, slots)
        if last > stash_known:
            draft_waits, stash_known = (FencePoint(_STASH, last),), last
        verify_waits, done_known = (done,), step
    elif has_draft and draft.reads_hidden:
        if hidden_read > done_known:
            verify_waits, done_known = (FencePoint(_DONE, hidden_read),), hidden_read
        draft_waits, stash_known, hidden_read = (stash,), step, step
    planned = PlannedStep(
        draft=FenceOps(draft_waits, (done,)) if has_draft else None,
        verify=FenceOps(verify_waits, (published, stash) if draft.is_present else (published,)),
        copy=FenceOps((published,)),
    )
    known = stash_known, done_known, hidden_read, stashed | slots if draft.is_present else 0
    return planned, PlanState(draft, run_ahead, step, consumed, (*rows, slots), *known)


def consume(state: PlanState, step: int) -> PlanState:
    """The state when the scheduler has consumed `step`: commands sent from now on know what it knows.

    Raises OrderingError unless `step` is the oldest one that is not consumed.
    """
    if step != state.consumed + 1 or step > state.step:
        raise OrderingError(f"step {step} is consumed after step {state.consumed} of {state.step}")
    draft, run_ahead, last, _, rows, *known = state
    return PlanState(draft, run_ahead, last, step, rows[step - last - 1 :], *known)


def _check(state: PlanState, command: OrderedStep) -> None:
    step, kind, slots = command
    if step != state.step + 1:
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
    for index in range(len(state.rows) - 1, -1, -1):
        if state.rows[index] & slots:
            return state.step - len(state.rows) + 1 + index
    return 0
