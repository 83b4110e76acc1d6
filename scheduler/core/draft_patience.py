"""How long a step waits for its draft, learned from the steps before."""

from __future__ import annotations

LEAST_TIMEOUT_CPU_S, LEAST_TIMEOUT_GPU_S = 0.25, 0.05
"""Of the watchdog where it is not set: a CPU's threads are not always scheduled sooner."""
MOST_TOKENS_TIMEOUT_S = 2.0
"""The most that the watchdog adds for a command that brings tokens."""
_SMOOTHING = 0.1
_MOST_GROWTH = 4.0
"""A step counts at most as so many times the mean: a pause of the host is no step."""


class DraftPatience:
    """Times of the steps, and the watchdog's limits that follow from them. Belongs to the loop's thread."""

    def __init__(self, timeout_s: float | None, *, is_on_gpu: bool) -> None:
        """`timeout_s`: see `Speculation`."""
        self._timeout_s = timeout_s
        self._least_timeout_s = LEAST_TIMEOUT_GPU_S if is_on_gpu else LEAST_TIMEOUT_CPU_S
        self._step_s = {False: 0.0, True: 0.0}
        """Time of a plain and of a drafted decode step, smoothed. While a draft rests, steps say nothing of it."""
        self._tokens_s = 0.0
        """Time of a command that brings tokens: of a prefill, or of one to catch up; the longest of late."""

    @property
    def timeout_s(self) -> float:
        """The time that a step may wait for its draft now."""
        return max(2 * self._longest_step_s, self._least_timeout_s) if self._timeout_s is None else self._timeout_s

    @property
    def tokens_timeout_s(self) -> float:
        """The time that draft may take beyond that while it takes in tokens."""
        return min(2 * self._tokens_s, MOST_TOKENS_TIMEOUT_S)

    def decoded(self, seconds: float, *, is_drafted: bool) -> None:
        """Takes in the time of a decode step. `is_drafted`: verify waited for a draft in it."""
        seconds = min(seconds, max(self._least_timeout_s, _MOST_GROWTH * self._longest_step_s))
        known = self._step_s[is_drafted]
        self._step_s[is_drafted] += (seconds - known) * (_SMOOTHING if known else 1.0)

    def prefilled(self, seconds: float) -> None:
        """Takes in the time of a prefill step."""
        self._tokens_s = max(seconds, self._tokens_s * (1 - _SMOOTHING))

    def brought(self, seconds: float) -> None:
        """Takes in the time of a command to catch up."""
        self._tokens_s = max(self._tokens_s, seconds)

    @property
    def _longest_step_s(self) -> float:
        return max(self._step_s.values())
