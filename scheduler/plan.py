"""The order of the steps as a table: what each command waits for and signals, and where in its work.

`plan_step` is a pure function over a small immutable state. Nothing else decides an order. A step is rows that decode
and chunks of prompts. `last` is the last step that touched it; a wait that the stream's knowledge covers is left out.

    command of step n                            waits                                          signals
    draft, decode part                           stash >= last of its rows, at the start        proposed = n
    draft, prefill part, reads hidden states     stash >= n, before it                          prefilled = n
    draft, prefill part, language model                                                         prefilled = n
    verify, with draft tokens                    proposed >= n, at the start
    verify, chunks for a draft that reads        prefilled >= last step whose chunks it read,
        hidden states                                before it writes prefill_hidden
    verify, no draft tokens, but draft has a     proposed >= n, before it samples
        decode part
    verify, a constrained row has draft tokens                                                  copied = n
    verify, a row has a constraint               grammar.ready >= n, before it samples
    verify, any                                                                                 publish, stash = n
    grammar worker                               copied >= n, or without it publish >= n-1      grammar.ready = n
    catch-up, number n                                                                          prefilled = n

Draft's decode part has all rows that it keeps, those without draft tokens, too: else what was stashed for them is lost,
since the step stashes anew. Its prefill part has the chunks. Without a draft verify signals publish alone.

Copied is signalled after publish of n-1, so one of both is enough for the grammar worker. It reads the results of the
steps that are not consumed when its command is sent, and before n's are written its reads are over, since verify waits
for it in n. Copied and grammar.ready are those of its attachment: no stream knows of another one's.

Stash, proposed and prefilled are those of the draft's attachment, which has memory and fences of its own: nothing of an
earlier draft counts for the next one. It joins after a step n-1 without it that stashes for it: then step n is as after
any other. A draft catches up outside the order of the steps, with tokens that are in the command.

The scheduler itself waits for publish >= n before it reads the result of step n. Fences cannot order its own reads
before the next writes of the same ring row: step n is planned once step n-R-1 is consumed, and not before.

`tests/ordering/` checks these waits against the accesses that commands make to shared memory: none is missing, none
needless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import OrderingError
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, WaitPlace

if TYPE_CHECKING:
    from slipstream.scheduler.records import DraftTraits

_PROPOSED, _PREFILLED = FenceName.DRAFT_PROPOSED, FenceName.DRAFT_PREFILLED
_PUBLISH, _STASH = FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH
_COPIED, _READY = FenceName.VERIFY_COPIED, FenceName.GRAMMAR_READY


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
    prefilled_known: int = 0
    """Draft's prefill parts up to this step are known to verify's stream, from a wait for them or for a later part."""
    hidden_read: int = 0
    """The last step in which draft read `prefill_hidden`."""
    stashed: int = 0
    """Mask of the slots that verify has stashed for since the draft is there."""


def initial_state(draft: DraftTraits, run_ahead: int) -> PlanState:
    """The state before the first step of an epoch."""
    return PlanState(draft, run_ahead)


def with_draft(state: PlanState, draft: DraftTraits) -> PlanState:
    """The state when draft has left or another one has joined.

    The other one has waited for nothing and read nothing; its fences were never waited for, nor anything stashed for
    it.
    """
    return state._replace(draft=draft, stash_known=0, prefilled_known=0, hidden_read=0, stashed=0)


def catch_up(number: int) -> FenceOps:
    """Returns the waits and signals of a command that brings a draft tokens which the scheduler knows."""
    return FenceOps((), (FencePoint(_PREFILLED, number),))


def plan_grammar(state: PlanState, step: int, *, copies: bool) -> FenceOps:
    """Returns the waits and signals of the grammar worker's command of the next step, before `plan_step`.

    `copies`: True if a row with a constraint has draft tokens.
    """
    wait = FenceWait(_COPIED, step) if copies else FenceWait(_PUBLISH, step - 1)
    is_known = not copies and state.consumed >= step - 1
    return FenceOps(() if is_known else (wait,), (FencePoint(_READY, step),))


def plan_step(
    state: PlanState,
    step: int,
    rows: int,
    prompts: int = 0,
    kept: int = 0,
    *,
    is_drafted: bool = False,
    is_masked: bool = False,
    copies: bool = False,
) -> tuple[FenceOps | None, FenceOps, PlanState]:
    """Returns the waits and signals of the commands of the next step, draft's (if it has one) and verify's.

    And the state after it. `rows`, `prompts`, `kept`: masks of the slots that decode, that take in chunks, and that
    draft's decode part has. `is_drafted`: True if any of these has draft tokens.
    `is_masked`: True if a row has a constraint, `copies`: if such a row has draft tokens.
    Raises OrderingError when the step cannot be ordered now.
    """
    draft, run_ahead, _, consumed, steps, stash_known, prefilled_known, hidden_read, stashed = state
    _check(state, step, rows, kept, is_drafted=is_drafted)
    published, stash, slots = FencePoint(_PUBLISH, step), FencePoint(_STASH, step), rows | prompts
    mask_waits = (FenceWait(_READY, step, WaitPlace.SAMPLING),) if is_masked else ()
    if not draft.is_present:
        after = PlanState(draft, run_ahead, step, consumed, (*steps, (step, slots)))
        return None, FenceOps(mask_waits, (published,)), after
    draft_waits: list[FenceWait] = []
    draft_signals: list[FencePoint] = []
    verify_waits: list[FenceWait] = []
    if kept:
        last = _last_stash(state, kept)
        if last > stash_known:
            draft_waits.append(FenceWait(_STASH, last))
            stash_known = last
        draft_signals.append(FencePoint(_PROPOSED, step))
    if is_drafted:
        verify_waits.append(FenceWait(_PROPOSED, step))
        prefilled_known = step - 1
    if prompts:
        if draft.reads_hidden:
            if hidden_read > prefilled_known:
                verify_waits.append(FenceWait(_PREFILLED, hidden_read, WaitPlace.PREFILL_HIDDEN))
                prefilled_known = hidden_read
            draft_waits.append(FenceWait(_STASH, step, WaitPlace.PREFILL_HIDDEN))
            stash_known = hidden_read = step
        draft_signals.append(FencePoint(_PREFILLED, step))
    if kept and not is_drafted:
        verify_waits.append(FenceWait(_PROPOSED, step, WaitPlace.SAMPLING))
        prefilled_known = step - 1
    known = stash_known, prefilled_known, hidden_read, stashed | slots
    return (
        FenceOps(tuple(draft_waits), tuple(draft_signals)) if draft_signals else None,
        FenceOps(
            (*verify_waits, *mask_waits),
            (FencePoint(_COPIED, step), published, stash) if copies else (published, stash),
        ),
        PlanState(draft, run_ahead, step, consumed, (*steps, (step, slots)), *known),
    )


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


def _check(state: PlanState, step: int, rows: int, kept: int, *, is_drafted: bool) -> None:
    if step != state.step + 1:
        raise OrderingError(f"step {step} is planned after step {state.step}")
    if kept & ~rows or (is_drafted and not kept):
        raise OrderingError(f"step {step} has draft tokens for slots that draft's part does not have")
    if kept and not state.draft.is_present:
        raise OrderingError(f"step {step} has a part for a draft, and there is no draft")
    if kept & ~state.stashed:
        raise OrderingError(f"step {step} has slots that nothing was stashed for since draft joined")
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
