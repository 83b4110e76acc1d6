"""A scheduler that sends commands late at times."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks.delayed_plan import HOLD_S, Late
from slipstream.benchmarks.dummy_kernel import HostKernel
from slipstream.common.worker.step import Role
from slipstream.scheduler.core.loop import StepLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.benchmarks.delayed_plan import DelayPlan
    from slipstream.common.device.interface import Fence
    from slipstream.common.worker.step import StepCommand
    from slipstream.scheduler.workers.link import Link

DRAFT_TIMEOUT_S = 10.0


_VERIFY_HELD = (Late.VERIFY_HELD, Late.VERIFY_LATER)
_FIRST_HELD = (Late.FIRST_HELD, Late.FIRST_LATER, *_VERIFY_HELD)


class DelayedDispatch:
    """Implements `Dispatch` for fences whose wait may be enqueued before their signal."""

    def __init__(self, plan: DelayPlan, draft_done: Fence) -> None:
        self._plan = plan
        self._draft_done = draft_done
        self._hold = HostKernel(1000 * HOLD_S)
        self._hold_longer = HostKernel(1000 * HOLD_S + plan.delay_us / 1000)

    def send(self, commands: Sequence[tuple[Link, StepCommand]]) -> None:
        """See `Dispatch.send`."""
        is_plain = len(commands) == 1
        for number, (link, command) in enumerate(commands):
            late = self._plan.at(command.step).in_step(is_plain=is_plain)
            if number == 0 and late in _FIRST_HELD:
                self._wait(is_longer=late is Late.FIRST_LATER)
            if number == 1 and link.role is Role.VERIFY and late in _VERIFY_HELD:
                self._wait_for_draft(command.step)
                self._wait(is_longer=late is Late.VERIFY_LATER)
            link.send(command)

    def _wait(self, *, is_longer: bool) -> None:
        (self._hold_longer if is_longer else self._hold).run(_nothing)

    def _wait_for_draft(self, step: int) -> None:
        if not self._draft_done.wait_on_host(step, DRAFT_TIMEOUT_S):
            raise RuntimeError(f"draft did not end step {step} within {DRAFT_TIMEOUT_S:.0f} s")


def delayed_loop(plan: DelayPlan) -> Callable[..., StepLoop]:
    """Makes a `StepLoop` with another dispatch."""
    return partial(_delayed_loop, plan)


def _delayed_loop(plan: DelayPlan, *given: Any, **others: Any) -> StepLoop:
    return StepLoop(*given, **others | {"dispatch": DelayedDispatch(plan, others["draft_done"])})


def _nothing() -> None:
    """The kernel only takes its time."""
