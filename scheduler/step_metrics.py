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

    from slipstream.scheduler.batch import Step
    from slipstream.scheduler.future_map import StepResult
    from slipstream.scheduler.step_timings import StepTiming

WINDOW_S = 10.0
NS = 1e-9
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
_PHASES = {StepKind.PREFILL: "prefill", StepKind.DECODE: "decode", StepKind.PLAIN: "decode"}


class StepMetrics:
    """Counted on the loop's thread, read by the scraper's."""

    def __init__(self, registry: CollectorRegistry, *, fence: str, mps: str, algorithm: str) -> None:
        """The last three become labels of all step metrics: what they are measured with."""
        labels = {"fence": fence, "mps": mps, "algorithm": algorithm}
        names = tuple(labels)
        step_seconds = Histogram(
            "slipstream_step_seconds",
            "Time from the end of one step to the end of the next, while requests run.",
            (*names, "phase"),
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._step_seconds = {phase: step_seconds.labels(**labels, phase=phase) for phase in ("decode", "prefill")}
        bubble = Counter(
            "slipstream_bubble_seconds_total",
            "Time in which neither worker had work, by the edge between the work before and after it.",
            (*names, "edge"),
            registry=registry,
        )
        self._bubble = {edge: bubble.labels(**labels, edge=edge) for edge in EDGES}
        busy = Counter(
            "slipstream_busy_seconds_total",
            "Time in which a worker worked, by service and phase.",
            (*names, "service", "phase"),
            registry=registry,
        )
        self._busy = {
            (service, phase): busy.labels(**labels, service=service, phase=phase)
            for service in ("draft", "verify")
            for phase in ("decode", "prefill")
        }
        self._stall = Counter(
            "slipstream_host_stall_seconds_total",
            "Time in which a host thread was blocked on the device or on a worker, by service and place.",
            (*names, "service", "site"),
            registry=registry,
        )
        self._labels = labels
        self._stalls: dict[str, Counter] = {}
        self._efficiency = _Window()
        Gauge(
            "slipstream_overlap_efficiency",
            f"1 - bubble / wall over the steps of the last {WINDOW_S:.0f} s; NaN when there were none.",
            names,
            registry=registry,
        ).labels(**labels).set_function(self._efficiency.value)
        self._accepting = _AcceptMetrics(registry, algorithm)

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
        """The loop's thread was blocked at `site`."""
        counter = self._stalls.get(site)
        if counter is None:
            counter = self._stalls[site] = self._stall.labels(**self._labels, service="scheduler", site=site)
        counter.inc(seconds)

    def consumed(self, step: Step, result: StepResult, num_draft_tokens: int) -> None:
        """Takes in what a step brought."""
        if step.kind is StepKind.DECODE:
            self._accepting.consumed([len(tokens) - 1 for tokens in result.tokens], num_draft_tokens)


class _AcceptMetrics:
    def __init__(self, registry: CollectorRegistry, algorithm: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("algorithm",), registry=registry).labels(algorithm=algorithm)

        self._drafts = counter("slipstream_drafts_total", "Drafts that the target checked, one a request and step.")
        self._draft_tokens = counter("slipstream_draft_tokens_total", "Tokens that the draft proposed.")
        self._accepted = counter("slipstream_accepted_tokens_total", "Proposed tokens that the target accepted.")
        self._per_position = Counter(
            "slipstream_accepted_tokens_per_position_total",
            "Drafts whose token at this position was accepted; the first position is 1.",
            ("algorithm", "position"),
            registry=registry,
        )
        self._algorithm = algorithm
        self._positions: list[Counter] = []

    def consumed(self, accepted: list[int], num_draft_tokens: int) -> None:
        while len(self._positions) < num_draft_tokens:
            position = str(len(self._positions) + 1)
            self._positions.append(self._per_position.labels(algorithm=self._algorithm, position=position))
        self._drafts.inc(len(accepted))
        self._draft_tokens.inc(len(accepted) * num_draft_tokens)
        self._accepted.inc(sum(accepted))
        for position, counter in enumerate(self._positions, start=1):
            if reached := sum(count >= position for count in accepted):
                counter.inc(reached)


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
