"""Memory, threads and descriptors of a server's processes, and what it has in use."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean, median
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.benchmarks.runner import Row
    from slipstream.client import AsyncClient

WARM_UP = 1 / 3
"""The share of a process's life in which caches fill: a gateway has as many ended jobs as it keeps, allocators have
met the largest steps."""
LEAST_FIT_S = 60.0
"""A process that lived for less is not judged."""
BOUNDS = {"memory_mib": 0.05, "threads": 1.0, "descriptors": 1.0}
"""The most that a process may gain: a share of its mean memory; a number of threads and descriptors."""
SETTLE_S = 20.0
POLL_S = 0.1


@dataclass(slots=True)
class Usage:
    """Samples of the memory, threads and descriptors of one process."""

    service: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    """Since the start of the run."""
    memory_mib: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def sample(self, at_s: float) -> None:
        """Adds what the process has now. Raises psutil.NoSuchProcess."""
        process = psutil.Process(self.pid)
        with process.oneshot():
            memory, threads, descriptors = process.memory_info().rss, process.num_threads(), process.num_fds()
        self.at_s.append(at_s)
        self.memory_mib.append(round(memory / 2**20, 1))
        self.threads.append(threads)
        self.descriptors.append(descriptors)

    def growths(self) -> list[Row]:
        """Returns the growth of each quantity after the warm-up; none for a process that lived too briefly."""
        first = int(WARM_UP * len(self.at_s))
        times = self.at_s[first:]
        if not times or times[-1] - times[0] < LEAST_FIT_S:
            return []
        found = []
        for name, bound in BOUNDS.items():
            values = getattr(self, name)[first:]
            seconds = times[-1] - times[0]
            gained, low, high = (round(slope * seconds, 3) for slope in slopes(times, values))
            most = round(bound * mean(values) if name == "memory_mib" else bound, 3)
            row = {"service": self.service, "quantity": name, "seconds": round(seconds), "bound": most}
            # Gained over these seconds, and the ends of its 95 % confidence interval; a slope is not there by chance.
            row |= {"gained": gained, "low": low, "high": high, "is_slope": gained > most and low > 0}
            found.append(row)
        return found


def slopes(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The median slope of all pairs of samples (Theil and Sen), and the ends of its 95 % confidence interval.

    Single samples that lie far off, such as those of a moment without an epoch, do not change it.
    """
    points = zip(times, values, strict=True)
    pairs = sorted((after[1] - before[1]) / (after[0] - before[0]) for before, after in combinations(points, 2))
    count = len(times)
    # Of Kendall's score, whose deviation says which pair's slope is at the interval's end.
    deviation = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    low = max(0, int((len(pairs) - 1.96 * deviation) / 2))
    return median(pairs), pairs[low], pairs[-1 - low]


async def in_use(client: AsyncClient) -> dict[str, int]:
    """Requests, KV pages, and the threads and descriptors of each service that are in use now, on this host."""
    info = await client.server_info()
    found = {"requests": info.num_running + info.num_waiting, "pages": info.num_pages - info.num_free_pages}
    for service in info.services:
        process = psutil.Process(service.pid)
        found[f"{service.name}, threads"] = process.num_threads()
        found[f"{service.name}, descriptors"] = process.num_fds()
    return found


async def settled(client: AsyncClient, before: dict[str, int]) -> dict[str, int]:
    """Waits until no more is in use than before, for SETTLE_S at most; returns what is in use then."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await in_use(client)
        if not exceeding(now, before) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(POLL_S)


def exceeding(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """The quantities of which more is in use than before."""
    return [f"{name}: {before[name]}, then {now[name]}" for name in before if now[name] > before[name]]
