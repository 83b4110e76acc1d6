"""The door's process: uvicorn, with bounds on connections and on what arrives, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.client import AsyncClient
from slipstream.client.connection import API_KEY_VARIABLE
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.address import TcpAddress, UnixAddress, parse_address
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.shutdown import ShutdownSignals, raise_failure
from slipstream.door.app import make_app
from slipstream.door.call import Door

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.door.config import DoorConfig

MAX_HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers."""
BACKLOG = 2048
SPARE_FILES = 256
"""Open files beside the connections of clients."""
SWITCH_INTERVAL_S = 0.0005
"""Time for which the thread that reads a large body keeps the interpreter from the event loop."""
TOGETHER_FROM = 4
"""Outputs of a key from which on further ones arrive together."""
KEEP_ALIVE_S = 65
"""Time for which a connection may wait for its next request."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests arrive in time and have a head of bounded length, and whose client reads.

    Beyond the most connections, the one is closed that has waited longest for a request.
    """

    def __init__(self, bounds: DoorServer, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._bounds = bounds
        self._num_head_bytes = 0
        self._is_in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._reading_deadline: asyncio.TimerHandle | None = None
        """Set while what was written waits for the client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection."""
        bounds = self._bounds
        if len(self.connections) >= bounds.max_connections:
            oldest = next(iter(bounds.waiting), None)
            if oldest is None:
                transport.abort()
                return
            oldest.transport.abort()
            oldest._forget()
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._forget()
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
        if self.transport is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bounds the head."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
            # A body may follow at once, and is bounded where it is received.
            if self._num_head_bytes > MAX_HEAD_BYTES + len(data):
                self._refuse()
                return
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """Begins a request."""
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        """Ends the head."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends what arrives."""
        super().on_message_complete()
        self._forget()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        # Without that timer it closes, or answers the request that came with this one.
        if self.timeout_keep_alive_task is not None:
            self._bounds.waiting[self] = None

    def pause_writing(self) -> None:
        """Waits for a client that does not read."""
        super().pause_writing()
        self._reading_deadline = self.loop.call_later(self._bounds.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on with a client that reads."""
        super().resume_writing()
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()

    def _wait(self) -> None:
        self._forget()
        self._bounds.waiting[self] = None
        self._deadline = self.loop.call_later(self._bounds.read_timeout_s, self.transport.abort)

    def _forget(self) -> None:
        self._bounds.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self) -> None:
        self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
        self.transport.close()


class DoorServer(uvicorn.Server):
    """Serves at sockets with TLS or without; signals are not its own."""

    def __init__(self, app: Any, config: DoorConfig, listener: Listener, private: Listener | None = None) -> None:
        """`private`: where TLS is not asked for."""
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.grace_s) or 1,
            )
        )
        self.max_connections = most_connections(config.max_connections)
        self.read_timeout_s = config.read_timeout_s
        """Time in which a request must have arrived, and an answer be read on."""
        self.waiting: dict[BoundedProtocol, None] = {}
        """The connections that wait for a request, the oldest first."""
        context = tls_context(config)
        self._sockets = [(one, context) for one in bound_sockets(listener)]
        self._sockets += [(one, None) for one in (bound_sockets(private) if private else ())]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens at each of the sockets."""
        await self.lifespan.startup()
        loop, config = asyncio.get_running_loop(), self.config
        make: Any = partial(
            BoundedProtocol,
            self,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        self.servers = [
            await loop.create_server(make, sock=one, ssl=context, backlog=BACKLOG) for one, context in self._sockets
        ]
        self.started = True

    async def end_with(self, signals: ShutdownSignals) -> None:
        """Ends with the first signal."""
        await signals.wait()
        self.should_exit = True


async def run_door(config: DoorConfig, listener: Listener, metrics_port: int, metrics_host: str) -> int:
    """Serves until the first signal, and gives what runs `grace_s` to end; returns the exit status."""
    # The callers have keys of their own; this process has none.
    os.environ.pop(API_KEY_VARIABLE, None)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    registry = make_registry()
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        private = None
        if config.private_listen is not None:
            private = held.enter_context(Listener.claim(config.private_listen, field="private_listen"))
        held.enter_context(serve_metrics(registry, metrics_port, metrics_host))
        async with AsyncClient(config.gateway, together_from=TOGETHER_FROM) as client:
            app = make_app(Door(client, config, RpcMetrics(registry)), registry)
            server = DoorServer(app, config, listener, private)
            ending = asyncio.create_task(server.end_with(signals))
            collection = IdleCollection(keeps_young=True)
            with collection.in_charge():
                collecting = asyncio.create_task(collection.run(lambda: bool(server.server_state.tasks)))
                collecting.add_done_callback(raise_failure)
                await server.serve()
            collecting.cancel()
            ending.cancel()
    return 0


def most_connections(wanted: int) -> int:
    """Raises the limit of open files as far as it goes. Returns the connections that there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - SPARE_FILES)


def tls_context(config: DoorConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    if config.tls_client_ca is not None:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def bound_sockets(listener: Listener) -> list[socket.socket]:
    """Binds a socket for each of a listener's targets."""
    targets: list[str] = []
    sockets: list[socket.socket] = []

    def add(target: str) -> int:
        targets.append(target)
        return 0

    listener.bind(add)
    for target in targets:
        address = parse_address(target)
        match address:
            case UnixAddress():
                one = socket.socket(socket.AF_UNIX)
                one.bind(str(address.path))
                address.path.chmod(0o600)
            case TcpAddress(host, port):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                one = socket.create_server((host, port), family=family, reuse_port=listener.is_shared, backlog=BACKLOG)
        sockets.append(one)
    return sockets
