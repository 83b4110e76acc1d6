"""A worker's engine whose fences are signalled late at times, by work on its stream behind the step's end stamp."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks.delayed_plan import DelayPlan, Late
from slipstream.benchmarks.dummy_model import make_kernel
from slipstream.common.worker.step import FenceName
from slipstream.services.worker.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slipstream.common.device.interface import Device, Stream
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.contract import Attachment
    from slipstream.common.worker.step import FencePoint
    from slipstream.services.worker.engine import RoleEngine
    from slipstream.services.worker.epoch import Epoch


class DelayedEngine(Engine):
    """The product's engine, but for what happens before a signal."""

    def __init__(
        self,
        plan_file: Path,
        role: RoleEngine,
        device: Device,
        stream: Stream,
        log: AccessLog,
        **others: Any,
    ) -> None:
        """`plan_file`: read anew in each epoch. The other arguments are those of `Engine`."""
        super().__init__(role, device, stream, log, **others)
        self._plan_file = plan_file
        self._delay: tuple[DelayPlan, Callable[[], None]] | None = None

    def attach(self, attachment: Attachment) -> None:
        """See `Engine.attach`."""
        plan = DelayPlan.read(self._plan_file)
        self._delay = plan, self._kernel(plan.delay_us / 1000)
        super().attach(attachment)

    def _signal(self, opened: Epoch, point: FencePoint, step: int) -> None:
        assert self._delay is not None, "a step belongs into an epoch"
        plan, run = self._delay
        if _is_late(plan, point):
            self._stream.enqueue(run)
        super()._signal(opened, point, step)

    def _kernel(self, length_ms: float) -> Callable[[], None]:
        """Stream work that takes so long."""
        if self._device.has_stream_threads:
            return partial(_spin, length_ms / 1000)
        return partial(make_kernel(length_ms, self._device).run, _nothing)


def _is_late(plan: DelayPlan, point: FencePoint) -> bool:
    """A stash is what the next step waits for, done what its own does."""
    if point.fence is FenceName.VERIFY_STASH:
        return plan.at(point.value + 1) is Late.STASH
    return point.fence is FenceName.DRAFT_DONE and plan.at(point.value) is Late.DONE


def _spin(length_s: float) -> None:
    """Without a sleep, which a busy machine lets end late."""
    end = time.monotonic() + length_s
    while time.monotonic() < end:
        pass


def _nothing() -> None:
    """The kernel only takes its time."""
