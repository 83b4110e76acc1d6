"""Lengths that only the device knows yet."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import PendingLengthError
from slipstream.scheduler.core.sequence import PendingLength

if TYPE_CHECKING:
    from collections.abc import Callable

PENDING = PendingLength(10)
PENDING.begin(1, 5)


@pytest.mark.parametrize(
    "use",
    [
        int,
        float,
        bool,
        range,
        operator.index,
        operator.neg,
        math.floor,
        lambda length: sum([length]),
        lambda length: [0, 1][length],
        lambda length: [0][:length],
        lambda length: "x" * length,
        lambda length: max(length, 3),
        lambda length: sorted([length, 3]),
        lambda length: 1 if length else 0,
    ],
)
def test_refuses_to_be_a_number(use: Callable[[Any], object]) -> None:
    with pytest.raises(PendingLengthError, match=r"PendingLength\(known=10"):
        use(PENDING)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne"]
)
def test_refuses_every_operation_with_a_number_on_either_side(name: str) -> None:
    for left, right in ((PENDING, 3), (3, PENDING)):
        with pytest.raises(PendingLengthError):
            getattr(operator, name)(left, right)


def test_two_of_them_cannot_be_compared() -> None:
    with pytest.raises(PendingLengthError, match="compared"):
        assert PendingLength(10) != PENDING


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_bounds_close_in_on_the_sum(known: int, steps: list[tuple[int, int, int]]) -> None:
    """Each step adds `low` to `low + width`, in fact `low + found % (width + 1)`."""
    length = PendingLength(known)
    bounds = [(low, low + width, low + found % (width + 1)) for low, width, found in steps]
    for low, high, _ in bounds:
        length.begin(low, high)
    total = known + sum(found for *_, found in bounds)
    for low, high, found in bounds:
        assert length.least <= total <= length.most
        with pytest.raises(PendingLengthError, match="not known yet"):
            _ = length.exactly
        length.end(found, low, high)
    assert length.exactly == total == length.least == length.most


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PendingLengthError, match="no step was to change"):
        PendingLength(4).end(1, 1, 1)
    for found in (0, 6):
        with pytest.raises(PendingLengthError, match=f"a step added {found}, not 1 to 5"):
            PENDING.end(found, 1, 5)
