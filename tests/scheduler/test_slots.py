"""The accounts of all slots at once: lengths that only the device knows yet, and tokens that are known."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.common.errors import PendingLengthError
from slipstream.scheduler.records import StepOutcome
from slipstream.scheduler.slots import CommittedTokens, PendingLengths

ROWS = np.array([1, 3])


def rows(*values: int) -> NDArray[np.int64]:
    """Slots."""
    return np.array(values, np.int64)


def counts(*values: int) -> NDArray[np.int32]:
    """Numbers of tokens."""
    return np.array(values, np.int32)


def test_bounds_hold_until_the_length_is_known() -> None:
    lengths = PendingLengths(4)
    lengths.reset(3, 7)
    lengths.begin(ROWS, counts(5, 1))
    lengths.begin(rows(3), counts(2))
    assert lengths.least(ROWS).tolist() == [1, 9]
    assert lengths.known(ROWS).tolist() == [0, 7]
    lengths.end(ROWS, counts(3, 1))
    assert lengths.known(ROWS).tolist() == [3, 8]
    assert lengths.least(ROWS).tolist() == [3, 9]
    lengths.end(rows(3), counts(2))
    assert lengths.least(ROWS).tolist() == [3, 10]


def test_many_steps_are_added_up_whether_or_not_a_length_is_asked_for() -> None:
    lengths, num_steps = PendingLengths(4), 193
    for step in range(num_steps):
        of_step = ROWS if step % 3 else rows(3)
        lengths.begin(of_step, counts(*[2] * len(of_step)))
        lengths.end(of_step, counts(*[1] * len(of_step)))
        if step == 5:
            assert lengths.known(3) == 6
        if step == 100:
            lengths.tidy()
    assert lengths.known(rows(0, 1, 3)).tolist() == [0, num_steps - (num_steps + 2) // 3, num_steps]


def test_a_result_of_no_step_changes_nothing() -> None:
    lengths = PendingLengths(4)
    lengths.begin(rows(1), counts(2))
    with pytest.raises(PendingLengthError, match="slot 3, which no step was to change"):
        lengths.end(ROWS, counts(1, 1))
    assert lengths.least(ROWS).tolist() == [1, 0]
    lengths.end(rows(1), counts(2))
    assert lengths.known(ROWS).tolist() == [2, 0], "its step was still under way"


def test_a_slot_begins_anew_with_the_next_sequence() -> None:
    lengths = PendingLengths(4)
    lengths.begin(ROWS, counts(3, 3))
    lengths.reset(1, 4)
    assert lengths.least(ROWS).tolist() == [4, 1]
    assert lengths.most(ROWS).tolist() == [4, 3]
    lengths.end(rows(3), counts(3))
    assert lengths.most(ROWS).tolist() == [4, 3]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=30))
def test_bounds_contain_every_outcome(steps: list[tuple[int, int, bool]]) -> None:
    lengths, under_way, length = PendingLengths(2), deque[int](), 0
    for most, fewer, is_ended in steps:
        lengths.begin(rows(1), counts(most))
        found = max(1, most - fewer)
        under_way.append(found)
        length += found
        if is_ended:
            lengths.end(rows(1), counts(under_way.popleft()))
        assert lengths.least(rows(1))[0] <= length
    while under_way:
        lengths.end(rows(1), counts(under_way.popleft()))
    assert lengths.least(rows(1)).tolist() == [length]


def test_every_slot_keeps_its_tokens_when_the_table_grows() -> None:
    """Slot 2 begins a second time; steps of the same slots are written together."""
    committed, expected, number = CommittedTokens(4), dict[int, list[int]](), 0
    for slot, most in ((2, 9), (1, 12), (3, 40), (2, 90)):
        expected[slot] = [slot, 50, 60]
        committed.begin(slot, tuple(expected[slot]), most)
        slots = rows(*expected)
        for num_tokens in ([1, 3, 2], [2, 0, 1]):
            tokens = np.arange(number, number + 3 * len(slots)).reshape(-1, 3)
            step = SimpleNamespace(rows=slots, tokens=tokens, num_tokens=counts(*num_tokens[: len(slots)]))
            committed.append(cast("StepOutcome", step))
            number += tokens.size
            for of_slot, new, count in zip(expected, tokens.tolist(), num_tokens, strict=False):
                expected[of_slot] += new[:count]
        for of_slot, known in expected.items():
            assert committed.num_tokens(of_slot) == len(known)
            assert committed.read(of_slot, 0, len(known)) == tuple(known)
