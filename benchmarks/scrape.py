"""Reads a Prometheus endpoint, and takes differences of counters."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one moment: value by (name, sorted labels)."""

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum of all samples of this name that have these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(value for (found, given), value in self.samples.items() if found == name and wanted <= set(given))

    def since(self, earlier: Scrape) -> Scrape:
        """What was added since."""
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})


async def scrape(port: int) -> Scrape:
    """The endpoint of this host at `port`, now."""
    text = await asyncio.to_thread(_fetch, port)
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return Scrape(samples)


def _fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text
