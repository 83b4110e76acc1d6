"""Metrics of the server's sizes and their use, read from the current epoch at each scrape."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import BUILD_INFO, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.core import GaugeMetricFamily

    from slipstream.common.rpc.metrics import MetricSpec
    from slipstream.scheduler.workers.epoch import Epoch

EPOCH = gauge("slipstream_epoch", "Number of the current attachment to verify; a new one means that verify was lost.")
RUN_AHEAD = gauge(
    "slipstream_run_ahead", "Steps that are sent before the result of the first of them is known, less 1."
)
NUM_DRAFT_TOKENS = gauge(
    "slipstream_num_draft_tokens", "Tokens drafted in a step; 0 when nothing drafts, or the draft rests."
)
SLOTS = gauge("slipstream_slots", "Requests that can run at the same time.")
KV_PAGES = gauge("slipstream_kv_pages", "Pages of a service's KV pool that requests can have.", "service")
KV_PAGES_USED = gauge(
    "slipstream_kv_pages_used",
    "Pages that requests hold: the same for both services, which number their pages alike.",
    "service",
)
KV_PAGE_BYTES = gauge("slipstream_kv_page_bytes", "Memory of one page in a service's KV pool.", "service")
SPECS = (EPOCH, RUN_AHEAD, NUM_DRAFT_TOKENS, SLOTS, KV_PAGES, KV_PAGES_USED, KV_PAGE_BYTES)


class ServerMetrics(Collector):
    """Makes its metrics anew at each scrape, so none of an older epoch stays. Has none before the first epoch."""

    def __init__(self, registry: CollectorRegistry, *, epoch: Callable[[], Epoch | None]) -> None:
        """`epoch` returns the current epoch, or the last one; None before the first."""
        self._epoch = epoch
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns the families without values: registering needs no epoch."""
        return [spec.family() for spec in (BUILD_INFO, *SPECS)]

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`; called on the scraper's thread."""
        epoch = self._epoch()
        return [] if epoch is None else [self._build_info(epoch), *self._sizes(epoch), *_kv(epoch)]

    def _build_info(self, epoch: Epoch) -> GaugeMetricFamily:
        verify, labels = epoch.verify, epoch.labels
        family = BUILD_INFO.family()
        family.add_metric(("scheduler", version("slipstream-serve"), verify.model, verify.device, *labels), 1)
        return family

    def _sizes(self, epoch: Epoch) -> list[GaugeMetricFamily]:
        sizes = epoch.sizes.batch
        return [
            _single(EPOCH, epoch.number),
            _single(RUN_AHEAD, sizes.run_ahead),
            _single(NUM_DRAFT_TOKENS, epoch.num_draft_tokens),
            _single(SLOTS, epoch.batch.slots.num_slots),
        ]


def _kv(epoch: Epoch) -> list[GaugeMetricFamily]:
    pages, used, page_bytes = KV_PAGES.family(), KV_PAGES_USED.family(), KV_PAGE_BYTES.family()
    allocator = epoch.batch.pages
    for worker in (epoch.verify, epoch.draft):
        # A drafter without a KV cache has no pool.
        if worker is not None and worker.kv_bytes_per_token:
            service = (worker.role.value,)
            pages.add_metric(service, allocator.num_pages)
            used.add_metric(service, allocator.num_pages - allocator.num_free)
            page_bytes.add_metric(service, worker.kv_bytes_per_token * epoch.sizes.batch.page_tokens)
    return [pages, used, page_bytes]


def _single(spec: MetricSpec, value: float) -> GaugeMetricFamily:
    family = spec.family()
    family.add_metric((), value)
    return family
