"""The measurements of `decode.py` and their medians."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    """Time in which neither worker worked."""
    draft_floor_ms: float | None
    """The bytes that draft must read over the bandwidth of a copy; None where that is not known."""
    verify_floor_ms: float | None
    tokens_per_second: float
    """By the benchmark's own clock."""
    mean_accept_length: float
    num_steps: int
    cpu_ms: dict[str, float]
    """CPU time of each process per step, and of the thread in it that decides the steps."""
    fence: str
    mps: bool
    copy_bandwidth: float | None
    """Bytes per second."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Medians:
    """Medians over the repeats of one shape and batch in three processes; ratios to one process are of the medians."""

    shape: str
    batch: int
    num_repeats: int
    step_ms: float
    draft_ms: float
    verify_ms: float
    bubble_ms: float
    tokens_per_second: float
    overlap_efficiency: float
    one_process_ms: float
    """A step of one process."""
    over_one: float
    """A step over a step of one process."""
    draft_over_floor: float | None
    verify_over_floor: float | None
    cpu_ms: dict[str, float]


def medians(measurements: Sequence[Measurement]) -> list[Medians]:
    """Medians of each shape and batch, in their order."""
    return [
        _medians(*([m for m in measurements if (m.shape, m.batch, m.mode) == (shape, batch, mode)] for mode in MODES))
        for shape, batch in dict.fromkeys((m.shape, m.batch) for m in measurements)
    ]


def _medians(three: Sequence[Measurement], one: Sequence[Measurement]) -> Medians:
    step, one_process = median(m.step_ms for m in three), median(m.step_ms for m in one)
    return Medians(
        shape=three[0].shape,
        batch=three[0].batch,
        num_repeats=len(three),
        step_ms=step,
        draft_ms=median(m.draft_ms for m in three),
        verify_ms=median(m.verify_ms for m in three),
        bubble_ms=median(m.bubble_ms for m in three),
        tokens_per_second=median(m.tokens_per_second for m in three),
        overlap_efficiency=median(1 - m.bubble_ms / m.step_ms for m in three),
        one_process_ms=one_process,
        over_one=step / one_process,
        draft_over_floor=_over_floor((m.draft_ms, m.draft_floor_ms) for m in three),
        verify_over_floor=_over_floor((m.verify_ms, m.verify_floor_ms) for m in three),
        cpu_ms={name: median(m.cpu_ms[name] for m in three) for name in three[0].cpu_ms},
    )


def _over_floor(times: Iterable[tuple[float, float | None]]) -> float | None:
    ratios = [time / floor for time, floor in times if floor is not None]
    return median(ratios) if ratios else None
