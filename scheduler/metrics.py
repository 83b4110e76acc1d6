"""The scheduler's metrics: where the time of steps goes, what drafting gains, drafts that arrive and leave, and sizes.

One scrape is a snapshot of all step metrics: they are collected under the lock under which a step is counted. So a
ratio of two of them, or of their differences between two scrapes, is over the same steps.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter as Counts
from collections import defaultdict, deque
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import HOST_STALL_SECONDS, counter, gauge, histogram
from slipstream.common.wire.events import EventLog, Site
from slipstream.scheduler.records import LossCause, RestCause
from slipstream.scheduler.sizes import BatchCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray
    from prometheus_client import Counter, Metric

    from slipstream.common.rpc.metrics import BulkHistogram
    from slipstream.scheduler.batch import Batch
    from slipstream.scheduler.records import Interval, Step

T = TypeVar("T")
MetricT = TypeVar("MetricT", bound=MetricWrapperBase)

WINDOW_S = 10.0
NS = 1e-9
STEP_BUCKETS_S = (
    *(0.0005, 0.00075, 0.001, 0.00125, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.01),
    *(0.0125, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2),
)
LABELS = ("fence", "mps", "algorithm")
SITES = {Site.WAIT: "result", Site.DRAFT_BACKLOG: "draft_backlog", Site.ACKNOWLEDGEMENT: "acknowledgement"}
"""The places where the loop's thread may be blocked, as the metrics name them."""
DRAFTED, DRAFTED_NONE, RESTING, PLAIN = MODES = ("drafted", "drafted_none", "resting", "plain")
"""How a decode step is made: drafted; plainly, as many prompts wait, while the draft rests, or as there is none."""
WORKERS = ("draft", "verify")
DECODE, PREFILL, MIXED = PHASES = ("decode", "prefill", "mixed")
"""What a step does: decode, take in prompts, or both."""
VERIFY_TO_DRAFT, DRAFT_TO_VERIFY, VERIFY_TO_VERIFY = EDGES = ("verify_to_draft", "draft_to_verify", "verify_to_verify")
"""Between which works time may be lost."""

STEP_SECONDS = histogram(
    "slipstream_step_seconds",
    "Time from the end of one step to the end of the next, while requests run.",
    *(*LABELS, "phase"),
    buckets=STEP_BUCKETS_S,
)
BUBBLE_SECONDS = counter(
    "slipstream_bubble_seconds_total",
    "Time in which neither worker had work, by the edge between the work before and after it, and by phase.",
    *(*LABELS, "edge", "phase"),
)
BUSY_SECONDS = counter(
    "slipstream_busy_seconds_total",
    "Time in which a worker worked, by service and phase.",
    *(*LABELS, "service", "phase"),
)
OVERLAP_EFFICIENCY = gauge(
    "slipstream_overlap_efficiency",
    f"1 - bubble / wall over the steps of the last {WINDOW_S:.0f} s; NaN when there were none.",
    *LABELS,
)
DRAFTS = counter("slipstream_drafts_total", "Drafts that the target checked, one a request and step.", "algorithm")
DRAFT_TOKENS = counter(
    "slipstream_draft_tokens_total",
    "Tokens that the draft proposed: K for each draft, also where the request lets fewer be accepted.",
    "algorithm",
)
ACCEPTED_TOKENS = counter("slipstream_accepted_tokens_total", "Proposed tokens that the target accepted.", "algorithm")
ACCEPTED_PER_POSITION = counter(
    "slipstream_accepted_tokens_per_position_total",
    "Drafts whose token at this position was accepted; the first position is 1.",
    *("algorithm", "position"),
)
DECODE_STEPS = counter(
    "slipstream_decode_steps_total",
    "Drafted; drafted_none, plain as many prompts wait or no draft token pays; resting, plain while the draft rests; "
    "plain, without one.",
    "mode",
)
RESTS = counter(
    "slipstream_draft_rests_total",
    "Rests of the draft, by cause: slower, as plain steps are faster; probe, a trial of plain steps, which were slow.",
    "cause",
)
NOT_FINITE = counter(
    "slipstream_sequences_not_finite_total",
    "Sequences that ended with an error because the model's logits were NaN or infinite.",
)
PREEMPTIONS = counter(
    "slipstream_preemptions_total",
    "Times that a running sequence gave its slot and KV pages back for want of pages, to go on later.",
)
PREFIX_QUERY_TOKENS = counter(
    "slipstream_prefix_cache_query_tokens_total", "Prompt tokens that were looked for in the prefix cache."
)
PREFIX_HIT_TOKENS = counter(
    "slipstream_prefix_cache_hit_tokens_total", "Prompt tokens that the prefix cache had and were not computed."
)
BATCH_COUNTS = (NOT_FINITE, PREEMPTIONS, PREFIX_QUERY_TOKENS, PREFIX_HIT_TOKENS)
"""In the order of the fields of `BatchCounts`."""
STEP_SPECS = (
    *(STEP_SECONDS, BUBBLE_SECONDS, BUSY_SECONDS, OVERLAP_EFFICIENCY),
    *(DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, ACCEPTED_PER_POSITION, DECODE_STEPS, RESTS),
    *BATCH_COUNTS,
)

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

