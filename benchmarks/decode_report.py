"""What `decode` measures, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

THREE, ONE = MODES = ("three processes", "one process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One repeat of one mode; times are means per decode step, in milliseconds."""

    shape: str
    mode: str
    batch: int
    repeat: int
    step_ms: float
    draft_ms: float
    verify_ms: float
    bubble_ms: float
    """Neither worker worked."""
    draft_floor_ms: float | None
    """What draft must read over the bandwidth of a copy; None where that is not known."""
    verify_floor_ms: float | None
    tokens_per_second: float
    """By this process's clock."""
    mean_accept_length: float
    num_steps: int
    cpu_ms: dict[str, float]
    """CPU time of each process per step, and of the thread in it that decides the steps."""
    fence: str
    mps: bool
    copy_bandwidth: float | None
    """Bytes per second."""
    host: str


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """Medians, and three processes over one."""
    lines = ["", "medians of the repeats:"]
    for shape, batch in dict.fromkeys((m.shape, m.batch) for m in measurements):
        by_mode = {
            mode: [m for m in measurements if (m.shape, m.batch, m.mode) == (shape, batch, mode)] for mode in MODES
        }
        three, one = (median(m.step_ms for m in by_mode[mode]) for mode in MODES)
        busy = median(m.draft_ms + m.verify_ms for m in by_mode[THREE])
        rate = median(m.tokens_per_second for m in by_mode[THREE])
        efficiency = median(1 - m.bubble_ms / m.step_ms for m in by_mode[THREE])
        lines.append(
            f"{shape}, batch {batch}: step {three:.3f} ms, {three / one:.4f} of one process, {three / busy:.4f} of its "
            f"kernels; overlap efficiency {efficiency:.4f}; {rate:.0f} tokens/s"
        )
        floors = [(m.verify_ms, m.verify_floor_ms, m.draft_ms, m.draft_floor_ms) for m in by_mode[THREE]]
        ratios = [(v / vf, d / df) for v, vf, d, df in floors if vf is not None and df is not None]
        if ratios:
            verify, draft = (median(ratio[side] for ratio in ratios) for side in (0, 1))
            lines.append(f"    verify {verify:.3f} of its floor, draft {draft:.3f}")
    return lines


def line(m: Measurement) -> str:
    """One repeat."""
    cpu = ", ".join(f"{name} {value:.2f}" for name, value in m.cpu_ms.items())
    return (
        f"{m.shape}, batch {m.batch}, {m.mode}, repeat {m.repeat}: step {m.step_ms:.3f} ms = draft {m.draft_ms:.3f} + "
        f"verify {m.verify_ms:.3f} + bubble {m.bubble_ms:.3f}; {m.tokens_per_second:.0f} tokens/s, "
        f"{m.mean_accept_length:.2f} a step; CPU ms a step: {cpu}"
    )
