"""The summary of decode measurements."""

from __future__ import annotations

from dataclasses import replace

from slipstream.benchmarks.decode_report import ONE, THREE, Measurement, summary

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
    _, _, said, floors = summary(BOTH)
    assert said == ("small, batch 1: step 5.000 ms, 1.2500 of one process; overlap efficiency 0.9800; 700 tokens/s")
    assert floors == "    verify 1.300 of its floor, draft 2.000"