EPOCH = gauge("slipstream_epoch", "Number of the current attachment to verify; a new one means that verify was lost.")
RUN_AHEAD = gauge(
    "slipstream_run_ahead", "Steps that are sent before the result of the first of them is known, less 1."
)
NUM_DRAFT_TOKENS = gauge(
    "slipstream_num_draft_tokens",
    "Most tokens drafted for a sequence in a step; 0 when nothing drafts, or the draft rests.",
)
SLOTS = gauge("slipstream_slots", "Requests that can run at the same time.")
KV_PAGES = gauge("slipstream_kv_pages", "Pages of a service's KV pool that requests can have.", "service")
KV_PAGES_USED = gauge(
    "slipstream_kv_pages_used",
    "Pages that requests hold: the same for both services, which number their pages alike.",
    "service",
)
KV_PAGE_BYTES = gauge("slipstream_kv_page_bytes", "Memory of one page in a service's KV pool.", "service")
GRAMMAR_LOSSES = counter(
    "slipstream_grammar_losses_total",
    "Grammar workers that were lost or late; sequences with a constraint waited for another one.",
)
SERVER_SPECS = (EPOCH, RUN_AHEAD, NUM_DRAFT_TOKENS, SLOTS, KV_PAGES, KV_PAGES_USED, KV_PAGE_BYTES)


class StepTiming(NamedTuple):
    """The time of one step, in nanoseconds."""

    phase: str
    """One of PHASES."""
    draft_ns: int
    verify_ns: int
    bubbles_ns: dict[str, int]
    """By edge."""
    wall_ns: int | None = None
    """None for the first step after an idle time."""


def phase_of(step: Step) -> str:
    """Returns what a step does, one of PHASES."""
    if not step.chunks:
        return DECODE
    return MIXED if step.decoded.slots else PREFILL


def time_step(
    phase: str,
    before: Interval | None,
    verify: Interval,
    decoded: Interval | None,
    prefilled: Interval | None = None,
    *,
    is_drafted: bool = False,
) -> StepTiming:
    """Takes a step apart, as "Where a step's time goes" in docs/architecture.md says.

    A bubble is time in which neither worker worked, from the end of the work before it: a command that was sent too
    late counts. `before`: when verify ended the step before, and when the last of both workers did; None after an idle
    time. `decoded`, `prefilled`: the parts of draft. `is_drafted`: verify has waited for the first of them.
    """
    # The workers may stamp anything: no time is negative, and bubbles are no longer than their step.
    bubbles: dict[str, int] = {}
    wall_ns: int | None = None
    if before is not None:
        verify_end, all_end = before
        wall_ns = max(0, verify[1] - verify_end)
        if decoded is not None and is_drafted:
            bubbles[VERIFY_TO_DRAFT] = min(max(0, decoded[0] - all_end), wall_ns)
            idle_ns = max(0, verify[0] - max(decoded[1], verify_end))
            bubbles[DRAFT_TO_VERIFY] = min(idle_ns, wall_ns - bubbles[VERIFY_TO_DRAFT])
        else:
            bubbles[VERIFY_TO_VERIFY] = min(max(0, verify[0] - all_end), wall_ns)
    return StepTiming(
        phase=phase,
        draft_ns=_length_ns(decoded) + _length_ns(prefilled),
        verify_ns=_length_ns(verify),
        wall_ns=wall_ns,
        bubbles_ns=bubbles,
    )


def _length_ns(part: Interval | None) -> int:
    return 0 if part is None else max(0, part[1] - part[0])


