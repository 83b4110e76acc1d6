"""The scheduler's records of the last steps: their order, the loop's activities, and the workers' stamps.

Kept all the time, as a handful of tuples a step: a trace needs nothing switched on, and does not slow down the steps.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from slipstream.common.errors import UnavailableError
from slipstream.common.worker.recorder import FlightRecorder, Record, Site
from slipstream.common.worker.step import Role
from slipstream.common.worker.trace import MAX_STEPS, TracedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.worker.step import FenceOps, StepKind
    from slipstream.scheduler.core.results import Interval, Step

_KEPT_STEPS = MAX_STEPS + 64


class StepRecorder:
    """Records of one epoch. The loop's thread adds; any other may read."""

    def __init__(self) -> None:
        self._host = FlightRecorder()
        self._streams = {role: FlightRecorder(_KEPT_STEPS) for role in Role}
        self._planned: deque[tuple[int, StepKind, int, FenceOps, FenceOps | None]] = deque(maxlen=_KEPT_STEPS)
        self._lock = threading.Lock()
        self._watchers: dict[Callable[[], None], int] = {}
        self.is_closed = False
        """True once the epoch is over."""
        self.last_sent = 0
        """The last step that was sent."""
        self.last_complete = 0
        """The last step whose stamps were read."""

    def sent(self, step: Step, verify: FenceOps, draft: FenceOps | None, begin_ns: int, end_ns: int) -> None:
        """Adds a step that was decided on at `begin_ns`, with its commands handed over until `end_ns`."""
        self._planned.append((step.number, step.kind, len(step.members), verify, draft))
        self._host.add(Site.SEND, step.number, begin_ns, end_ns)
        self.last_sent = step.number

    def add(self, site: Site, step: int, begin_ns: int, end_ns: int) -> None:
        """Adds an activity of the loop."""
        self._host.add(site, step, begin_ns, end_ns)

    def stamped(self, step: int, verify: Interval, draft: Interval | None) -> None:
        """Adds the stamps of a step, which complete its records."""
        self._streams[Role.VERIFY].add(Site.STREAM, step, *verify)
        if draft is not None:
            self._streams[Role.DRAFT].add(Site.STREAM, step, *draft)
        self.last_complete = step
        if self._watchers:
            self._notify(step)

    def watch(self, step: int, call: Callable[[], None]) -> None:
        """Calls `call` once this step is complete or the epoch is over, at once if it is."""
        with self._lock:
            self._watchers[call] = step
        # Checked after the registration: a step that is complete by now may have found no watcher.
        if self.is_closed or self.last_complete >= step:
            self.forget(call)
            call()

    def forget(self, call: Callable[[], None]) -> None:
        """Takes back a `watch`."""
        with self._lock:
            self._watchers.pop(call, None)

    def close(self) -> None:
        """Ends the epoch: calls all watchers."""
        self.is_closed = True
        self._notify(None)

    def steps(self, first: int, last: int) -> list[TracedStep]:
        """Returns the complete steps among these. Raises UnavailableError if the epoch is over."""
        if self.is_closed:
            raise UnavailableError("the workers were lost, or the server ends, while steps were traced")
        last = min(last, self.last_complete)
        return [
            TracedStep(
                step=number,
                kind=kind,
                num_slots=num_slots,
                has_draft=draft is not None,
                draft_waits=() if draft is None else draft.waits,
                verify_waits=verify.waits,
            )
            for number, kind, num_slots, verify, draft in self._planned.copy()
            if first <= number <= last
        ]

    def host_records(self, first: int) -> list[Record]:
        """The loop's activities, from this step on."""
        return self._host.since(first)

    def stream_records(self, role: Role, first: int) -> list[Record]:
        """A worker's stamps, from this step on."""
        return self._streams[role].since(first)

    def _notify(self, step: int | None) -> None:
        with self._lock:
            due = [call for call, wanted in self._watchers.items() if step is None or wanted <= step]
            for call in due:
                del self._watchers[call]
        for call in due:
            call()
