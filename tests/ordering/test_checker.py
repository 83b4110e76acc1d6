"""The checker on its own: hand-made runs, and random ones against a slow checker that keeps everything."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from slipstream.common.wire.events import LogOp, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import DRAFT_FENCES, FenceName, Role
from tests.harness.sampling import examples
from tests.ordering.checker import Checker, Operation, run
from tests.ordering.plan_checker import PlanChecker, needless_waits

DRAFT, VERIFY, SCHEDULER = range(3)
STREAMS = (StreamName.DRAFT, StreamName.VERIFY, StreamName.SCHEDULER)
BUFFER = BufferName.SEQ_LENS


def read(lane: int, *rows: int, step: int = 1) -> Operation:
    return Operation(LogOp.READ, STREAMS[lane], step, buffer=BUFFER, rows=rows)


def write(lane: int, *rows: int, step: int = 1) -> Operation:
    return Operation(LogOp.WRITE, STREAMS[lane], step, buffer=BUFFER, rows=rows)


def fence(op: LogOp, lane: int, name: FenceName, value: int) -> Operation:
    return Operation(op, STREAMS[lane], value, fence=name, value=value)


def signal(lane: int, name: FenceName, value: int) -> Operation:
    return fence(LogOp.SIGNAL, lane, name, value)


def wait(lane: int, name: FenceName, value: int) -> Operation:
    return fence(LogOp.WAIT, lane, name, value)


def poll(lane: int, name: FenceName, value: int) -> Operation:
    return fence(LogOp.POLL, lane, name, value)


def send(role: Role, step: int) -> Operation:
    return Operation(LogOp.SEND, StreamName.SCHEDULER, step, role=role)


def recv(lane: int, step: int) -> Operation:
    return Operation(LogOp.RECV, STREAMS[lane], step)


def checked(*lanes: list[Operation], kind: type[Checker] = Checker) -> Checker:
    checker = kind(3)
    assert run(checker, [*lanes, *[[]] * (3 - len(lanes))]) == []
    return checker


class TestRaces:
    @pytest.mark.parametrize("is_draft_first", [True, False])
    def test_of_a_write_and_a_read(self, is_draft_first: bool) -> None:
        lanes = ([write(DRAFT, 4, 5, step=7)], [read(VERIFY, 3, 4, 5, step=8)])
        checker = Checker(2)
        run(checker, [lanes[0], []] if is_draft_first else [[], lanes[1]])
        run(checker, [[], lanes[1]] if is_draft_first else [lanes[0], []])
        (race,) = checker.races
        assert race.rows == (4, 5)
        assert {str(race.first), str(race.second)} == {
            "draft's write of seq_lens [4, 5] in step 7",
            "verify's read of seq_lens [3, 4, 5] in step 8",
        }
        assert str(race).endswith("collide in [4, 5]: nothing orders them")

    def test_of_two_writes(self) -> None:
        assert len(checked([write(DRAFT, 1)], [write(VERIFY, 1)]).races) == 1

    def test_two_reads_are_none(self) -> None:
        assert checked([read(DRAFT, 1)], [read(VERIFY, 1)]).races == []

    def test_other_rows_are_none(self) -> None:
        assert checked([write(DRAFT, 1)], [write(VERIFY, 2)]).races == []

    def test_other_epochs_are_none(self) -> None:
        assert checked([write(DRAFT, 1)], [write(VERIFY, 1)._replace(epoch=1)]).races == []

    def test_of_a_write_with_each_read_before_it(self) -> None:
        checker = checked([read(DRAFT, 1)], [read(VERIFY, 1)], [write(SCHEDULER, 1)])
        assert {race.first.stream for race in checker.races} == {StreamName.DRAFT, StreamName.VERIFY}

    def test_of_what_comes_after_the_signal(self) -> None:
        proposed = FenceName.DRAFT_PROPOSED
        verify = [wait(VERIFY, proposed, 1), read(VERIFY, 1)]
        assert checked([write(DRAFT, 1), signal(DRAFT, proposed, 1)], verify).races == []
        late = checked([signal(DRAFT, proposed, 1), write(DRAFT, 1)], verify)
        assert len(late.races) == 1


class TestOrder:
    def test_by_a_wait_for_a_later_value(self) -> None:
        proposed = FenceName.DRAFT_PROPOSED
        checker = checked(
            [write(DRAFT, 1), signal(DRAFT, proposed, 3)],
            [wait(VERIFY, proposed, 2), read(VERIFY, 1)],
        )
        assert checker.races == []
        assert checker.num_ordered == 1

    def test_is_only_that_of_the_first_signal_that_ends_the_wait(self) -> None:
        proposed = FenceName.DRAFT_PROPOSED
        checker = checked(
            [signal(DRAFT, proposed, 2), write(DRAFT, 1), signal(DRAFT, proposed, 3)],
            [wait(VERIFY, proposed, 1), read(VERIFY, 1)],
        )
        assert len(checker.races) == 1, "the wait may have ended with the first signal"

    def test_goes_over_a_third_stream(self) -> None:
        proposed, publish = FenceName.DRAFT_PROPOSED, FenceName.VERIFY_PUBLISH
        checker = checked(
            [write(DRAFT, 1), signal(DRAFT, proposed, 1)],
            [wait(VERIFY, proposed, 1), signal(VERIFY, publish, 1)],
            [wait(SCHEDULER, publish, 1), write(SCHEDULER, 1)],
        )
        assert checker.races == []

    def test_of_a_command_behind_what_the_scheduler_did_before_it_sent_it(self) -> None:
        sent_after = checked([recv(DRAFT, 1), write(DRAFT, 1)], [], [read(SCHEDULER, 1), send(Role.DRAFT, 1)])
        assert sent_after.races == []
        sent_before = checked([recv(DRAFT, 1), write(DRAFT, 1)], [], [send(Role.DRAFT, 1), read(SCHEDULER, 1)])
        assert len(sent_before.races) == 1
        sent_to_other = checked([write(DRAFT, 1)], [recv(VERIFY, 1)], [read(SCHEDULER, 1), send(Role.VERIFY, 1)])
        assert len(sent_to_other.races) == 1

    def test_by_a_poll(self) -> None:
        proposed = FenceName.DRAFT_PROPOSED
        draft = [write(DRAFT, 1), signal(DRAFT, proposed, 1), recv(DRAFT, 2), write(DRAFT, 2)]
        scheduler = [read(SCHEDULER, 2), poll(SCHEDULER, proposed, 1), read(SCHEDULER, 1), send(Role.DRAFT, 2)]
        assert checked(draft, [], scheduler).races == []
        assert checked(draft, [], scheduler, kind=PlanChecker).races == []

    def test_by_a_poll_that_may_have_been_false(self) -> None:
        proposed = FenceName.DRAFT_PROPOSED
        lanes = (
            [read(DRAFT, 1), signal(DRAFT, proposed, 1)],
            [recv(VERIFY, 1), write(VERIFY, 1)],
            [poll(SCHEDULER, proposed, 1), send(Role.VERIFY, 1)],
        )
        assert checked(*lanes).races == []
        assert len(checked(*lanes, kind=PlanChecker).races) == 1, "the command may be sent without it"


class TestStuck:
    def test_behind_a_signal_that_never_comes(self) -> None:
        never = wait(VERIFY, FenceName.DRAFT_PROPOSED, 2)
        (stuck,) = run(Checker(2), [[signal(DRAFT, FenceName.DRAFT_PROPOSED, 1)], [never, read(VERIFY, 1)]])
        assert stuck.operation == never
        assert stuck.lane == VERIFY
        assert str(stuck) == "verify's wait of DRAFT_PROPOSED 2 in step 2 never ends: it was never signalled or sent"

    def test_behind_each_other(self) -> None:
        proposed, stash = FenceName.DRAFT_PROPOSED, FenceName.VERIFY_STASH
        stuck = run(
            Checker(2),
            [
                [wait(DRAFT, stash, 1), signal(DRAFT, proposed, 1)],
                [wait(VERIFY, proposed, 1), signal(VERIFY, stash, 1)],
            ],
        )
        assert [one.lane for one in stuck] == [DRAFT, VERIFY]

    def test_behind_a_command_that_was_not_sent(self) -> None:
        assert len(run(Checker(3), [[recv(DRAFT, 2)], [], [send(Role.DRAFT, 1), send(Role.VERIFY, 2)]])) == 1


def test_a_restarted_lane_is_another_process() -> None:
    checker = Checker(2)
    proposed = FenceName.DRAFT_PROPOSED
    run(checker, [[read(DRAFT, 1), signal(DRAFT, proposed, 1), write(DRAFT, 2)], [wait(VERIFY, proposed, 1)]])
    checker.restart(DRAFT)
    run(checker, [[], [write(VERIFY, 1), write(VERIFY, 2)]])
    assert checker.races == [], "what it did is forgotten"
    run(checker, [[read(DRAFT, 1)], []])
    assert len(checker.races) == 1, "it knows nothing"


def test_a_copy_is_independent() -> None:
    checker = PlanChecker(2)
    run(checker, [[write(DRAFT, 1)], []])
    twin = checker.copy()
    run(twin, [[], [write(VERIFY, 1)]])
    assert (len(checker.races), len(twin.races)) == (0, 1)


class TestNeedlessWaits:
    def test_a_wait_that_orders_something_is_needed(self) -> None:
        checker = PlanChecker(2)
        proposed = FenceName.DRAFT_PROPOSED
        run(checker, [[signal(DRAFT, proposed, 1), write(DRAFT, 1), signal(DRAFT, proposed, 2)], []])
        assert needless_waits(checker, [[], [wait(VERIFY, proposed, 2), read(VERIFY, 1)]]) == []

    def test_a_wait_for_a_later_signal_than_needed(self) -> None:
        checker = PlanChecker(2)
        proposed = FenceName.DRAFT_PROPOSED
        run(checker, [[write(DRAFT, 1), signal(DRAFT, proposed, 1), signal(DRAFT, proposed, 2)], []])
        late = wait(VERIFY, proposed, 2)
        assert needless_waits(checker, [[], [late, read(VERIFY, 1)]]) == [late]

    def test_a_wait_that_another_one_implies(self) -> None:
        checker = PlanChecker(2)
        publish, stash = FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH
        run(checker, [[], [write(VERIFY, 1), signal(VERIFY, publish, 1), write(VERIFY, 2), signal(VERIFY, stash, 1)]])
        implied = wait(DRAFT, publish, 1)
        assert needless_waits(checker, [[implied, wait(DRAFT, stash, 1), read(DRAFT, 1, 2)], []]) == [implied]
        assert needless_waits(checker, [[wait(DRAFT, stash, 1), implied, read(DRAFT, 1, 2)], []]) == [implied]


SIGNALLERS = {fence: DRAFT if fence in DRAFT_FENCES else VERIFY for fence in FenceName}


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, Operation]]:
    """Operations in an order in which they may have happened, with the lane of each."""
    values = dict.fromkeys(FenceName, 0)
    operations: list[tuple[int, Operation]] = []
    for step in range(draw(st.integers(2, 30))):
        lane = draw(st.integers(0, 2))
        choice = draw(st.sampled_from(("read", "write", "signal", "wait")))
        name = draw(st.sampled_from(FenceName))
        row = draw(st.integers(0, 1))
        if choice == "read":
            operations.append((lane, read(lane, row, step=step)))
        elif choice == "write":
            operations.append((lane, write(lane, row, step=step)))
        elif choice == "signal":
            values[name] += draw(st.integers(1, 2))
            operations.append((SIGNALLERS[name], signal(SIGNALLERS[name], name, values[name])))
        elif values[name]:
            operations.append((lane, wait(lane, name, draw(st.integers(1, values[name])))))
    return operations


def rows_with_races(operations: list[tuple[int, Operation]]) -> set[int]:
    """By the definition: reachability in the graph of everything that happened."""
    before: list[int] = []
    for index, (lane, operation) in enumerate(operations):
        direct = [earlier for earlier in range(index) if operations[earlier][0] == lane]
        if operation.op is LogOp.WAIT:
            is_end = (
                earlier
                for earlier, (_, other) in enumerate(operations)
                if other.op is LogOp.SIGNAL and other.fence == operation.fence and other.value >= operation.value
            )
            direct.append(next(is_end))
        mask = 0
        for earlier in direct:
            mask |= before[earlier] | 1 << earlier
        before.append(mask)
    touches: dict[int, list[int]] = defaultdict(list)
    for index, (_, operation) in enumerate(operations):
        for row in operation.rows:
            touches[row].append(index)
    return {
        row
        for row, indices in touches.items()
        for first, second in combinations(indices, 2)
        if LogOp.WRITE in (operations[first][1].op, operations[second][1].op) and not before[second] >> first & 1
    }


@settings(max_examples=examples(1000), deadline=None, print_blob=True)
@given(runs())
def test_agrees_with_the_definition(operations: list[tuple[int, Operation]]) -> None:
    checker = Checker(3)
    for lane, operation in operations:
        assert checker.apply(lane, operation)
    note("\n".join(str(operation) for _, operation in operations))
    assert {row for race in checker.races for row in race.rows} == rows_with_races(operations)
