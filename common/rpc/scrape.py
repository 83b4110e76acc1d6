"""Reads a Prometheus endpoint, and takes differences of counters."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from slipstream.common.rpc.metrics import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape: value by (name, sorted labels)."""

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def read(cls, text: str) -> Scrape:
        """Reads the text format. Raises ValueError for anything else."""
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples of this name that have these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(value for (found, given), value in self.samples.items() if found == name and wanted <= set(given))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Returns `total` for each value of `label`, in the order of the samples."""
        values = dict.fromkeys(dict(given)[label] for found, given in self.samples if found == name)
        return {value: self.total(name, **labels, **{label: value}) for value in values}

    def since(self, earlier: Scrape) -> Scrape:
        """Returns the differences to an earlier scrape."""
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})


def joined(scrapes: Mapping[str, Scrape]) -> Scrape:
    """The samples of several services in one, each with its service's name as the label `job`."""
    return Scrape(
        {
            (name, tuple(sorted([*labels, ("job", job)]))): value
            for job, page in scrapes.items()
            for (name, labels), value in page.samples.items()
        }
    )


async def scrape(port: int, *, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Reads the endpoint of this host at `port`. Raises OSError when it cannot be read."""
    return Scrape.read(await asyncio.to_thread(_fetch, port, timeout_s))


def _fetch(port: int, timeout_s: float) -> str:
    # Without the proxies of the environment: this is a process of this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{LOOPBACK}:{port}/metrics", timeout=timeout_s) as response:
        text: str = response.read().decode()
        return text
