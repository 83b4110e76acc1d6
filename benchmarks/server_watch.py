"""Watches a server under load: its health, the memory and CPU time of its processes, and the resources in use."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.benchmarks.load_report import Percentiles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from slipstream.client import AsyncClient

INTERVAL_S = 0.2
TIMEOUT_S = 10.0
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SETTLE_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The answers to health checks."""

    statuses: tuple[str, ...]
    """Statuses that were seen, by a watch and by checks; an RPC error by its code."""
    check_ms: Percentiles
    """Time to the answers of the checks."""

    @property
    def is_always_serving(self) -> bool:
        """True if no other status was seen."""
        return self.statuses == ("SERVING",)


class HealthWatch:
    """Watches one server, and checks at intervals, on a connection of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._statuses: set[str] = set()
        self._check_s: list[float] = []

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watches for as long as the context."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            tasks = [asyncio.create_task(self._watch(stub)), asyncio.create_task(self._check(stub))]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def report(self) -> HealthReport:
        """The answers so far."""
        return HealthReport(tuple(sorted(self._statuses)), Percentiles.of_seconds(self._check_s))

    async def _watch(self, stub: health_pb2_grpc.HealthStub) -> None:
        try:
            async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                self._see(response.status)
        except grpc.aio.AioRpcError as error:
            self._statuses.add(error.code().name)

    async def _check(self, stub: health_pb2_grpc.HealthStub) -> None:
        while True:
            started = time.monotonic()
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                self._see(response.status)
            except grpc.aio.AioRpcError as error:
                self._statuses.add(error.code().name)
            self._check_s.append(time.monotonic() - started)
            await asyncio.sleep(INTERVAL_S)

    def _see(self, status: int) -> None:
        self._statuses.add(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory and CPU time of a process."""

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
        """`pids`: by the name of the process in the result."""
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
        """By name; needs at least two samples."""
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
            # Behind the command's name, which may hold any character: utime and stime are fields 14 and 15 of all.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            self._cpu[name].append((int(fields[11]) + int(fields[12])) / TICKS_PER_S)


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
