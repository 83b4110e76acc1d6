"""A histogram that takes many equal observations at the price of one, which Prometheus' own client does not."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry


class BulkHistogram(Collector):
    """Without labels. Observed on one thread, read by the scraper's."""

    def __init__(self, name: str, documentation: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> None:
        """`buckets` are upper bounds, rising; the last one, infinity, is added."""
        self._name = name
        self._documentation = documentation
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """So many observations of this value."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += count
            self._sum += count * value

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The family without values."""
        return [HistogramMetricFamily(self._name, self._documentation, labels=())]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """See `Collector.collect`."""
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        family = HistogramMetricFamily(self._name, self._documentation, labels=())
        bounds = (*self._bounds, float("inf"))
        names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
        family.add_metric((), list(zip(names, counts, strict=True)), total)
        return [family]
