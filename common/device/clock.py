"""The clock of a device's stamps against the host's CLOCK_MONOTONIC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One moment on both clocks, in nanoseconds."""

    device_ns: int
    host_ns: int
    uncertainty_ns: int = 0
    """The largest error of one against the other."""


class ClockBounds:
    """Bounds the distance of the two clocks by several readings.

    Each reading says that the device's clock was read between two moments of the host's, which bounds the distance
    from both sides. The two tightest bounds need not come from the same reading.
    """

    def __init__(self) -> None:
        self._least_ns: list[int] = []
        self._most_ns: list[int] = []
        self._device_ns = 0

    def add(self, before_ns: int, device_ns: int, after_ns: int) -> None:
        """The device's clock was `device_ns` at some time between two of the host's."""
        self._least_ns.append(before_ns - device_ns)
        self._most_ns.append(after_ns - device_ns)
        self._device_ns = device_ns

    def sample(self) -> ClockSample:
        """Returns both clocks at the last reading. If the clocks drifted meanwhile, the bounds may cross."""
        least, most = max(self._least_ns), min(self._most_ns)
        return ClockSample(self._device_ns, self._device_ns + (least + most) // 2, (abs(most - least) + 1) // 2)
