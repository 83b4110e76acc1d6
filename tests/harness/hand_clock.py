"""An event loop on a clock of the test's own."""

from __future__ import annotations

import asyncio


class HandClockLoop(asyncio.SelectorEventLoop):
    """What is due runs when the test says what time it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def time(self) -> float:
        """The test's clock."""
        return self.now

    def advance(self, seconds: float = 0.0) -> None:
        """Time goes by, and what is due by then runs."""
        self.now += seconds
        for _ in range(3):
            self.call_soon(self.stop)
            self.run_forever()
