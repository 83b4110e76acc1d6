"""Health checks of the workers once a second, apart from the steps."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.rpc.address import SAME_HOST
from slipstream.common.rpc.metrics import gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from prometheus_client import CollectorRegistry

    from slipstream.common.wire.step import Role
    from slipstream.scheduler.workers.link import LinkThread

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 1.0

WORKER_UP = gauge(
    "slipstream_worker_up", "1 if the worker said in its last heartbeat that it serves, 0 if not.", "service"
)
HEARTBEAT_AGE = gauge(
    "slipstream_worker_heartbeat_age_seconds",
    "Time since a worker last answered the scheduler's health check, which comes once a second; "
    "since the scheduler's start for one that never did.",
    "service",
)
SPECS = (WORKER_UP, HEARTBEAT_AGE)


class Heartbeats:
    """Checks the workers' health on the links' event loop, over connections of its own."""

    def __init__(
        self,
        registry: CollectorRegistry,
        addresses: Mapping[Role, Callable[[], str]],
        thread: LinkThread,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`addresses`: where each worker is now, empty for nowhere; called on any thread.

        `thread` must live until `close`.
        """
        up, age = WORKER_UP.gauge(registry), HEARTBEAT_AGE.gauge(registry)
        self._loop = thread.loop
        self._pulses = [_Pulse(address, interval_s) for address in addresses.values()]
        for role, pulse in zip(addresses, self._pulses, strict=True):
            up.labels(role.value).set_function(pulse.up)
            age.labels(role.value).set_function(pulse.age_s)
        self._running: list[Future[None]] = []

    def start(self) -> None:
        """The first check is sent at once."""
        self._running = [asyncio.run_coroutine_threadsafe(pulse.beat(), self._loop) for pulse in self._pulses]

    def close(self) -> None:
        """Ends the checks and their connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        for future in self._running:
            future.cancel()
        for future in self._running:
            with suppress(CancelledError, asyncio.CancelledError):
                await asyncio.wrap_future(future)


class _Pulse:
    """The health checks of one worker. Written on the event loop, read by the scraper's thread."""

    def __init__(self, address: Callable[[], str], interval_s: float) -> None:
        self._address = address
        self._interval_s = interval_s
        self._is_serving = False
        self._answered_at = time.monotonic()

    def up(self) -> float:
        return float(self._is_serving)

    def age_s(self) -> float:
        return time.monotonic() - self._answered_at

    async def beat(self) -> None:
        # Without this bound gRPC waits longer before it sees a worker that comes back.
        options = [*SAME_HOST.options(), ("grpc.max_reconnect_backoff_ms", int(1000 * self._interval_s))]
        while True:
            if not (address := self._address()):
                self._is_serving, self._answered_at = False, time.monotonic()
                await asyncio.sleep(self._interval_s)
                continue
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                while self._address() == address:
                    self._is_serving = await self._check(stub)
                    await asyncio.sleep(self._interval_s)

    async def _check(self, stub: health_pb2_grpc.HealthStub) -> bool:
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except Exception as error:
            logger.debug("no answer to a health check: %r", error)
            return False
        self._answered_at = time.monotonic()
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
