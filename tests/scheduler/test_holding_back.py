"""While a step takes long, the loop decides late on the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.wire.events import Site
from slipstream.scheduler import loop
from slipstream.scheduler.batch import Batch
from slipstream.scheduler.loop import LEAST_HOLD_S
from slipstream.scheduler.records import Step
from slipstream.scheduler.result_poller import GAP_STEPS, MOST_HOLD_S, ResultPoller
from tests.harness.dummy_epoch import make_epoch, make_job, workers


@dataclass(slots=True)
class Held:
    """Called with the seconds for which a step would be held back."""

    sleep: Callable[[float], None] = lambda _: None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Takes the place of the sleep with which the loop holds a step back."""
    found = Held()
    clock = SimpleNamespace(monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, sleep=lambda s: found.sleep(s))
    monkeypatch.setattr(loop, "time", clock)
    return found


@pytest.mark.parametrize("step_s", [0.0, 0.06])
def test_long_steps_are_decided_on_late(step_s: float, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once enough of their size were seen, behind the last output and with the step before it under way."""
    arrived = ResultPoller.arrived

    def arrived_as_usual(self: ResultPoller, *sent: Any) -> float:
        size, gap_s = self._under_way[0], arrived(self, *sent)
        size.gaps_s[-1] = step_s  # however busy the machine is
        return gap_s

    monkeypatch.setattr(ResultPoller, "arrived", arrived_as_usual)
    with workers() as both:
        epoch, job = make_epoch(both[:1]), make_job(max_new_tokens=20)
        holds: list[tuple[float, int, int]] = []
        held.sleep = lambda seconds: holds.append((seconds, epoch.epoch.last_sent, len(epoch.outputs[job])))
        epoch.run([job])
        recorded = [record.step for record in epoch.epoch.trace.host_events(0) if record.site is Site.HOLD]
        assert recorded == [last_sent for _, last_sent, _ in holds]
        if step_s:
            assert len(holds) > 5
            assert all(LEAST_HOLD_S <= seconds <= MOST_HOLD_S for seconds, _, _ in holds)
            assert all(last_sent == num_tokens + 1 > GAP_STEPS for _, last_sent, num_tokens in holds)
        else:
            assert not holds


def test_who_comes_while_a_step_is_held_back_is_in_it(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    taking_in: list[int] = []
    next_step = Batch.next_step

    def recorded(*args: Any, **options: Any) -> Step | None:
        step = next_step(*args, **options)
        if step is not None and step.chunks:
            taking_in.append(step.number)
        return step

    monkeypatch.setattr(Batch, "next_step", recorded)
    monkeypatch.setattr(ResultPoller, "hold_s", 3600.0)
    with workers() as both:
        epoch, job, late = make_epoch(both[:1]), make_job(max_new_tokens=16), make_job(max_new_tokens=2)

        def sleep(_: float) -> None:
            if len(epoch.outputs[job]) == 12:
                epoch.jobs.add(late)

        held.sleep = sleep
        epoch.run([job])
    assert taking_in == [1, 14], "step 12 brings the token, and 13 is under way"
