"""Every rule of the plan is needed: without it the checker names two accesses that collide."""

from __future__ import annotations

import enum

import pytest

from slipstream.common.wire.events import LogOp, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import BufferGroup, Command
from tests.ordering.checker import Operation, Race
from tests.ordering.model import Model
from tests.ordering.sequences import Walk

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
FOR_MASKS = {BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS, BufferName.COPIED_TOKENS}
MASKS = {BufferName.MASKS, BufferName.MASK_STAMPS}
STAMPS = {BufferName.DRAFT_STAMPS, BufferName.VERIFY_STAMPS}


class Rule(enum.Enum):
    """A rule that orders the steps."""

    DRAFT_DECODES_AFTER_STASH = enum.auto()
    DRAFT_PREFILLS_AFTER_STASH = enum.auto()
    VERIFY_COPIES_AFTER_PROPOSED = enum.auto()
    VERIFY_SAMPLES_AFTER_PROPOSED = enum.auto()
    VERIFY_LEAVES_STATES_AFTER_PREFILLED = enum.auto()
    RESULT_AFTER_PUBLISH = enum.auto()
    SEND_AFTER_CONSUME = enum.auto()
    STAMPS_AFTER_POLL = enum.auto()
    MASKS_AFTER_COPIED = enum.auto()
    MASKS_AFTER_PUBLISH = enum.auto()
    VERIFY_SAMPLES_AFTER_MASKS = enum.auto()

    def covers(self, command: Command, operation: Operation) -> bool:
        """True if the operation is there because of the rule."""
        match operation.op, operation.stream:
            case LogOp.WAIT, StreamName.DRAFT:
                is_for_prompts = operation.value == operation.step
                return self is (Rule.DRAFT_PREFILLS_AFTER_STASH if is_for_prompts else Rule.DRAFT_DECODES_AFTER_STASH)
            case LogOp.WAIT, StreamName.VERIFY:
                if operation.fence is FenceName.GRAMMAR_READY:
                    return self is Rule.VERIFY_SAMPLES_AFTER_MASKS
                if operation.fence is FenceName.DRAFT_PREFILLED:
                    return self is Rule.VERIFY_LEAVES_STATES_AFTER_PREFILLED
                return self is (
                    Rule.VERIFY_COPIES_AFTER_PROPOSED if command.is_drafted else Rule.VERIFY_SAMPLES_AFTER_PROPOSED
                )
            case LogOp.WAIT, StreamName.GRAMMAR:
                has_copy = operation.fence is FenceName.VERIFY_COPIED
                return self is (Rule.MASKS_AFTER_COPIED if has_copy else Rule.MASKS_AFTER_PUBLISH)
            case LogOp.WAIT, StreamName.SCHEDULER:
                return self is Rule.RESULT_AFTER_PUBLISH
            case LogOp.POLL, _:
                return self is Rule.STAMPS_AFTER_POLL
            case LogOp.RECV, _:
                return self is Rule.SEND_AFTER_CONSUME
        return False


KEEPS_IN_ORDER = {
    Rule.DRAFT_DECODES_AFTER_STASH: STASH | {BufferName.DRAFT_TOKENS, BufferName.NUM_PROPOSED},
    Rule.DRAFT_PREFILLS_AFTER_STASH: {BufferName.PREFILL_HIDDEN},
    Rule.VERIFY_COPIES_AFTER_PROPOSED: STASH
    | {BufferName.DRAFT_TOKENS, BufferName.NUM_PROPOSED, BufferName.DRAFT_STAMPS, BufferName.PREFILL_HIDDEN},
    Rule.VERIFY_SAMPLES_AFTER_PROPOSED: STASH | {BufferName.DRAFT_STAMPS, BufferName.PREFILL_HIDDEN},
    Rule.VERIFY_LEAVES_STATES_AFTER_PREFILLED: {BufferName.PREFILL_HIDDEN},
    Rule.RESULT_AFTER_PUBLISH: RESULTS | STAMPS,
    # The ring, and whatever a wait was left out for because the scheduler knew of it when it sent the command.
    Rule.SEND_AFTER_CONSUME: set(BufferName),
    Rule.STAMPS_AFTER_POLL: {BufferName.DRAFT_STAMPS},
    Rule.MASKS_AFTER_COPIED: FOR_MASKS | MASKS,
    Rule.MASKS_AFTER_PUBLISH: FOR_MASKS | MASKS,
    Rule.VERIFY_SAMPLES_AFTER_MASKS: FOR_MASKS | MASKS,
}
FOR_CONSTRAINTS = {Rule.MASKS_AFTER_COPIED, Rule.MASKS_AFTER_PUBLISH, Rule.VERIFY_SAMPLES_AFTER_MASKS}
FOR_HIDDEN_STATES = {Rule.DRAFT_PREFILLS_AFTER_STASH, Rule.VERIFY_LEAVES_STATES_AFTER_PREFILLED}


def races_without(rule: Rule, draft: DraftTraits, run_ahead: int, most_steps: int) -> list[Race]:
    """The races of the first sequence of up to that many steps, consumed to its end, that has any."""

    def alter(command: Command, operation: Operation) -> Operation | None:
        return None if rule.covers(command, operation) else operation

    for num_steps in range(1, most_steps + 1):
        masks = rule in FOR_CONSTRAINTS
        for visit in Walk(1 if masks else 2, masks=masks).visits(Model(draft, run_ahead, alter=alter), num_steps):
            after = visit.after.copy()
            while after.has_unconsumed:
                after.consume()
            assert not after.stuck
            if after.checker.races:
                print(f"{visit.sends}: {after.checker.races[0]}")
                return after.checker.races
    return []


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD], ids=["language model", "head"])
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_without_it_two_accesses_collide(rule: Rule, draft: DraftTraits, run_ahead: int) -> None:
    is_consumed = rule is Rule.MASKS_AFTER_PUBLISH and run_ahead == 0
    if is_consumed or (rule in FOR_HIDDEN_STATES and not draft.reads_hidden):
        assert races_without(rule, draft, run_ahead, 2) == [], "there is nothing to order"
        return
    races = races_without(rule, draft, run_ahead, 4)
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
        model.send(Command(step, prompts=0b1 if step == 1 else 0b10))
    for _ in range(num_consumed):
        model.consume()
    model.change_draft(draft)
    model.state = model.state._replace(stashed=0b1)
    model.send(Command(4, 0b1, kept=0b1, is_drafted=True))
    assert not model.checker.races
    expected = "nothing was stashed there for this draft" if num_consumed else "VERIFY_STASH 1 in step 4 never ends"
    assert expected in str(model.problems[0])
