"""The step metrics of the scheduler: where the time goes, and what drafting brings."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from slipstream.common.step import StepKind
from slipstream.scheduler.step_timings import EDGES

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from slipstream.scheduler.batch import DraftCount
    from slipstream.scheduler.step_timings import StepTiming

WINDOW_S = 10.0
NS = 1e-9
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
LABELS = ("fence", "mps", "algorithm")
RESULT, DRAFT_BACKLOG, ACKNOWLEDGEMENT = SITES = ("result", "draft_backlog", "acknowledgement")
"""Where the loop's thread may be blocked."""
MAX_POSITIONS = 16
_PHASES = {StepKind.PREFILL: "prefill", StepKind.DECODE: "decode", StepKind.PLAIN: "decode"}


class StepMetricFamilies:
    """The metrics by name, registered once in a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        names = LABELS
        self.step_seconds = Histogram(
            "slipstream_step_seconds",
            "Time from the end of one step to the end of the next, while requests run.",
            (*names, "phase"),
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self.bubble_seconds = Counter(
            "slipstream_bubble_seconds_total",
            "Time in which neither worker had work, by the edge between the work before and after it.",
            (*names, "edge"),
            registry=registry,
        )
        self.busy_seconds = Counter(
            "slipstream_busy_seconds_total",
            "Time in which a worker worked, by service and phase.",
            (*names, "service", "phase"),
            registry=registry,
        )
        self.host_stall_seconds = Counter(
            "slipstream_host_stall_seconds_total",
            "Time in which a host thread was blocked on the device or on a worker, by service and place.",
            (*names, "service", "site"),
            registry=registry,
        )
        self.overlap_efficiency = Gauge(
            "slipstream_overlap_efficiency",
            f"1 - bubble / wall over the steps of the last {WINDOW_S:.0f} s; NaN when there were none.",
            names,
            registry=registry,
        )
        self.drafts = Counter(
            "slipstream_drafts_total",
            "Drafts that the target checked, one a request and step.",
            ("algorithm",),
            registry=registry,
        )
        self.draft_tokens = Counter(
            "slipstream_draft_tokens_total", "Tokens that the draft proposed.", ("algorithm",), registry=registry
        )
        self.accepted_tokens = Counter(
            "slipstream_accepted_tokens_total",
            "Proposed tokens that the target accepted.",
            ("algorithm",),
            registry=registry,
        )
        self.accepted_per_position = Counter(
            "slipstream_accepted_tokens_per_position_total",
            "Drafts whose token at this position was accepted; the first position is 1.",
            ("algorithm", "position"),
            registry=registry,
        )


class StepMetrics:
    """The metrics of one epoch. Counted on the loop's thread, read by the scraper's."""

    def __init__(self, families: StepMetricFamilies, *, fence: str, mps: str, algorithm: str) -> None:
        """The last three become labels of all step metrics: what they are measured with."""
        labels = dict(zip(LABELS, (fence, mps, algorithm), strict=True))
        phases = ("decode", "prefill")
        self._step_seconds = {phase: families.step_seconds.labels(**labels, phase=phase) for phase in phases}
        self._bubble = {edge: families.bubble_seconds.labels(**labels, edge=edge) for edge in EDGES}
        self._busy = {
            (service, phase): families.busy_seconds.labels(**labels, service=service, phase=phase)
            for service in ("draft", "verify")
            for phase in phases
        }
        self._stall = {
            site: families.host_stall_seconds.labels(**labels, service="scheduler", site=site) for site in SITES
        }
        self._efficiency = _Window()
        families.overlap_efficiency.labels(**labels).set_function(self._efficiency.value)
        self._drafts = families.drafts.labels(algorithm)
        self._draft_tokens = families.draft_tokens.labels(algorithm)
        self._accepted = families.accepted_tokens.labels(algorithm)
        self._accepted_at = [
            families.accepted_per_position.labels(algorithm, str(position)) for position in range(1, MAX_POSITIONS + 1)
        ]

    def observe(self, timing: StepTiming) -> None:
        """Takes in the time of a step."""
        phase = _PHASES[timing.kind]
        self._busy["verify", phase].inc(timing.verify_ns * NS)
        if timing.draft_ns:
            self._busy["draft", phase].inc(timing.draft_ns * NS)
        if timing.wall_ns is None:
            return
        self._step_seconds[phase].observe(timing.wall_ns * NS)
        for edge, nanoseconds in timing.bubbles_ns.items():
            self._bubble[edge].inc(nanoseconds * NS)
        self._efficiency.add(timing.wall_ns, sum(timing.bubbles_ns.values()))

    def host_stalled(self, site: str, seconds: float) -> None:
        """The loop's thread was blocked at `site`, one of SITES."""
        self._stall[site].inc(seconds)

    def drafted(self, drafts: list[DraftCount]) -> None:
        """Takes in what became of the drafts of a step."""
        if not drafts:
            return
        accepted = [draft.num_accepted for draft in drafts]
        self._drafts.inc(len(drafts))
        self._draft_tokens.inc(sum(draft.num_drafted for draft in drafts))
        self._accepted.inc(sum(accepted))
        for position, count_here in enumerate(self._accepted_at[: max(accepted)]):
            count_here.inc(sum(count > position for count in accepted))


class _Window:
    """Bubble and wall of the last seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, int, int]] = deque()
        self._wall_ns = 0
        self._bubble_ns = 0

    def add(self, wall_ns: int, bubble_ns: int) -> None:
        with self._lock:
            self._steps.append((time.monotonic(), wall_ns, bubble_ns))
            self._wall_ns += wall_ns
            self._bubble_ns += bubble_ns
            self._forget()

    def value(self) -> float:
        with self._lock:
            self._forget()
            return 1.0 - self._bubble_ns / self._wall_ns if self._wall_ns else float("nan")

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW_S
        while self._steps and self._steps[0][0] < oldest:
            _, wall_ns, bubble_ns = self._steps.popleft()
            self._wall_ns -= wall_ns
            self._bubble_ns -= bubble_ns
