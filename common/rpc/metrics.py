"""Definitions of metrics, the metrics that every service has, and the Prometheus endpoint."""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import socket
import threading
import time
import urllib.request
from bisect import bisect_left
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from slipstream.common.errors import AddressInUseError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client import Metric

T = TypeVar("T")
MetricFamily = CounterMetricFamily | GaugeMetricFamily

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LINES_IN_A_TURN = 16
"""Lines of a page of metrics that are written without a pause, in about 0.1 ms of Python."""
LONGEST_WAIT_S = 3600.0
"""Seconds after which the server's thread wakes if no scraper comes."""
PAUSE_S = 0.0001
"""Long enough for a thread that waits for the interpreter to wake up and take it."""


class MetricKind(enum.Enum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """The definition of one metric, for the process that has it and for the page that lists it."""

    name: str
    """The name in a query, without a histogram's `_bucket`, `_sum` or `_count`."""
    kind: MetricKind
    help: str
    """A sentence in plain words."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in the unit of its name."""

    def counter(self, registry: CollectorRegistry) -> Counter:
        self._check(MetricKind.COUNTER)
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        self._check(MetricKind.GAUGE)
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> BulkHistogram:
        self._check(MetricKind.HISTOGRAM)
        return BulkHistogram(self.name, self.help, self.labels, registry=registry, buckets=self.buckets)

    def family(self) -> MetricFamily:
        """Returns an empty family, for a collector that makes its gauges or counters at each scrape."""
        if self.kind is MetricKind.COUNTER:
            return CounterMetricFamily(self.name, self.help, labels=self.labels)
        self._check(MetricKind.GAUGE)
        return GaugeMetricFamily(self.name, self.help, labels=self.labels)

    def _check(self, kind: MetricKind) -> None:
        assert self.kind is kind, f"{self.name} is a {self.kind.value}"


def counter(name: str, help: str, *labels: str) -> MetricSpec:
    """Defines a counter; its name ends in `_total`."""
    return MetricSpec(name=name, kind=MetricKind.COUNTER, help=help, labels=labels)


def gauge(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=MetricKind.GAUGE, help=help, labels=labels)


def histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind=MetricKind.HISTOGRAM, help=help, labels=labels, buckets=buckets)


class BulkHistogram(Histogram):
    """A histogram that takes many equal observations at once, at the price of one."""

    def observe_many(self, value: float, count: int) -> None:
        """Adds `count` observations of `value`."""
        self._sum.inc(count * value)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


RPCS = counter(
    "slipstream_rpcs_total",
    "Calls that this service answered, by method and status code, gRPC's or a door's of HTTP.",
    "method",
    "code",
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


def make_registry() -> CollectorRegistry:
    """Returns the metrics of a process, to begin with its memory, processor time and open files."""
    # The time at which a counter was made would be one more series, which only OpenMetrics readers use.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class RpcMetrics:
    """Counts calls by method and status code."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rpcs = RPCS.counter(registry)

    def count(self, method: str, code: str) -> None:
        """Counts a call that ended: `method` as in `/package.Service/Method`, `code` as a status code's name."""
        self._rpcs.labels(method.removeprefix("/"), code).inc()


@contextmanager
def serve_metrics(registry: CollectorRegistry, port: int | None, host: str = LOOPBACK) -> Iterator[int]:
    """Serves `registry` over HTTP at an IPv4 address until the context ends, and yields the port.

    Port 0 takes any free one; None serves nothing and yields 0. Raises AddressInUseError or ConfigError naming
    `metrics_port`, and ConfigError naming `metrics_host`.
    """
    if port is None:
        yield 0
        return
    address = f"{host}:{port}"
    try:
        server = make_server(host, port, make_wsgi_app(PageInTurns(registry)), _MetricsServer, _Handler)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUseError("metrics_port", address) from error
        if host != LOOPBACK and isinstance(error, OSError) and error.errno != errno.EACCES:
            raise ConfigError("metrics_host", host, f"an IPv4 address of this host ({error})") from error
        raise ConfigError("metrics_port", address, f"a port that this user may listen at ({error})") from error
    thread = threading.Thread(target=server.serve_forever, args=(LONGEST_WAIT_S,), name="metrics")
    thread.start()
    try:
        yield server.server_port
    finally:
        # Wakes the thread, which else looks whether it is to end only when a scraper comes.
        server.socket.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        server.server_close()
        thread.join()


class PageInTurns(Collector):
    """A registry's page, written a few lines at a time: for a whole one a step loop would wait for milliseconds.

    By default Python lets other threads interrupt one that computes only every 5 ms.
    """

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            paced = copy(family)
            paced.samples = self._in_turns(family.samples)  # type: ignore[assignment]
            yield paced

    def restricted_registry(self, names: Iterable[str]) -> PageInTurns:
        """As `CollectorRegistry.restricted_registry`, which scrapers ask for by `name[]`."""
        assert isinstance(self._registry, CollectorRegistry), "only a whole page is restricted"
        return PageInTurns(self._registry.restricted_registry(names))

    def _in_turns(self, samples: Iterable[T]) -> Iterator[T]:
        for number, sample in enumerate(samples):
            if number % LINES_IN_A_TURN == 0:
                time.sleep(PAUSE_S)
            yield sample


MOST_CONNECTIONS = 64
"""Connections of scrapers at a time."""
LAST_SCRAPES_S = 1.0
"""Longest time for which open connections hold up the end."""


class _Handler(WSGIRequestHandler):
    timeout = 1.0
    """Seconds that a scraper may send or read nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Logs no line for a scrape."""


class _MetricsServer(ThreadingWSGIServer):
    """Serves each connection on a thread of its own, which `server_close` joins; hangs up beyond MOST_CONNECTIONS."""

    daemon_threads = False

    def __init__(self, *arguments: Any) -> None:
        self._open = set[Any]()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread, where there may be one more."""
        if len(self._open) == MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Called when a connection has been served, on its thread."""
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Hangs up on clients that still send or read after a second: one that does so byte by byte holds up no end."""
        end = time.monotonic() + LAST_SCRAPES_S
        while self._open and time.monotonic() < end:
            time.sleep(0.01)
        for request in tuple(self._open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the error of a scrape, which ends when a scraper goes away."""
        logger.debug("a scrape ended early", exc_info=True)


TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape: value by (name, sorted labels)."""

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def read(cls, text: str) -> Scrape:
        """Reads the text format. Raises ValueError for anything else."""
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples of this name that have these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(value for (found, given), value in self.samples.items() if found == name and wanted <= set(given))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Returns `total` for each value of `label`, in the order of the samples."""
        values = dict.fromkeys(dict(given)[label] for found, given in self.samples if found == name)
        return {value: self.total(name, **labels, **{label: value}) for value in values}

    def since(self, earlier: Scrape) -> Scrape:
        """Returns the differences to an earlier scrape."""
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})


def joined(scrapes: Mapping[str, Scrape]) -> Scrape:
    """The samples of several services in one, each with its service's name as the label `job`."""
    return Scrape(
        {
            (name, tuple(sorted([*labels, ("job", job)]))): value
            for job, page in scrapes.items()
            for (name, labels), value in page.samples.items()
        }
    )


async def scrape(port: int, *, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Reads the endpoint of this host at `port`. Raises OSError when it cannot be read."""
    return Scrape.read(await asyncio.to_thread(_fetch, port, timeout_s))


def _fetch(port: int, timeout_s: float) -> str:
    # Without the proxies of the environment: this is a process of this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{LOOPBACK}:{port}/metrics", timeout=timeout_s) as response:
        text: str = response.read().decode()
        return text
