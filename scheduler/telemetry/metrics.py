"""Metrics of the scheduler: its sizes and their use, and drafts that come and go while it runs."""

from __future__ import annotations

import enum
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import BUILD_INFO, counter, gauge, histogram
from slipstream.scheduler.records import LossCause

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
SERVER_SPECS = (EPOCH, RUN_AHEAD, NUM_DRAFT_TOKENS, SLOTS, KV_PAGES, KV_PAGES_USED, KV_PAGE_BYTES)


LOSSES = counter("slipstream_draft_losses_total", "Times that an attached draft stopped drafting, by cause.", "cause")
ATTACHMENTS = counter("slipstream_draft_attachments_total", "Times that a draft began to draft.")
ATTACHED = gauge("slipstream_draft_attached", "1 while a draft takes part in the steps, or rests; 0 without one.")
MISSING_SECONDS = counter(
    "slipstream_draft_missing_seconds_total",
    "Time in which verify served and no draft took part in the steps, although one was expected.",
)
CATCH_UP_SECONDS = histogram(
    "slipstream_draft_catch_up_seconds",
    "Time from a draft's attachment to the first step that it took part in: it takes in the running requests' tokens.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
SWAPS = counter("slipstream_draft_swaps_total", "Swaps of the draft that were asked for, by result.", "result")
DRAFT_SPECS = (LOSSES, ATTACHMENTS, ATTACHED, MISSING_SECONDS, CATCH_UP_SECONDS, SWAPS)


class SwapResult(enum.Enum):
    """The end of a swap."""

    SWAPPED = "swapped"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


class ServerMetrics(Collector):
    """Makes its metrics anew at each scrape, so none of an older epoch stays. Has none before the first epoch."""

    def __init__(self, registry: CollectorRegistry, *, epoch: Callable[[], Epoch | None]) -> None:
        """`epoch` returns the current epoch, or the last one; None before the first."""
        self._epoch = epoch
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns the families without values: registering needs no epoch."""
        return [spec.family() for spec in (BUILD_INFO, *SERVER_SPECS)]

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


class DraftMetrics(Collector):
    """Counted on the threads of the loop and of the draft's session, read by the scraper's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Before the metrics, so that `collect` is called before they are read.
        registry.register(self)
        losses, swaps = LOSSES.counter(registry), SWAPS.counter(registry)
        self._losses = {cause: losses.labels(cause.value) for cause in LossCause}
        self._swaps = {result: swaps.labels(result.value) for result in SwapResult}
        self._attachments = ATTACHMENTS.counter(registry)
        self._attached = ATTACHED.gauge(registry)
        self._missing = MISSING_SECONDS.counter(registry)
        self._catch_up = CATCH_UP_SECONDS.histogram(registry)
        self._missing_since: float | None = None
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Brings the time without a draft up to date; has no metrics of its own."""
        self.set_missing(is_missing=self._missing_since is not None)
        return ()

    def set_missing(self, *, is_missing: bool) -> None:
        """Counts the time from now on in which a draft is expected and none drafts, or no longer."""
        with self._lock:
            now = time.monotonic()
            if self._missing_since is not None:
                self._missing.inc(now - self._missing_since)
            self._missing_since = now if is_missing else None

    def joined(self, catch_up_s: float) -> None:
        """Counts a draft that begins to draft."""
        self._attachments.inc()
        self._attached.set(1)
        self._catch_up.observe(catch_up_s)

    def lost(self, cause: LossCause, *, has_other: bool) -> None:
        """Counts a lost draft; `has_other`: another draft is active."""
        self._losses[cause].inc()
        self._attached.set(has_other)

    def swapped(self, result: SwapResult) -> None:
        """Counts a swap that is over."""
        self._swaps[result].inc()
