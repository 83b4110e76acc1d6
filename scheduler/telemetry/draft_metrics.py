"""Metrics of drafts that come and go while the server runs."""

from __future__ import annotations

import enum
import threading
import time
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import counter, gauge, histogram
from slipstream.scheduler.records import LossCause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry, Metric


class SwapResult(enum.Enum):
    """The end of a swap."""

    SWAPPED = "swapped"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


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
SPECS = (LOSSES, ATTACHMENTS, ATTACHED, MISSING_SECONDS, CATCH_UP_SECONDS, SWAPS)


class DraftMetrics(Collector):
    """Counted on the threads of the loop and of the draft's session, read by the scraper's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        losses, swaps = LOSSES.counter(registry), SWAPS.counter(registry)
        self._losses = {cause: losses.labels(cause.value) for cause in LossCause}
        self._swaps = {result: swaps.labels(result.value) for result in SwapResult}
        self._attachments = ATTACHMENTS.counter(registry)
        self._attached = ATTACHED.gauge(registry)
        self._missing = MISSING_SECONDS.counter(registry)
        self._catch_up = CATCH_UP_SECONDS.histogram(registry)
        self._missing_since: float | None = None
        self._lock = threading.Lock()
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Brings the time without a draft up to date; has no metrics of its own."""
        self.set_missing(is_missing=self._missing_since is not None)
        return ()

    def set_missing(self, *, is_missing: bool) -> None:
        """A draft is expected and none drafts from now on, or no longer."""
        with self._lock:
            now = time.monotonic()
            if self._missing_since is not None:
                self._missing.inc(now - self._missing_since)
            self._missing_since = now if is_missing else None

    def joined(self, catch_up_s: float) -> None:
        """A draft begins to draft."""
        self._attachments.inc()
        self._attached.set(1)
        self._catch_up.observe(catch_up_s)

    def lost(self, cause: LossCause, *, has_other: bool) -> None:
        """A draft that has drafted stops; `has_other`: another one drafts."""
        self._losses[cause].inc()
        self._attached.set(has_other)

    def swapped(self, result: SwapResult) -> None:
        """A swap is over."""
        self._swaps[result].inc()
