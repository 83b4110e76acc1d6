"""Every rule of the plan is needed: without it the checker names two accesses that collide."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import pytest

from slipstream.common.worker.access_log import LogOp, StreamName
from slipstream.common.worker.layout import BufferName
from slipstream.common.worker.step import StepKind
from slipstream.scheduler.records import DraftTraits, OrderedStep
from tests.ordering.accesses import BufferGroup
from tests.ordering.model import Model
from tests.ordering.sequences import Walk

if TYPE_CHECKING:
    from tests.ordering.checker import Operation, Race

LANGUAGE_MODEL = DraftTraits(is_present=True)
HEAD = DraftTraits(is_present=True, reads_hidden=True)

RESULTS = set(BufferGroup.RESULTS.buffers(LANGUAGE_MODEL))
STASH = {
    BufferName.SEQ_LENS,
    BufferName.BONUS_TOKENS,
    BufferName.NUM_NEW,
    BufferName.LAST_TOKENS,
    BufferName.HIDDEN_STATES,
}
STAMPS = {BufferName.DRAFT_STAMPS, BufferName.VERIFY_STAMPS}


class Rule(enum.Enum):
    """A rule that orders the steps."""

    DRAFT_WAITS_FOR_STASH = enum.auto()
    DRAFT_PREFILL_WAITS_FOR_STASH = enum.auto()
    VERIFY_WAITS_FOR_DONE = enum.auto()
    VERIFY_PREFILL_WAITS_FOR_READER = enum.auto()
    COPY_WAITS_FOR_PUBLISH = enum.auto()
    SEND_AFTER_CONSUME = enum.auto()
    STAMPS_BEHIND_POLL = enum.auto()

    def covers(self, kind: StepKind, operation: Operation) -> bool:
        """True if the operation is there because of the rule."""
        if (operation.op, operation.stream) == (LogOp.WAIT, StreamName.DRAFT):
            # Draft's second command in a mixed step waits as in a prefill.
            kind = StepKind.PREFILL if operation.value == operation.step else StepKind.DECODE
        return (kind, operation.op, operation.stream) in OPERATIONS[self]


KINDS = tuple(StepKind)
OPERATIONS = {
    Rule.DRAFT_WAITS_FOR_STASH: {(StepKind.DECODE, LogOp.WAIT, StreamName.DRAFT)},
    Rule.DRAFT_PREFILL_WAITS_FOR_STASH: {(StepKind.PREFILL, LogOp.WAIT, StreamName.DRAFT)},
    Rule.VERIFY_WAITS_FOR_DONE: {(StepKind.DECODE, LogOp.WAIT, StreamName.VERIFY)},
    Rule.VERIFY_PREFILL_WAITS_FOR_READER: {(StepKind.PREFILL, LogOp.WAIT, StreamName.VERIFY)},
    Rule.COPY_WAITS_FOR_PUBLISH: {(kind, LogOp.WAIT, StreamName.SCHEDULER) for kind in KINDS},
    Rule.SEND_AFTER_CONSUME: {
        (kind, LogOp.RECV, stream) for kind in KINDS for stream in (StreamName.DRAFT, StreamName.VERIFY)
    },
    Rule.STAMPS_BEHIND_POLL: {(kind, LogOp.POLL, StreamName.SCHEDULER) for kind in KINDS},
}
KEEPS_IN_ORDER = {
    Rule.DRAFT_WAITS_FOR_STASH: STASH | {BufferName.DRAFT_TOKENS},
    Rule.DRAFT_PREFILL_WAITS_FOR_STASH: {BufferName.PREFILL_HIDDEN},
    Rule.VERIFY_WAITS_FOR_DONE: STASH | {BufferName.DRAFT_TOKENS, BufferName.DRAFT_STAMPS, BufferName.PREFILL_HIDDEN},
    Rule.VERIFY_PREFILL_WAITS_FOR_READER: {BufferName.PREFILL_HIDDEN},
    Rule.COPY_WAITS_FOR_PUBLISH: RESULTS | STAMPS,
    # The ring, and whatever a wait was left out for because the scheduler knew of it when it sent the command.
    Rule.SEND_AFTER_CONSUME: set(BufferName),
    Rule.STAMPS_BEHIND_POLL: {BufferName.DRAFT_STAMPS},
}
FOR_HIDDEN_STATES = {Rule.DRAFT_PREFILL_WAITS_FOR_STASH, Rule.VERIFY_PREFILL_WAITS_FOR_READER}


def races_without(rule: Rule, draft: DraftTraits, run_ahead: int) -> list[Race]:
    """The races of the first sequence of up to 4 steps, consumed to its end, that has any."""

    def alter(kind: StepKind, operation: Operation) -> Operation | None:
        return None if rule.covers(kind, operation) else operation

    for num_steps in range(1, 5):
        for visit in Walk(2).visits(Model(draft, run_ahead, alter=alter), num_steps):
            while visit.after.has_unconsumed:
                visit.after.consume()
            assert not visit.after.stuck
            if visit.after.checker.races:
                print(f"{visit.sends}: {visit.after.checker.races[0]}")
                return visit.after.checker.races
    return []


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD], ids=["language model", "head"])
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_without_it_two_accesses_collide(rule: Rule, draft: DraftTraits, run_ahead: int) -> None:
    races = races_without(rule, draft, run_ahead)
    if rule in FOR_HIDDEN_STATES and not draft.reads_hidden:
        assert races == [], "there is nothing to order"
        return
    assert races
    for race in races:
        assert race.first.buffer == race.second.buffer
        assert race.first.buffer in KEEPS_IN_ORDER[rule]
        assert race.first.stream is not race.second.stream
        assert LogOp.WRITE in (race.first.op, race.second.op)


@pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD], ids=["language model", "head"])
@pytest.mark.parametrize("num_consumed", [0, 3])
def test_without_a_step_that_stashes_for_it_a_draft_that_joins_reads_nothing(
    draft: DraftTraits, num_consumed: int
) -> None:
    """The plan refuses such a step; the checker names the wait, or the read where the plan needs no wait."""
    model = Model(draft, 5)
    for step in (1, 2, 3):
        model.send(OrderedStep(step, StepKind.PREFILL, 0b1 if step == 1 else 0b10))
    for _ in range(num_consumed):
        model.consume()
    model.change_draft(draft)
    model.state = model.state._replace(stashed=0b1)
    model.send(OrderedStep(4, StepKind.DECODE, 0b1))
    assert not model.checker.races
    expected = "nothing was stashed there for this draft" if num_consumed else "VERIFY_STASH 1 in step 4 never ends"
    assert expected in str(model.problems[0])
