"""Marks of a scheduler's steps: the host's clock when a step's result was taken in, and the metrics' sums up to it.

The clock is read where the loop has a result in hand; no stamp has a part in it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TextIO, TypedDict

from slipstream.common.worker.step import StepKind
from slipstream.scheduler.core.results import ResultReader
from slipstream.scheduler.telemetry.step_metrics import StepMetrics
from slipstream.scheduler.telemetry.timings import EDGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prometheus_client import Counter, Histogram

    from slipstream.benchmarks.delayed_plan import DelayPlan
    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.layout import FutureMapShape
    from slipstream.scheduler.core.results import Step, StepResult
    from slipstream.scheduler.telemetry.step_metrics import StepMetricFamilies
    from slipstream.scheduler.telemetry.timings import StepTiming


SERVICES = ("draft", "verify")


class StepSums(TypedDict):
    """What the metrics of decode steps have summed up."""

    num_timed: int
    """`slipstream_step_seconds_count`."""
    step_s: float
    """`slipstream_step_seconds_sum`."""
    busy_s: dict[str, float]
    """By service."""
    bubble_s: dict[str, float]
    """By edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What was up to the end of a step; all sums are of the scheduler's whole life."""

    step: int
    taken_in_ns: int
    """CLOCK_MONOTONIC when its result was."""
    num_prefills: int
    """Steps that took in prompts."""
    num_plain: int
    """Steps without a draft."""
    num_rows: int
    """Slots in all steps: it tells whether requests came or went."""
    num_timed: int
    """This and what follows: as in `StepSums`."""
    step_s: float
    busy_s: dict[str, float]
    bubble_s: dict[str, float]


class Marks:
    """Writes a mark at the end of each block of a plan, one line of JSON each. Belongs to the loop's thread."""

    def __init__(self, plan: DelayPlan, file: TextIO) -> None:
        self._plan = plan
        self._file = file
        self._taken_in: dict[int, tuple[int, int]] = {}
        self._counts = dict.fromkeys(StepKind, 0)
        self._num_rows = 0

    def taken_in(self, step: int, num_rows: int) -> None:
        """The result of a step is on the host."""
        self._num_rows += num_rows
        if self._plan.ends_block(step):
            self._taken_in[step] = time.monotonic_ns(), self._num_rows

    def observed(self, kind: StepKind, sums: Callable[[], StepSums]) -> None:
        """The metrics have taken in another step's times: they do in order, once for each."""
        self._counts[kind] += 1
        step = sum(self._counts.values())
        if self._plan.ends_block(step):
            taken_in_ns, num_rows = self._taken_in.pop(step)
            self._write(
                Mark(
                    step=step,
                    taken_in_ns=taken_in_ns,
                    num_prefills=self._counts[StepKind.PREFILL],
                    num_plain=self._counts[StepKind.PLAIN],
                    num_rows=num_rows,
                    **sums(),
                )
            )

    def _write(self, mark: Mark) -> None:
        self._file.write(json.dumps(asdict(mark)) + "\n")
        self._file.flush()


class TimedResults(ResultReader):
    """Says when a result was there."""

    def __init__(self, marks: Marks, device: Device, arena: Arena, shape: FutureMapShape, log: AccessLog) -> None:
        super().__init__(device, arena, shape, log)
        self._marks = marks

    def resolve(self, step: Step, timeout_s: float) -> StepResult | None:
        """See `ResultReader.resolve`."""
        result = super().resolve(step, timeout_s)
        if result is not None:
            self._marks.taken_in(step.number, len(result.tokens))
        return result


class MarkingMetrics(StepMetrics):
    """The product's metrics, looked at when a block ends."""

    def __init__(self, marks: Marks, families: StepMetricFamilies, *, fence: str, mps: str, algorithm: str) -> None:
        super().__init__(families, fence=fence, mps=mps, algorithm=algorithm)
        self._marks = marks
        own = {"fence": fence, "mps": mps, "algorithm": algorithm, "phase": "decode"}
        self._steps = families.step_seconds.labels(**own)
        self._busy_of = {name: families.busy_seconds.labels(**own, service=name) for name in SERVICES}
        self._bubble_of = {edge: families.bubble_seconds.labels(**own, edge=edge) for edge in EDGES}

    def observe(self, timing: StepTiming) -> None:
        """See `StepMetrics.observe`."""
        super().observe(timing)
        self._marks.observed(timing.kind, self._sums)

    def _sums(self) -> StepSums:
        """As a scrape would find them now."""
        return StepSums(
            num_timed=int(_value(self._steps, "_count")),
            step_s=_value(self._steps, "_sum"),
            busy_s={name: _value(metric, "_total") for name, metric in self._busy_of.items()},
            bubble_s={edge: _value(metric, "_total") for edge, metric in self._bubble_of.items()},
        )


def _value(metric: Counter | Histogram, suffix: str) -> float:
    samples = (sample for found in metric.collect() for sample in found.samples)
    return next(sample.value for sample in samples if sample.name.endswith(suffix))


def read_marks(path: Path) -> list[Mark]:
    """Those that are written so far, while others may be."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [Mark(**json.loads(line)) for line in whole.splitlines()]