class StepMetrics(Collector):
    """The step metrics of a scheduler, one collector; they go on from epoch to epoch.

    Counted on the loop's thread, read by the scraper's. The loop only appends what it has to count: that is counted for
    many steps at once, which takes a fraction of the time, or by a scrape.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """`measure` says under which labels steps are counted, before the first one."""
        self.lock = threading.Lock()
        """Held while steps are counted, and while all metrics are collected: about 0.3 ms a scrape."""
        self.labels = ("", "", "")
        """Fence, MPS and algorithm."""
        self._families = families = CollectorRegistry()
        self._step_seconds = STEP_SECONDS.histogram(families)
        self._bubble_seconds = BUBBLE_SECONDS.counter(families)
        self._busy_seconds = BUSY_SECONDS.counter(families)
        self._host_stall_seconds = HOST_STALL_SECONDS.counter(families)
        self._overlap_efficiency = OVERLAP_EFFICIENCY.gauge(families)
        self._drafting = [spec.counter(families) for spec in (DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS)]
        self._accepted_per_position = ACCEPTED_PER_POSITION.counter(families)
        self._decode_steps = _children(DECODE_STEPS.counter(families), MODES)
        self._rests = _children(RESTS.counter(families), [cause.value for cause in RestCause])
        self._batch_families = [spec.counter(families) for spec in BATCH_COUNTS]
        # The metrics with the labels of now.
        self._seconds_of: dict[tuple[str, ...], BulkHistogram] = {}
        self._bubble: dict[tuple[str, ...], Counter] = {}
        self._busy: dict[tuple[str, ...], Counter] = {}
        self._stall: dict[tuple[str, ...], Counter] = {}
        self._drafts: list[Counter] = []
        self._efficiency = _EfficiencyWindow()
        # The loop's thread appends to these without the lock.
        self._timings: deque[tuple[float, Callable[[], StepTiming]]] = deque()
        """Each with the time when it was observed."""
        self._decoded: deque[tuple[str, NDArray[np.uint32], NDArray[np.int32]]] = deque()
        self._batch: Batch | None = None
        self._log = EventLog()
        # What was counted of both by now.
        self._batch_counts = BatchCounts()
        self._stalled_ns = dict.fromkeys(SITES, 0)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`; called on the scraper's thread."""
        with self.lock:
            self._count()
            return list(self._families.collect())

    def measure(self, *, fence: str, mps: str, algorithm: str) -> None:
        """Counts under these labels from now on, the conditions of the measurement."""
        with self.lock:
            self._count()
            self.labels = labels = (fence, mps, algorithm)
            self._seconds_of = _children(self._step_seconds, PHASES, labels=labels)
            self._bubble = _children(self._bubble_seconds, EDGES, PHASES, labels=labels)
            self._busy = _children(self._busy_seconds, WORKERS, PHASES, labels=labels)
            self._stall = _children(self._host_stall_seconds, ["scheduler"], SITES.values(), labels=labels)
            self._efficiency = _EfficiencyWindow()
            self._overlap_efficiency.labels(*labels).set_function(self._efficiency.value)
            self._drafts = [family.labels(algorithm) for family in self._drafting]

    def observe(self, take_apart: Callable[[], StepTiming]) -> None:
        """Counts a step and its times, which `take_apart` returns when they are counted."""
        self._timings.append((time.monotonic(), take_apart))

    def decoded(self, mode: str, num_accepted: NDArray[np.uint32], num_drafted: NDArray[np.int32]) -> None:
        """Counts the drafts of a step: the accepted tokens of each sequence, and those that were drafted for it.

        `mode`: one of MODES; empty for a step that counts as no decode step.
        """
        self._decoded.append((mode, num_accepted, num_drafted))

    def tidy(self) -> None:
        """Counts the steps so far. Skipped while metrics are collected, which does so, too."""
        if self.lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self.lock.release()

    def rested(self, cause: RestCause) -> None:
        """Counts a rest of the draft."""
        with self.lock:
            self._rests[cause.value,].inc()

    def follow(self, batch: Batch, log: EventLog) -> None:
        """Counts what a batch counts, and the loop's stalls, of an epoch that begins in place of the last one."""
        with self.lock:
            self._count()
            self._batch, self._log = batch, log
            self._batch_counts, self._stalled_ns = BatchCounts(), dict.fromkeys(SITES, 0)

    def _count(self) -> None:
        """Counts everything that was appended since the last time. Called under the lock."""
        self._count_times(_taken(self._timings))
        decoded = list(_taken(self._decoded))
        if decoded:
            _, accepted, drafted = zip(*decoded, strict=True)
            self._count_drafts(np.concatenate(accepted), np.concatenate(drafted))
        for mode, num_steps in Counts(mode for mode, *_ in decoded if mode).items():
            self._decode_steps[mode,].inc(num_steps)
        for site, name in SITES.items():
            more_ns = self._log.stalled_ns[site] - self._stalled_ns[site]
            if more_ns:
                self._stalled_ns[site] += more_ns
                self._stall["scheduler", name].inc(more_ns * NS)
        if self._batch is not None:
            counts, before = self._batch.counts, self._batch_counts
            self._batch_counts = counts
            for family, now, then in zip(self._batch_families, counts, before, strict=True):
                family.inc(now - then)

    def _count_times(self, timings: Iterable[tuple[float, Callable[[], StepTiming]]]) -> None:
        busy_ns: defaultdict[tuple[str, ...], int] = defaultdict(int)
        bubble_ns: defaultdict[tuple[str, ...], int] = defaultdict(int)
        for at_s, take_apart in timings:
            timing = take_apart()
            phase = timing.phase
            busy_ns["verify", phase] += timing.verify_ns
            busy_ns["draft", phase] += timing.draft_ns
            if timing.wall_ns is not None:
                self._efficiency.add(at_s, timing.wall_ns, sum(timing.bubbles_ns.values()))
                self._seconds_of[phase,].observe(timing.wall_ns * NS)
                for edge, nanoseconds in timing.bubbles_ns.items():
                    bubble_ns[edge, phase] += nanoseconds
        for counters, sums_ns in ((self._busy, busy_ns), (self._bubble, bubble_ns)):
            for key, nanoseconds in sums_ns.items():
                counters[key].inc(nanoseconds * NS)

    def _count_drafts(self, num_accepted: NDArray[np.uint32], num_drafted: NDArray[np.int32]) -> None:
        num_accepted = num_accepted[num_drafted > 0]
        if not len(num_accepted):
            return
        # Drafts with at least 0, 1, … accepted tokens.
        at_least = np.bincount(num_accepted, minlength=num_drafted.max() + 1)[::-1].cumsum()[::-1].tolist()
        counts = at_least[0], int(num_drafted.sum()), sum(at_least[1:])
        for child, count in zip(self._drafts, counts, strict=True):
            child.inc(count)
        for position, count in enumerate(at_least[1:], start=1):
            self._accepted_per_position.labels(self.labels[-1], str(position)).inc(count)


