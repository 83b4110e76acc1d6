"""Lengths that only the device knows yet, as values that cannot be mistaken for numbers."""

from __future__ import annotations

from typing import NoReturn

from slipstream.common.errors import PendingLengthError


class PendingLength:
    """A length that steps under way add to. Never a number; `exactly` is one when no step is under way."""

    __slots__ = ("known", "least_more", "most_more")

    def __init__(self, known: int = 0) -> None:
        self.known = known
        """What it was when the last result came in."""
        self.least_more = 0
        """What the steps under way add at least."""
        self.most_more = 0
        """What they add at most."""

    @property
    def least(self) -> int:
        """What it will be at least."""
        return self.known + self.least_more

    @property
    def most(self) -> int:
        """What it will be at most."""
        return self.known + self.most_more

    @property
    def exactly(self) -> int:
        """What it is. Raises PendingLengthError while a step is under way."""
        if self.most_more:
            raise PendingLengthError(f"{self} is not known yet")
        return self.known

    def begin(self, least_more: int, most_more: int) -> None:
        """One more step is under way, that adds so much."""
        self.least_more += least_more
        self.most_more += most_more

    def end(self, found: int, least_more: int, most_more: int) -> None:
        """The oldest step under way, begun with the same bounds, has added `found`. Raises PendingLengthError."""
        if self.most_more < most_more:
            raise PendingLengthError(f"a step added {found} to {self} that no step was to change")
        if not least_more <= found <= most_more:
            raise PendingLengthError(f"a step added {found}, not {least_more} to {most_more}")
        self.known += found
        self.least_more -= least_more
        self.most_more -= most_more

    def __repr__(self) -> str:
        return f"PendingLength(known={self.known}, least_more={self.least_more}, most_more={self.most_more})"

    def __int__(self) -> NoReturn:
        raise PendingLengthError(f"{self} was used as a number")

    __index__ = __float__ = __bool__ = __neg__ = __int__

    def __add__(self, other: object) -> NoReturn:
        raise PendingLengthError(f"{self} was used as a number")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __add__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise PendingLengthError(f"{self} was compared with {other!r}")

    __hash__ = object.__hash__
