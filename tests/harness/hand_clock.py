"""An event loop on a clock of the test's own."""

from __future__ import annotations

import asyncio


class HandClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets: due callbacks run when it advances."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def time(self) -> float:
        """The test's clock."""
        return self.now

    def advance(self, seconds: float = 0.0) -> None:
        """Moves the clock on by `seconds` and runs the callbacks that are due by then."""
        self.now += seconds
        for _ in range(3):
            self.call_soon(self.stop)
            self.run_forever()
