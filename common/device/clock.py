"""The clock of a device's stamps against the host's CLOCK_MONOTONIC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One moment on both clocks, in nanoseconds."""

    device_ns: int
    host_ns: int
    uncertainty_ns: int = 0
    """How far the one may be from the other."""


class ClockBounds:
    """What several looks say together about the distance of the two clocks.

    Each look says that the device's clock was read between two moments of the host's, which bounds the distance from
    both sides. The tightest bounds need not come from the same look: one may have been quick to get there and another
    quick to come back.
    """

    def __init__(self) -> None:
        self._least_ns: int | None = None
        self._most_ns: int | None = None
        self._device_ns = 0

    def add(self, before_ns: int, device_ns: int, after_ns: int) -> None:
        """The device's clock was `device_ns` at some time between two of the host's."""
        least, most = before_ns - device_ns, after_ns - device_ns
        self._least_ns = least if self._least_ns is None else max(self._least_ns, least)
        self._most_ns = most if self._most_ns is None else min(self._most_ns, most)
        self._device_ns = device_ns

    def sample(self) -> ClockSample:
        """Both clocks at the last look. Clocks that drifted between looks may leave bounds that cross."""
        assert self._least_ns is not None, "there was a look"
        assert self._most_ns is not None, "there was a look"
        middle = (self._least_ns + self._most_ns) // 2
        return ClockSample(self._device_ns, self._device_ns + middle, (abs(self._most_ns - self._least_ns) + 1) // 2)
