"""The measurements of `decode.py` and their medians."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

THREE, ONE = MODES = ("three processes", "one process")
PLAIN = "plain"
"""Without a draft, in two processes."""


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


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians over the repeats of one shape and batch in three processes; ratios to one process are of the medians."""

    three: Sequence[Measurement]
    one: Sequence[Measurement]

    @property
    def shape(self) -> str:
        """The shape that both modes ran."""
        return self.three[0].shape

    @property
    def batch(self) -> int:
        """The number of concurrent requests in both modes."""
        return self.three[0].batch

    def of(self, name: str) -> float:
        """The median of a quantity in three processes."""
        values: list[float] = [getattr(m, name) for m in self.three]
        return median(values)

    def cpu_ms(self, name: str) -> float | None:
        """The median CPU time of a process; None where that is not known."""
        times = [m.cpu_ms[name] for m in self.three if name in m.cpu_ms]
        return median(times) if times else None

    @property
    def one_process_ms(self) -> float:
        """A step of one process."""
        return median(m.step_ms for m in self.one)

    @property
    def overlap_efficiency(self) -> float:
        """The part of a step in which a worker worked."""
        return median(1 - m.bubble_ms / m.step_ms for m in self.three)

    def over_floor(self, role: str) -> float | None:
        """The time of "draft" or "verify" over its floor; None where that is not known."""
        pairs: list[tuple[float, float | None]] = [
            (getattr(m, f"{role}_ms"), getattr(m, f"{role}_floor_ms")) for m in self.three
        ]
        ratios = [time / floor for time, floor in pairs if floor is not None]
        return median(ratios) if ratios else None


def medians(measurements: Sequence[Measurement]) -> list[Medians]:
    """Medians of each shape and batch that both modes ran, in their order."""
    return [
        Medians(*([m for m in measurements if (m.shape, m.batch, m.mode) == (shape, batch, mode)] for mode in MODES))
        for shape, batch in dict.fromkeys((m.shape, m.batch) for m in measurements if m.mode == ONE)
    ]
