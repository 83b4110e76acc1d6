"""What an epoch's stream waits for, so that it can be released when nobody is left to signal it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.common.device.interface import Fence

RELEASED_TIMEOUT_S = 60.0
"""For work that is enqueued behind what was released."""
HOPELESS_TIMEOUT_S = 5.0
"""For a stream that may wait for a dead producer with fences that nobody can release."""


class WaitedFences:
    """The largest value of each fence that the stream waits for."""

    def __init__(self) -> None:
        self._values: dict[Fence, int] = {}

    def add(self, fence: Fence, value: int) -> None:
        """The stream waits for it."""
        self._values[fence] = max(value, self._values.get(fence, 0))

    def release(self) -> None:
        """Signals everything in the producers' place, as far as that can be done. Raises DeviceError."""
        for fence, value in self._values.items():
            fence.release(value)

    @property
    def timeout_s(self) -> float:
        """How long the stream may take to come to its end once its producer is gone."""
        return RELEASED_TIMEOUT_S if all(fence.is_releasable for fence in self._values) else HOPELESS_TIMEOUT_S

    def clear(self) -> None:
        """The epoch is over: no fence is kept."""
        self._values.clear()
