"""When a step's commands are sent: at once, or each after the acknowledgements that it depends on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import DeadlineExceededError
from slipstream.common.worker.step import FenceName, Role
from slipstream.scheduler.telemetry.step_metrics import ACKNOWLEDGEMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.worker.step import StepCommand
    from slipstream.scheduler.telemetry.step_metrics import StepMetrics
    from slipstream.scheduler.workers.link import Link

_PRODUCERS = {
    FenceName.DRAFT_DONE: Role.DRAFT,
    FenceName.VERIFY_PUBLISH: Role.VERIFY,
    FenceName.VERIFY_STASH: Role.VERIFY,
}


class Dispatch(Protocol):
    """Sends the commands of a step."""

    def send(self, commands: Sequence[tuple[Link, StepCommand]]) -> None:
        """Sends them in this order. Raises the failure of a link."""
        ...


class DispatchTogether:
    """For fences whose wait may be enqueued before their signal: nothing holds a command back."""

    def send(self, commands: Sequence[tuple[Link, StepCommand]]) -> None:
        """See `Dispatch.send`."""
        for link, command in commands:
            link.send(command)


class DispatchAcknowledged:
    """Sends a command when every worker that it waits for has acknowledged the step that it waits for.

    With workers that acknowledge work that is done, this is the policy "the host blocks on each call".
    """

    def __init__(self, links: dict[Role, Link], metrics: StepMetrics, timeout_s: float) -> None:
        self._links = links
        self._metrics = metrics
        self._timeout_s = timeout_s

    def send(self, commands: Sequence[tuple[Link, StepCommand]]) -> None:
        """See `Dispatch.send`. Raises DeadlineExceededError when an acknowledgement does not come."""
        for link, command in commands:
            for point in command.ops.waits:
                self._wait(self._links[_PRODUCERS[point.fence]], point.value)
            link.send(replace(command, wants_acknowledgement=True))

    def _wait(self, producer: Link, step: int) -> None:
        started = time.monotonic()
        if not producer.wait_for_acknowledgement(step, self._timeout_s):
            raise DeadlineExceededError(f"the {producer.role.value} service did not acknowledge step {step} in time")
        self._metrics.host_stalled(ACKNOWLEDGEMENT, time.monotonic() - started)
