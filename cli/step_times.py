"""Where the time of steps went, from the scheduler's Prometheus endpoint."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 5.0
_SUMS = {
    "slipstream_step_seconds_sum": "wall_s",
    "slipstream_step_seconds_count": "num_steps",
    "slipstream_bubble_seconds_total": "bubble_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds that all steps took together, whatever their labels."""

    wall_s: float = 0.0
    """From the end of one step to the end of the next."""
    num_steps: float = 0.0
    bubble_s: float = 0.0
    """Of `wall_s`, what no worker worked in."""

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        """What came since."""
        return StepTimes(
            wall_s=self.wall_s - earlier.wall_s,
            num_steps=self.num_steps - earlier.num_steps,
            bubble_s=self.bubble_s - earlier.bubble_s,
        )

    @property
    def mean_step_s(self) -> float:
        """Of the steps that were timed; NaN when none was."""
        return self.wall_s / self.num_steps if self.num_steps else float("nan")

    @property
    def overlap_efficiency(self) -> float:
        """1 - bubble / wall; NaN when no step was timed."""
        return 1.0 - self.bubble_s / self.wall_s if self.wall_s else float("nan")

    @classmethod
    def read(cls, text: str) -> StepTimes:
        """From a scrape in the text format."""
        sums = dict.fromkeys(_SUMS.values(), 0.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (field := _SUMS.get(sample.name)) is not None:
                    sums[field] += sample.value
        return cls(**sums)

    @classmethod
    async def scrape(cls, metrics_port: int) -> StepTimes:
        """From the endpoint on this host."""
        return cls.read(await asyncio.to_thread(_get, f"http://127.0.0.1:{metrics_port}/metrics"))


def _get(url: str) -> str:
    # Without the proxies of the environment: this is our own process.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=_TIMEOUT_S) as response:
        text: str = response.read().decode()
        return text
