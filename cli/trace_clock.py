"""Times of the stamps' clock as those of the host's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.device.clock import ClockSample

MOST_DRIFT = 1e-4
"""Of two clocks of a host, as a part of the time; quartzes differ by less."""


class StampClock:
    """Maps by samples of both clocks, between which they drift evenly apart.

    Where the samples tell less of the drift than is known of it anyhow, the better one counts alone.
    """

    def __init__(self, samples: Sequence[ClockSample]) -> None:
        """At least one; of more, the first and the last count."""
        first, last = samples[0], samples[-1]
        elapsed_ns = last.device_ns - first.device_ns
        if first.uncertainty_ns + last.uncertainty_ns >= MOST_DRIFT * elapsed_ns:
            first = last = min(first, last, key=lambda sample: sample.uncertainty_ns)
        self._first, self._last = first, last
        self.uncertainty_ns = max(first.uncertainty_ns, last.uncertainty_ns)
        """How far a mapped time may be off."""

    def host_ns(self, device_ns: int) -> int:
        """When that was on the host's clock."""
        first, last = self._first, self._last
        offset = first.host_ns - first.device_ns
        elapsed = last.device_ns - first.device_ns
        if elapsed <= 0:
            return device_ns + offset
        drift = last.host_ns - last.device_ns - offset
        return device_ns + offset + drift * (device_ns - first.device_ns) // elapsed
