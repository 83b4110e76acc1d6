"""Whose turn it is where several threads want the interpreter.

CPython knows no priorities: a thread that wants the interpreter has it after the switch interval, and then loses it to
the next one after another. So a step's commands, 0.2 ms of work that both workers wait for, took three times as long
while messages went out to clients. What there is to set is the interval: a thread that keeps it long for as long as
its work is urgent is not interrupted, and one that then makes it short and sleeps has the interpreter back soon.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UNDISTURBED_S = 0.005
"""Python's own default: more than a step's urgent work takes."""
SHARED_S = 0.00005


class InterpreterTurn:
    """For the one thread whose work is urgent."""

    def begin(self) -> None:
        """Nobody interrupts this thread until it waits for something."""
        sys.setswitchinterval(UNDISTURBED_S)

    def end(self) -> None:
        """Threads take turns, and soon."""
        sys.setswitchinterval(SHARED_S)

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """For a wait in the middle of it."""
        self.end()
        try:
            yield
        finally:
            self.begin()
