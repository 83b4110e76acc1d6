"""Lengths that only the device knows yet, as values that cannot be mistaken for numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from slipstream.common.errors import PendingLengthError


@dataclass(frozen=True, slots=True)
class PendingLength:
    """What is known of a length while steps that add to it are under way."""

    known: int
    """What it was when the last result came in."""
    least_more: int
    """What the steps under way add at least."""
    most_more: int
    """What they add at most."""

    def __int__(self) -> NoReturn:
        raise PendingLengthError(f"{self} was used as a number")

    __index__ = __float__ = __bool__ = __neg__ = __int__

    def __add__(self, other: object) -> NoReturn:
        raise PendingLengthError(f"{self} was used as a number")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __add__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PendingLength):
            raise PendingLengthError(f"{self} was compared with {other!r}")
        return (self.known, self.least_more, self.most_more) == (other.known, other.least_more, other.most_more)


Length = int | PendingLength


def least(length: Length) -> int:
    """What a length is at least."""
    return length if isinstance(length, int) else length.known + length.least_more


def most(length: Length) -> int:
    """What a length is at most."""
    return length if isinstance(length, int) else length.known + length.most_more


def extend(length: Length, least_more: int, most_more: int) -> Length:
    """The length when one more step is under way that adds so much."""
    if isinstance(length, int):
        return PendingLength(length, least_more, most_more)
    return PendingLength(length.known, length.least_more + least_more, length.most_more + most_more)


def resolve(length: Length, found: int, least_more: int, most_more: int) -> Length:
    """The length when the oldest step under way, extended by the same bounds, has added `found`."""
    if isinstance(length, int):
        raise PendingLengthError(f"a step added {found} to a length of {length} that no step was to change")
    if not least_more <= found <= most_more:
        raise PendingLengthError(f"a step added {found}, not {least_more} to {most_more}")
    left = PendingLength(length.known + found, length.least_more - least_more, length.most_more - most_more)
    return left if left.most_more else left.known
