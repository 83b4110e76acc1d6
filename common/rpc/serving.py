"""A gRPC server as all three processes have it: health, reflection, statuses, one address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.common.rpc import health
from slipstream.common.rpc.interceptor import StatusInterceptor
from slipstream.common.rpc.keepalive import Keepalive

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.rpc.keepalive import ChannelOption
    from slipstream.common.rpc.listener import Listener
    from slipstream.common.rpc.metrics import RpcMetrics

MAX_RECEIVE_BYTES = 4 * 2**20


class GrpcServer:
    """Serves at a claimed address. Made, started and stopped on the event loop.

    Not ready until `set_serving(True)`: started early, it can already say so.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        metrics: RpcMetrics | None = None,
        keepalive: Keepalive | None = None,
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
    ) -> None:
        """`metrics` counts the calls; `max_receive_bytes` bounds one message from a client."""
        self._listener = listener
        options = _options(keepalive or Keepalive(), max_receive_bytes)
        interceptors: list[Any] = [StatusInterceptor(metrics)]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._health = health.HealthServicer()
        self._names: list[str] = []

    @property
    def address(self) -> str:
        """What clients dial."""
        return self._listener.address

    def add_service(self, name: str, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service before `start`: its full name, its generated `add_..._to_server`, and who serves it."""
        add_to_server(servicer, self._server)
        self._names.append(name)

    async def start(self) -> None:
        """Listens. Raises AddressInUseError when somebody took the address since it was claimed."""
        self._health.add(self._names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        self._listener.bind(self._server.add_insecure_port)
        await self._server.start()

    def set_serving(self, is_serving: bool) -> None:
        """Tells health checks whether work may be sent here."""
        self._health.set_serving(is_serving)

    async def stop(self, grace_s: float) -> None:
        """Lets no call in any more, waits `grace_s` seconds at most for those that run, and cancels the rest."""
        self._health.close()
        await self._server.stop(grace_s)


def _options(keepalive: Keepalive, max_receive_bytes: int) -> list[ChannelOption]:
    return [
        *keepalive.options(),
        # Otherwise a second server shares the port in silence.
        ("grpc.so_reuseport", 0),
        # gRPC would hang up on a client that pings more often than every five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
    ]
