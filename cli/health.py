"""Asks a service for its health."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.errors import UnavailableError

_RETRY_S = 0.05
_CHECK_TIMEOUT_S = 2.0
# Health is asked on this host, where a proxy has no business and a retry costs nothing.
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)
_WHOLE_SERVER = health_pb2.HealthCheckRequest(service="")


async def wait_until_serving(address: str) -> None:
    """Returns when the server at `address` says SERVING. Tries for ever: bound it, and watch its process."""
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            if await _turns_serving(stub):
                return
            await asyncio.sleep(_RETRY_S)


async def check(address: str) -> str:
    """Health of the server at `address` now: "SERVING", "NOT_SERVING" or "UNKNOWN".

    Raises UnavailableError when nobody answers there.
    """
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(_WHOLE_SERVER, timeout=_CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"{address} does not answer: {error.details()}") from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


async def _turns_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        async for response in stub.Watch(_WHOLE_SERVER):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    except grpc.aio.AioRpcError:
        pass  # nobody is there yet
    return False