def _children(family: MetricT, *values: Iterable[str], labels: tuple[str, ...] = ()) -> dict[tuple[str, ...], MetricT]:
    """The metrics of a family with `labels` before each combination of `values`, which is their key."""
    return {key: family.labels(*labels, *key) for key in product(*values)}


def _taken(items: deque[T]) -> Iterator[T]:
    """Takes what there is now; another thread may add meanwhile."""
    for _ in range(len(items)):
        yield items.popleft()


class _EfficiencyWindow:
    """Bubble and wall of the last seconds. Called under the lock of the metrics."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque()
        self._wall_ns = 0
        self._bubble_ns = 0

    def add(self, at_s: float, wall_ns: int, bubble_ns: int) -> None:
        self._forget(at_s)
        self._steps.append((at_s, wall_ns, bubble_ns))
        self._wall_ns += wall_ns
        self._bubble_ns += bubble_ns

    def value(self) -> float:
        self._forget(time.monotonic())
        return 1.0 - self._bubble_ns / self._wall_ns if self._wall_ns else float("nan")

    def _forget(self, now_s: float) -> None:
        """Takes out what is older than the window."""
        while self._steps and self._steps[0][0] < now_s - WINDOW_S:
            _, wall_ns, bubble_ns = self._steps.popleft()
            self._wall_ns -= wall_ns
            self._bubble_ns -= bubble_ns


class SwapResult(enum.Enum):
    """The end of a swap."""

    SWAPPED = "swapped"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


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
        with self._lock:
            self._count_missing()
        return ()

    def set_missing(self, *, is_missing: bool) -> None:
        """Counts the time from now on in which a draft is expected and none drafts, or no longer."""
        with self._lock:
            self._count_missing()
            self._missing_since = time.monotonic() if is_missing else None

    def _count_missing(self) -> None:
        """Counts the time until now. Called under the lock."""
        if self._missing_since is not None:
            begun, self._missing_since = self._missing_since, time.monotonic()
            self._missing.inc(self._missing_since - begun)

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
