"""What is said of what `decode` measured."""

from __future__ import annotations

from dataclasses import asdict, replace

from slipstream.benchmarks.decode_report import ONE, THREE, Measurement, summary
from slipstream.benchmarks.figures_gpu import decode_rows

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
    assert said == (
        "small, batch 1: step 5.000 ms, 1.2500 of one process, 1.0204 of its kernels; overlap efficiency 0.9800; "
        "700 tokens/s"
    )
    assert floors == "    verify 1.300 of its floor, draft 2.000"


def test_the_readme_has_medians_over_batches_and_the_cpu_time_of_the_largest() -> None:
    larger = [
        replace(m, batch=8, tokens_per_second=4200.0, bubble_ms=0.2, cpu_ms={**m.cpu_ms, "step-loop": 0.75})
        for m in BOTH
    ]
    ((what, said),) = decode_rows([asdict(m) for m in (*larger, *BOTH)])
    assert "the shape small on an A GPU" in what
    assert said == (
        "tokens/s at batch 1, 8: 700, 4,200; a step takes at most 1.020 of its kernels and 1.250 of one process; "
        "overlap efficiency at least 0.960; at batch 1 verify takes 1.30 and draft 2.00 of what reading their bytes "
        "does; CPU time of a step at batch 8: step loop 0.75 ms, whole scheduler 1.25 ms"
    )
