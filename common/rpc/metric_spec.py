"""What a metric is, told once: the process that has it and the page that lists it read the same definition."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from slipstream.common.rpc.bulk_histogram import BulkHistogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MetricKind(enum.Enum):
    """How Prometheus reads it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """The definition of one metric."""

    name: str
    """As it is queried, but for a histogram's `_bucket`, `_sum` and `_count`."""
    kind: MetricKind
    help: str
    """In plain words, a sentence."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in the unit of its name."""

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Registers it as a counter."""
        assert self.kind is MetricKind.COUNTER, f"{self.name} is a {self.kind.value}"
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """Registers it as a gauge."""
        assert self.kind is MetricKind.GAUGE, f"{self.name} is a {self.kind.value}"
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """Registers it as a histogram."""
        assert self.kind is MetricKind.HISTOGRAM, f"{self.name} is a {self.kind.value}"
        return Histogram(self.name, self.help, self.labels, registry=registry, buckets=self.buckets)

    def bulk_histogram(self, registry: CollectorRegistry) -> BulkHistogram:
        """Registers it as a histogram that takes many observations at once."""
        assert self.kind is MetricKind.HISTOGRAM, f"{self.name} is a {self.kind.value}"
        assert not self.labels, f"{self.name} has labels"
        return BulkHistogram(self.name, self.help, self.buckets, registry)

    def family(self) -> GaugeMetricFamily:
        """An empty family, for a collector that makes its gauges anew at each scrape."""
        assert self.kind is MetricKind.GAUGE, f"{self.name} is a {self.kind.value}"
        return GaugeMetricFamily(self.name, self.help, labels=self.labels)


def counter(name: str, help: str, *labels: str) -> MetricSpec:
    """Only ever grows; its name ends in `_total`."""
    return MetricSpec(name=name, kind=MetricKind.COUNTER, help=help, labels=labels)


def gauge(name: str, help: str, *labels: str) -> MetricSpec:
    """Goes up and down."""
    return MetricSpec(name=name, kind=MetricKind.GAUGE, help=help, labels=labels)


def histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...]) -> MetricSpec:
    """Observations, counted by size."""
    return MetricSpec(name=name, kind=MetricKind.HISTOGRAM, help=help, labels=labels, buckets=buckets)
