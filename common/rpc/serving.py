"""A gRPC server as all processes have it: one address, health, reflection and statuses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.common.errors import RETRY_AFTER_MS, NotFoundError, ResourceExhaustedError, UnavailableError
from slipstream.common.rpc.access import AccessSettings, is_public
from slipstream.common.rpc.address import Keepalive
from slipstream.common.rpc.interceptor import HEALTH_SERVICE, CallLimit, StatusInterceptor
from slipstream.common.rpc.receive import WINDOW_BYTES, Decoder, Receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from slipstream.common.rpc.address import ChannelOption
    from slipstream.common.rpc.listener import Listener
    from slipstream.common.rpc.metrics import RpcMetrics

MAX_RECEIVE_BYTES = 4 * 2**20
MAX_STREAMS = 1024
"""Calls at a time on one connection; a client's gRPC keeps further ones until one of them ends."""
MAX_PENDING_CALLS = 2**14
"""Calls that gRPC has taken and the event loop has not seen. gRPC ends further ones with CANCELLED, without a reason:
the bounds on connections and calls are to be reached long before."""

MAX_HEALTH_WATCHES = 1024
"""Calls of Watch at a time. They need no key, and each may leave a window of bytes unread."""

_Status = health_pb2.HealthCheckResponse


class GrpcServer:
    """Serves at a claimed address. Made, started and stopped on the event loop.

    Health checks answer from `start` on: NOT_SERVING until `set_serving(True)`.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        metrics: RpcMetrics | None = None,
        keepalive: Keepalive | None = None,
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        max_streams: int = MAX_STREAMS,
        access: AccessSettings | None = None,
        interceptors: Sequence[Any] = (),
        message_interceptors: Sequence[Any] = (),
        client_of: Callable[[Any], str] = lambda context: str(context.peer()),
        find_fault: Callable[[], str] = lambda: "",
    ) -> None:
        """`metrics` counts the calls; `max_receive_bytes` bounds one message from a client, `max_streams` the
        calls at a time on one connection.

        `access` has the TLS and the bounds of a server for clients. `interceptors` see each call before its message is
        received, `message_interceptors` the message as an `Incoming`; their exceptions become statuses. `client_of`
        names the client of a call, who has a bounded part in the messages that arrive. `find_fault` says why this
        process cannot go on, though it answers: health checks fail then, as those of a process that does not. It is
        empty for one that can.
        """
        self._listener = listener
        self._access = access or AccessSettings()
        options = [
            *_options(keepalive or Keepalive(), max_receive_bytes, self._access.max_connections),
            # With 1, a second server would share the port unnoticed.
            ("grpc.so_reuseport", int(listener.is_shared)),
            ("grpc.max_concurrent_streams", max_streams),
        ]
        self._limit = CallLimit(self._access.max_calls)
        receiver = Receiver(max_receive_bytes, client_of)
        chain = [StatusInterceptor(metrics), self._limit, *interceptors, receiver, *message_interceptors, Decoder()]
        self._server = grpc.aio.server(interceptors=chain, options=options)
        self._health = _HealthServicer(find_fault)
        self._names: list[str] = []

    @property
    def address(self) -> str:
        """The address that clients dial."""
        return self._listener.address

    @property
    def is_serving(self) -> bool:
        """The answer to health checks."""
        return self._health.is_serving

    @property
    def num_calls(self) -> int:
        """Calls that are being served, without health checks."""
        return self._limit.num_calls

    def add_service(self, name: str, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service before `start`: its full name, its generated `add_..._to_server`, and its servicer."""
        add_to_server(servicer, self._server)
        self._names.append(name)

    async def start(self) -> None:
        """Listens; serves reflection too, except at a public address where it was not asked for.

        Raises AddressInUseError if another process took the address since it was claimed, ConfigError if the TLS files
        cannot be used.
        """
        self._health.names.update(self._names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._access.reflection or not is_public(self.address):
            names = [*self._names, HEALTH_SERVICE, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        self._listener.bind(self._add_port)
        await self._server.start()

    def set_serving(self, is_serving: bool) -> None:
        """Sets the answer to health checks."""
        self._health.set_serving(is_serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones, and cancels the rest."""
        self._health.close()
        await self._server.stop(grace_s)

    def _add_port(self, address: str) -> int:
        credentials = self._access.credentials()
        port: int
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        return port


def _options(keepalive: Keepalive, max_receive_bytes: int, max_connections: int) -> list[ChannelOption]:
    return [
        *keepalive.options(),
        # gRPC would hang up on a client that pings more often than every five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.max_receive_message_length", max_receive_bytes),
        # With its probes gRPC lets each call send 4 MiB that nobody reads.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_allowed_incoming_connections", max_connections),
        # With it, a call that begins while another's stream is being closed is ended by RST_STREAM, without a status.
        ("grpc.http.overload_protection", 0),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ]


class _HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers health checks, for the whole server (the empty name) and for each of its services alike.

    The servicer that comes with gRPC forgets its other watchers when one of them leaves, and a watcher keeps a server
    from draining.
    """

    def __init__(self, find_fault: Callable[[], str]) -> None:
        self._find_fault = find_fault
        self.names = {""}
        self.is_serving = False
        self._is_closed = False
        self._num_watches = 0
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        """Sets the answer, and tells watchers. No effect after `close`."""
        self.is_serving = is_serving and not self._is_closed
        self._announce()

    def close(self) -> None:
        """Answers NOT_SERVING from now on; every watch ends after it has said so."""
        self.is_serving = False
        self._is_closed = True
        self._announce()

    async def Check(self, request: Any, context: Any) -> Any:
        """Returns the state. Raises NotFoundError for an unknown service, UnavailableError for a fault."""
        if request.service not in self.names:
            raise NotFoundError(f"no service {request.service!r} here")
        if fault := self._find_fault():
            raise UnavailableError(fault)
        return self._response(request.service)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yields the state now, and whenever it changes. Raises ResourceExhaustedError beyond MAX_HEALTH_WATCHES."""
        if self._num_watches == MAX_HEALTH_WATCHES:
            message = f"{MAX_HEALTH_WATCHES} calls of Watch are open, and no more at a time"
            raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
        self._num_watches += 1
        try:
            async for response in self._states(request.service):
                yield response
        finally:
            self._num_watches -= 1

    async def _states(self, service: str) -> AsyncIterator[Any]:
        last: int | None = None
        while True:
            changed = self._changed
            response = self._response(service)
            if response.status != last:
                last = response.status
                yield response
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _response(self, service: str) -> Any:
        if service not in self.names:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self.is_serving else _Status.NOT_SERVING)
