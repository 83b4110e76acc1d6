"""The medians of decode measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.benchmarks.decode_report import ONE, PLAIN, THREE, Measurement, medians

MEASURED = Measurement(
    shape="small",
    mode=THREE,
    batch=1,
    repeat=0,
    step_ms=5.0,
    draft_ms=1.0,
    verify_ms=3.9,
    bubble_ms=0.1,
    draft_floor_ms=0.5,
    verify_floor_ms=3.0,
    tokens_per_second=700.0,
    mean_accept_length=3.5,
    num_steps=100,
    cpu_ms={"draft": 0.6, "verify": 0.7, "scheduler": 1.25, "step-loop": 0.5},
    fence="timeline",
    mps=True,
    copy_bandwidth=4e12,
    host="A GPU, driver 1",
)
BOTH = (MEASURED, replace(MEASURED, mode=ONE, step_ms=4.0))


def test_both_modes_are_compared() -> None:
    (found,) = medians((*BOTH, *(replace(MEASURED, shape="other", mode=mode) for mode in (PLAIN, THREE))))
    assert (found.shape, found.batch, len(found.three), found.of("step_ms")) == ("small", 1, 1, 5.0)
    assert (found.one_process_ms, found.cpu_ms("scheduler")) == (4.0, 1.25)
    assert found.overlap_efficiency == pytest.approx(0.98)
    assert (found.over_floor("verify"), found.over_floor("draft")) == pytest.approx((1.3, 2.0))


def test_a_floor_that_is_not_known_is_left_out() -> None:
    (found,) = medians([replace(m, draft_floor_ms=None, verify_floor_ms=None) for m in BOTH])
    assert found.over_floor("verify") is found.over_floor("draft") is None


def test_cpu_times_that_some_repeats_lack_are_those_of_the_others() -> None:
    without = replace(MEASURED, cpu_ms={"verify": 0.9})
    assert medians([without, *BOTH])[0].cpu_ms("draft") == 0.6
    (found,) = medians([without, BOTH[1]])
    assert (found.cpu_ms("draft"), found.cpu_ms("verify")) == (None, 0.9)
