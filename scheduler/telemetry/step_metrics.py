"""The step metrics of the scheduler: where the time goes, and what drafting brings.

One scrape is a snapshot of all of them: they are collected under the lock under which a step is counted. So a ratio of
two of them, or of their differences between two scrapes, is over the same steps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from collections import defaultdict, deque
from itertools import groupby, product
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import HOST_STALL_SECONDS, counter, gauge, histogram
from slipstream.scheduler.core.batch_sizes import BatchCounts
from slipstream.scheduler.records import RestCause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray
    from prometheus_client import Counter, Metric

    from slipstream.common.rpc.metrics import BulkHistogram
    from slipstream.scheduler.core.batch import Batch
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
RESULT, DRAFT_BACKLOG, ACKNOWLEDGEMENT = SITES = ("result", "draft_backlog", "acknowledgement")
"""The places where the loop's thread may be blocked."""
DRAFTED, DRAFTED_NONE, RESTING, PLAIN = MODES = ("drafted", "drafted_none", "resting", "plain")
"""How a decode step is made: drafted; plainly, as many prompts wait, while the draft rests, or as there is none."""
WORKERS = ("draft", "verify")
DECODE, PREFILL, MIXED = PHASES = ("decode", "prefill", "mixed")
"""What a step does: decode, take in prompts, or both."""

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
    "Drafted; drafted_none, plain while many prompts wait; resting, plain while the draft rests; plain, without one.",
    "mode",
)
RESTS = counter(
    "slipstream_draft_rests_total",
    "Rests of the draft, by cause: slower, as plain steps are faster; probe, to measure plain steps, which were slow.",
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
SPECS = (
    *(STEP_SECONDS, BUBBLE_SECONDS, BUSY_SECONDS, OVERLAP_EFFICIENCY),
    *(DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, ACCEPTED_PER_POSITION, DECODE_STEPS, RESTS),
    *BATCH_COUNTS,
)


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
        self._drafted: deque[tuple[NDArray[np.uint32], NDArray[np.bool_], int]] = deque()
        self._modes: deque[str] = deque()
        self._stalls: deque[tuple[str, float]] = deque()
        self._batch: Batch | None = None
        self._batch_counts = BatchCounts()
        """The batch's counts that the metrics have by now."""
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
            self._stall = _children(self._host_stall_seconds, ["scheduler"], SITES, labels=labels)
            self._efficiency = _EfficiencyWindow()
            self._overlap_efficiency.labels(*labels).set_function(self._efficiency.value)
            self._drafts = [family.labels(algorithm) for family in self._drafting]

    def observe(self, take_apart: Callable[[], StepTiming]) -> None:
        """Counts a step and its times, which `take_apart` returns when they are counted."""
        self._timings.append((time.monotonic(), take_apart))

    def host_stalled(self, site: str, seconds: float) -> None:
        """Counts a time in which the loop's thread was blocked at `site`, one of SITES."""
        self._stalls.append((site, seconds))

    def decoded(self, mode: str) -> None:
        """Counts a decode step; `mode` is one of MODES."""
        self._modes.append(mode)

    def drafted(
        self, num_accepted: NDArray[np.uint32], is_speculating: NDArray[np.bool_], num_draft_tokens: int
    ) -> None:
        """Counts the drafts of a step: of those sequences that speculate, the accepted tokens of each, and K."""
        self._drafted.append((num_accepted, is_speculating, num_draft_tokens))

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

    def count_batch(self, batch: Batch) -> None:
        """Counts what happens in a batch from its beginning on, in place of the last epoch's, which is over."""
        with self.lock:
            self._count()
            self._batch, self._batch_counts = batch, BatchCounts()

    def _count(self) -> None:
        """Counts everything that was appended since the last time. Called under the lock."""
        self._count_times(_taken(self._timings))
        for num_draft_tokens, drafts in groupby(_taken(self._drafted), itemgetter(2)):
            found = [num_accepted[is_speculating] for num_accepted, is_speculating, _ in drafts]
            self._count_drafts(np.concatenate(found), num_draft_tokens)
        for mode, num_steps in Counts(_taken(self._modes)).items():
            self._decode_steps[mode,].inc(num_steps)
        stalled_s: defaultdict[str, float] = defaultdict(float)
        for site, seconds in _taken(self._stalls):
            stalled_s[site] += seconds
        for site, seconds in stalled_s.items():
            self._stall["scheduler", site].inc(seconds)
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

    def _count_drafts(self, num_accepted: NDArray[np.uint32], num_draft_tokens: int) -> None:
        if not len(num_accepted):
            return
        # Drafts with at least 0, 1, … accepted tokens.
        at_least = np.bincount(num_accepted, minlength=num_draft_tokens + 1)[::-1].cumsum()[::-1].tolist()
        counts = at_least[0], at_least[0] * num_draft_tokens, sum(at_least[1:])
        for child, count in zip(self._drafts, counts, strict=True):
            child.inc(count)
        for position, count in enumerate(at_least[1 : num_draft_tokens + 1], start=1):
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


VERIFY_TO_DRAFT = "verify_to_draft"
DRAFT_TO_VERIFY = "draft_to_verify"
VERIFY_TO_VERIFY = "verify_to_verify"
EDGES = (VERIFY_TO_DRAFT, DRAFT_TO_VERIFY, VERIFY_TO_VERIFY)


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
