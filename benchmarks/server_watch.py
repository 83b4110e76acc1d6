"""Watches a server under load: the memory of its processes, and the resources in use."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import psutil

from slipstream.cli.cancellation import background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from slipstream.client import AsyncClient

SETTLE_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resident memory of a process: the means of the first third of a time and of the last."""

    first_rss_kib: int
    last_rss_kib: int

    @property
    def growth(self) -> float:
        """The last third over the first, less 1."""
        return self.last_rss_kib / self.first_rss_kib - 1


class MemoryWatch:
    """Samples the resident memory of processes of this host at intervals."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """`pids`: by the name of the process in the result."""
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._rss_kib: dict[str, list[int]] = {name: [] for name in pids}

    @asynccontextmanager
    async def watching(self, interval_s: float, *, after_s: float) -> AsyncIterator[None]:
        """Samples for as long as the context, and at its end; begins after some seconds."""
        async with background(self._watch(interval_s, after_s)):
            yield
        self._sample()

    def footprints(self) -> dict[str, Footprint]:
        """Returns the footprint of each process, by its name."""
        found = {}
        for name, rss_kib in self._rss_kib.items():
            third = max(1, len(rss_kib) // 3)
            found[name] = Footprint(round(mean(rss_kib[:third])), round(mean(rss_kib[-third:])))
        return found

    async def _watch(self, interval_s: float, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            self._sample()
            await asyncio.sleep(interval_s)

    def _sample(self) -> None:
        for name, process in self._processes.items():
            self._rss_kib[name].append(process.memory_info().rss // 1024)


@dataclass(frozen=True, slots=True)
class ResourceSnapshot:
    """The resources in use at one moment."""

    num_free_pages: int
    num_running: int
    num_waiting: int
    threads: dict[str, int]
    """By service."""
    descriptors: dict[str, int]

    def exceeds(self, before: ResourceSnapshot) -> bool:
        """True if more is in use than before."""
        counts = ((self.threads, before.threads), (self.descriptors, before.descriptors))
        return (
            (self.num_free_pages, self.num_running, self.num_waiting)
            != (before.num_free_pages, before.num_running, before.num_waiting)
        ) or any(now[name] > then[name] for now, then in counts for name in now)


async def resource_snapshot(client: AsyncClient) -> ResourceSnapshot:
    """The resources that the server has in use now; its services run on this host."""
    info = await client.server_info()
    processes = {service.name: Path("/proc") / str(service.pid) for service in info.services}
    return ResourceSnapshot(
        num_free_pages=info.num_free_pages,
        num_running=info.num_running,
        num_waiting=info.num_waiting,
        threads={name: len(list((path / "task").iterdir())) for name, path in processes.items()},
        descriptors={name: len(list((path / "fd").iterdir())) for name, path in processes.items()},
    )


async def settled(client: AsyncClient, before: ResourceSnapshot | None) -> ResourceSnapshot:
    """Waits until no more is in use than `before` (None: until nothing runs), at most SETTLE_S; returns the last."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await resource_snapshot(client)
        is_idle = now.num_running == now.num_waiting == 0
        if (is_idle if before is None else not now.exceeds(before)) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(POLL_S)
