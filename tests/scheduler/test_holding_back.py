"""While a step takes long, the loop decides late on the next one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.wire.events import Site
from slipstream.scheduler import loop, result_poller
from slipstream.scheduler.batch import Batch
from slipstream.scheduler.loop import LEAST_HOLD_S
from slipstream.scheduler.records import Step
from slipstream.scheduler.result_poller import GAP_STEPS, MOST_HOLD_S
from tests.harness.counted_jobs import Job, OutputRow
from tests.harness.dummy_epoch import make_epoch, make_job, workers


@pytest.mark.parametrize("verify_ms", [0.0, 60.0])
def test_long_steps_are_decided_on_late(verify_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once enough of their size were seen, behind the last output and with the step before it under way."""
    with workers(verify_ms=verify_ms) as both:
        epoch, job = make_epoch(both[:1]), make_job(max_new_tokens=20)
        held: list[tuple[float, int, int]] = []
        clock = SimpleNamespace(
            monotonic=time.monotonic,
            monotonic_ns=time.monotonic_ns,
            sleep=lambda seconds: held.append((seconds, epoch.epoch.last_sent, len(epoch.outputs[job]))),
        )
        monkeypatch.setattr(loop, "time", clock)
        epoch.run([job])
        holds = [record.step for record in epoch.epoch.trace.host_events(0) if record.site is Site.HOLD]
        assert holds == [last_sent for _, last_sent, _ in held]
        if verify_ms:
            assert len(held) > 5
            assert all(LEAST_HOLD_S <= seconds <= MOST_HOLD_S for seconds, _, _ in held)
            assert all(last_sent == num_tokens + 1 > GAP_STEPS for _, last_sent, num_tokens in held)
        else:
            assert not held


def test_who_comes_while_a_step_is_held_back_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taking_in: list[int] = []
    next_step = Batch.next_step

    def recorded(*args: Any, **options: Any) -> Step | None:
        step = next_step(*args, **options)
        if step is not None and step.chunks:
            taking_in.append(step.number)
        return step

    monkeypatch.setattr(Batch, "next_step", recorded)
    monkeypatch.setattr(result_poller, "MOST_HOLD_S", 1.0)  # so that part of a step is long on a busy machine, too
    with workers(verify_ms=120.0) as both:
        epoch, job, late = make_epoch(both[:1]), make_job(max_new_tokens=16), make_job(max_new_tokens=2)

        def on_progress(of: Job, _: OutputRow) -> None:
            if of is job and len(epoch.outputs[job]) == 12:
                epoch.jobs.add(late)

        epoch.on_progress = on_progress
        epoch.run([job])
    assert taking_in == [1, 14], "step 12 brings the token, and 13 is under way"
