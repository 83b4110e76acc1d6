"""Is a server's health SERVING all the while, and how soon does it say so?"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.benchmarks.load_report import Percentiles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

INTERVAL_S = 0.2
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What was answered."""

    statuses: tuple[str, ...]
    """All that were seen, by a watch and by checks; an RPC error by its code."""
    check_ms: Percentiles
    """Time to the answers of the checks."""

    @property
    def is_always_serving(self) -> bool:
        """Whether nothing else was ever said."""
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
        """What was seen so far."""
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
