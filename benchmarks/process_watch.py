"""What processes take over a while: memory and time on the cores."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process took."""

    seconds: float
    cpu_share: float
    """Of one core."""
    first_rss_kib: int
    """Resident memory, mean of the first third of the time ..."""
    last_rss_kib: int
    """... and of the last."""
    most_rss_kib: int
    slope_kib_per_minute: float
    """Of the least-squares line through all samples."""
    rss_kib: list[int]
    """The samples."""

    @property
    def growth(self) -> float:
        """Resident memory of the last third over that of the first, less 1."""
        return self.last_rss_kib / self.first_rss_kib - 1


class ProcessWatch:
    """Samples processes of this host at intervals."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """`pids` by the name that a process gets in the result."""
        self._processes = {name: Path("/proc") / str(pid) for name, pid in pids.items()}
        self._times: list[float] = []
        self._rss: dict[str, list[int]] = {name: [] for name in pids}
        self._cpu: dict[str, list[float]] = {name: [] for name in pids}

    @asynccontextmanager
    async def watching(self, interval_s: float, *, after_s: float = 0.0) -> AsyncIterator[None]:
        """Samples for as long as the context, from `after_s` on, and at its end."""
        task = asyncio.create_task(self._watch(interval_s, after_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._sample()

    def footprints(self) -> dict[str, Footprint]:
        """By name, of what was sampled; at least two samples are needed."""
        seconds = self._times[-1] - self._times[0]
        third = max(1, len(self._times) // 3)
        result = {}
        for name in self._processes:
            rss, cpu = self._rss[name], self._cpu[name]
            slope = float(np.polyfit(self._times, rss, 1)[0])
            result[name] = Footprint(
                seconds=seconds,
                cpu_share=(cpu[-1] - cpu[0]) / seconds,
                first_rss_kib=round(mean(rss[:third])),
                last_rss_kib=round(mean(rss[-third:])),
                most_rss_kib=max(rss),
                slope_kib_per_minute=60 * slope,
                rss_kib=rss,
            )
        return result

    async def _watch(self, interval_s: float, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            self._sample()
            await asyncio.sleep(interval_s)

    def _sample(self) -> None:
        self._times.append(time.monotonic())
        for name, process in self._processes.items():
            self._rss[name].append(PAGE_KIB * int((process / "statm").read_text().split()[1]))
            # Behind the command's name, which may hold anything: utime and stime are fields 14 and 15 of all.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            self._cpu[name].append((int(fields[11]) + int(fields[12])) / TICKS_PER_S)
