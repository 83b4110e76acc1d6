"""Time that a worker's host was blocked on the device."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily

from slipstream.common.rpc.metrics import HOST_STALL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

ATTACH, STAGING, ACKNOWLEDGEMENT, DRAIN = STALL_SITES = ("attach", "staging", "acknowledgement", "drain")
"""An epoch is opened and its graphs are captured; the device is a whole ring of steps behind; a worker that was told to
acknowledges work that is done; an epoch comes to its end."""


class HostStalls:
    """Seconds that the device thread was blocked on the device, by place. Implements prometheus_client's `Collector`.

    Written by the blocked thread, read by the scraper's.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STALL_SITES, 0.0)
        self._labels: tuple[str, ...] = ()
        self._thread = threading.local()

    @contextmanager
    def at(self, site: str) -> Iterator[None]:
        """Counts the block's time for `site`, one of STALL_SITES; within another such block for that one alone."""
        if getattr(self._thread, "is_counted", False):
            yield
            return
        begun, self._thread.is_counted = time.monotonic(), True
        try:
            yield
        finally:
            self._thread.is_counted = False
            self._seconds[site] += time.monotonic() - begun

    def seconds(self) -> dict[str, float]:
        """Seconds until now, by site."""
        return dict(self._seconds)

    def register(self, registry: CollectorRegistry, *labels: str) -> None:
        """`labels`: fence, MPS, algorithm and service."""
        self._labels = labels
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(HOST_STALL_SECONDS.name, HOST_STALL_SECONDS.help, labels=HOST_STALL_SECONDS.labels)
        for site, seconds in self.seconds().items():
            family.add_metric((*self._labels, site), seconds)
        yield family
