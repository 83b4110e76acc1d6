"""When a draft is attached again after it failed to come, or was lost."""

from __future__ import annotations

import time

from slipstream.scheduler.telemetry.draft_metrics import LossCause

FIRST_S, LONGEST_S = 0.2, 5.0
"""Between two tries to attach a draft: the time doubles while they fail."""
LONGEST_AFTER_TIMEOUT_S = 60.0
"""The same for a draft that is slower than the watchdog again and again: each try costs the steps that wait for it."""
STEADY_S = 10.0
"""A draft that was lost after it took part for so long is tried again at once; sooner than that the time doubles."""


class Retries:
    """The time of the next try. Belongs to the session's lock."""

    def __init__(self) -> None:
        self.due = 0.0
        """On time.monotonic's clock."""
        self._after_failure_s = self._after_loss_s = FIRST_S

    def failed(self) -> None:
        """A try has failed."""
        self.due = time.monotonic() + self._after_failure_s
        self._after_failure_s = min(2 * self._after_failure_s, LONGEST_S)

    def joined(self) -> None:
        """A draft takes part: tries succeed again."""
        self._after_failure_s = FIRST_S

    def left(self, cause: LossCause, joined_at: float) -> None:
        """A draft takes part no more. `joined_at`: since when it did, infinity if it never did."""
        now = time.monotonic()
        if cause in (LossCause.SWAPPED, LossCause.LEFT):
            self.due = now + FIRST_S
            return
        if now - joined_at >= STEADY_S:
            self._after_loss_s = FIRST_S
        longest = LONGEST_AFTER_TIMEOUT_S if cause is LossCause.TIMEOUT else LONGEST_S
        self.due = now + min(self._after_loss_s, longest)
        self._after_loss_s = min(2 * self._after_loss_s, longest)
