"""The Prometheus endpoint of a process, and what every service counts."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from contextlib import contextmanager, suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, make_wsgi_app

from slipstream.common.errors import AddressInUseError, ConfigError
from slipstream.common.rpc.metric_spec import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

RPCS = counter(
    "slipstream_rpcs_total", "Calls that this service answered, by method and gRPC status code.", "method", "code"
)
BUILD_INFO = gauge(
    "slipstream_build_info",
    "Always 1: what runs here is in the labels.",
    *("service", "version", "model", "device", "fence", "mps", "algorithm"),
)
HOST_STALL_SECONDS = counter(
    "slipstream_host_stall_seconds_total",
    "Time in which a host thread was blocked on the device or on a worker, by service and place.",
    *("fence", "mps", "algorithm", "service", "site"),
)
SPECS = (RPCS, BUILD_INFO, HOST_STALL_SECONDS)


def make_registry() -> CollectorRegistry:
    """The metrics of one process: to begin with its memory, processor time and open files."""
    # A counter's time of birth is a series more for each, which no Prometheus before OpenMetrics reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class RpcMetrics:
    """Calls that ended, by method and status code."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rpcs = RPCS.counter(registry)

    def count(self, method: str, code: str) -> None:
        """Counts a call that ended: `method` as in `/package.Service/Method`, `code` by its name."""
        self._rpcs.labels(method.removeprefix("/"), code).inc()


@contextmanager
def serve_metrics(registry: CollectorRegistry, port: int | None, *, host: str = LOOPBACK) -> Iterator[int]:
    """Serves `registry` over HTTP until the context ends, and yields the port.

    Port 0 takes any free one; None serves nothing and yields 0. Raises AddressInUseError or ConfigError
    naming `metrics_port`.
    """
    if port is None:
        yield 0
        return
    try:
        server = _MetricsServer(registry, host, port)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUseError("metrics_port", f"{host}:{port}") from error
        raise ConfigError("metrics_port", f"{host}:{port}", f"a port that this user may listen at ({error})") from error
    thread = threading.Thread(target=server.run, name="metrics")
    thread.start()
    try:
        yield server.server_port
    finally:
        server.stop()
        thread.join()
        server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Leaves nothing behind: `server_close` joins the threads, whose connections `stop` has ended."""

    daemon_threads = False

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._is_stopping = False
        self._connections: set[socket.socket] = set()
        super().__init__((host, port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def server_bind(self) -> None:
        """Binds without asking a name server what the host is called, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name = LOOPBACK
        self.server_port = self.socket.getsockname()[1]
        self.setup_environ()

    def run(self) -> None:
        """Serves until `stop`, without waking in between."""
        while not self._is_stopping:
            self.handle_request()

    def stop(self) -> None:
        """Ends `run` and every connection."""
        self._is_stopping = True
        self.socket.shutdown(socket.SHUT_RDWR)
        for connection in tuple(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remembers the connection, and serves it on a thread of its own."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forgets and closes the connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away is no error; a metric that cannot be read is."""
        logger.debug("a scrape ended early", exc_info=True)
