"""The health of a service, by gRPC or, for a door, by HTTP: whether it serves, and whether it hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.cli.process import HTTP
from slipstream.client.connection import open_async_channel
from slipstream.common.errors import ConfigError, UnavailableError
from slipstream.common.rpc.address import UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Unpack

    from slipstream.client.connection import AccessOptions

    Answers = Callable[[float], Awaitable[bool]]
    """Checks the health of a service: whether it answers within this time, in seconds."""

NUM_CHECKS = 4
"""Health checks in a row that a service must leave without an answer. Several, for this process may have been stopped
itself: then the deadline of the check that was under way has passed, and that of the next check has not."""
_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.05
_CHECK_TIMEOUT_S = 2.0
_DOOR_TIMEOUT_S = 8.0
"""Longer than a door waits for its gateway before it says that it does not serve."""
# Health is asked on this host, where a proxy has no business and a retry costs nothing.
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)
_WHOLE_SERVER = health_pb2.HealthCheckRequest(service="")


async def check(address: str, **access: Unpack[AccessOptions]) -> str:
    """Health of the server at `address` now: "SERVING", "NOT_SERVING" or "UNKNOWN".

    Raises UnavailableError when no server answers there.
    """
    if address.startswith(HTTP):
        try:
            async with asyncio.timeout(_DOOR_TIMEOUT_S):
                return "SERVING" if await _door_status(address, "/health") == b"200" else "NOT_SERVING"
        except OSError as error:
            raise UnavailableError(f"{address} does not answer: {error}") from error
    async with open_async_channel(address, _CHANNEL_OPTIONS, access) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(_WHOLE_SERVER, timeout=_CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"{address} does not answer: {error.details()}") from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


async def check_or_kill(address: str) -> str:
    """Returns the health of the service at unix:PATH. Kills the process that listens there and does not answer.

    Raises UnavailableError when no process listens there, and when one was killed.
    """
    parsed = parse_address(address, field="ADDRESS")
    if not isinstance(parsed, UnixAddress):
        raise ConfigError("kill_hung", address, "unix:PATH, whose process is known")
    num_missed = 0
    while True:
        try:
            return await check(address)
        except UnavailableError as error:
            if (pid := _listener(parsed)) is None:
                raise
            num_missed += 1
            if num_missed == NUM_CHECKS:
                os.kill(pid, signal.SIGKILL)
                raise UnavailableError(f"{address} does not answer: its process {pid} was killed") from error


def _listener(address: UnixAddress) -> int | None:
    """Id of the process that listens there; None if there is none, or none that can be seen from here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog of a process that is stopped
        try:
            probe.connect(str(address.path))
        except OSError:
            return None
        # Those of the process that called `listen`, in our own namespace: 0 if it is not there.
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid or None


async def wait_until_serving(address: str) -> None:
    """Returns when the server at `address` says SERVING, or a door at http://unix:PATH that it serves.

    Tries for ever: bound it, and watch its process.
    """
    if address.startswith(HTTP):
        while True:
            with suppress(OSError):  # no server is there yet
                if await _door_status(address, "/health") == b"200":
                    return
            await asyncio.sleep(_RETRY_S)
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):
                # A stream that fails leaks memory (grpc/grpc#43360): it begins when a server is there.
                await stub.Check(_WHOLE_SERVER, timeout=_CHECK_TIMEOUT_S, wait_for_ready=True)
                async for response in stub.Watch(_WHOLE_SERVER):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(_RETRY_S)


@asynccontextmanager
async def health_checks(address: str) -> AsyncIterator[Answers]:
    """Yields what checks the health of the service at `address`. Any answer counts."""
    if address.startswith(HTTP):
        yield partial(_door_answers, address)
        return
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def answers(timeout_s: float) -> bool:
            with suppress(grpc.aio.AioRpcError):
                await stub.Check(_WHOLE_SERVER, timeout=timeout_s, wait_for_ready=True)
                return True
            return False

        yield answers


async def until_hung(answers: Answers, timeout_s: float) -> None:
    """Returns when a service that has just answered a health check answers none for `timeout_s`."""
    part_s, is_alive = timeout_s / NUM_CHECKS, True
    while is_alive:
        await asyncio.sleep(part_s)
        is_alive = await answers_within(answers, timeout_s, part_s)


async def answers_within(answers: Answers, timeout_s: float, part_s: float) -> bool:
    """Returns whether one of the health checks of that time, which take `part_s` each, is answered."""
    num_missed = 0
    while num_missed * part_s < timeout_s:
        begun = time.monotonic()
        if await answers(part_s):
            return True
        num_missed += 1
        await asyncio.sleep(max(0.0, part_s - (time.monotonic() - begun)))
    return False


async def _door_answers(address: str, timeout_s: float) -> bool:
    """Returns whether a door answers in that time. Not asked for its health, which needs its gateway."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _door_status(address, "/version") != b""
    except (OSError, TimeoutError):
        return False


async def _door_status(address: str, path: str) -> bytes:
    """Asks a door at http://unix:PATH, and returns the status of the answer; empty without an answer."""
    reader, writer = await asyncio.open_unix_connection(address.removeprefix(HTTP).removeprefix("unix:"))
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: door\r\n\r\n".encode())
        return b"".join((await reader.readline()).split(b" ", 2)[1:2])
    finally:
        writer.close()
