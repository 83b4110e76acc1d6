"""Finds a service that has stopped answering though its process lives: SIGSTOP, a deadlock, an endless loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from slipstream.cli.status import CHANNEL_OPTIONS, WHOLE_SERVER
from slipstream.cli.up.smg import HTTP, smg_answers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NUM_CHECKS = 4
"""Health checks in a row that a service must leave without an answer. Several, for this process may have been stopped
itself: then the deadline of the check that was under way has passed, and that of the next one has not."""


async def until_hung(address: str, timeout_s: float) -> None:
    """Returns when the service at `address` has answered no health check for so long. Any answer counts as one."""
    if address.startswith(HTTP):
        await _until_missed(lambda part_s: smg_answers(address, part_s), timeout_s)
        return
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def answers(part_s: float) -> bool:
            with suppress(grpc.aio.AioRpcError):
                await stub.Check(WHOLE_SERVER, timeout=part_s, wait_for_ready=True)
                return True
            return False

        await _until_missed(answers, timeout_s)


async def _until_missed(answers: Callable[[float], Awaitable[bool]], timeout_s: float) -> None:
    part_s = timeout_s / NUM_CHECKS
    num_missed = 0
    while num_missed < NUM_CHECKS:
        begun = time.monotonic()
        num_missed = 0 if await answers(part_s) else num_missed + 1
        await asyncio.sleep(max(0.0, part_s - (time.monotonic() - begun)))
