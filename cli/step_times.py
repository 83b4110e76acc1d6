"""Times of steps, from the scheduler's Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.rpc.scrape import Scrape, scrape
from slipstream.scheduler.telemetry.step_metrics import BUBBLE_SECONDS, STEP_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds that all steps took together, whatever their labels."""

    wall_s: float
    """From the end of one step to the end of the next."""
    num_steps: float
    bubble_s: float
    """The part of `wall_s` in which no worker worked."""

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(
            wall_s=self.wall_s - earlier.wall_s,
            num_steps=self.num_steps - earlier.num_steps,
            bubble_s=self.bubble_s - earlier.bubble_s,
        )

    @property
    def mean_step_s(self) -> float:
        """Mean time of a step; NaN when none was timed."""
        return self.wall_s / self.num_steps if self.num_steps else float("nan")

    @property
    def overlap_efficiency(self) -> float:
        """1 - bubble / wall; NaN when no step was timed."""
        return 1.0 - self.bubble_s / self.wall_s if self.wall_s else float("nan")

    @classmethod
    def of(cls, samples: Scrape) -> StepTimes:
        """Reads a scrape, or what was added between two."""
        return cls(
            wall_s=samples.total(f"{STEP_SECONDS.name}_sum"),
            num_steps=samples.total(f"{STEP_SECONDS.name}_count"),
            bubble_s=samples.total(BUBBLE_SECONDS.name),
        )

    @classmethod
    async def scrape(cls, metrics_port: int) -> StepTimes:
        """Reads the endpoint on this host."""
        return cls.of(await scrape(metrics_port))
