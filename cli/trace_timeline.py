"""What was recorded of steps as a timeline: who worked when, what waited for what, and what that cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.cli.trace_clock import StampClock
from slipstream.cli.trace_slices import (
    BUBBLE,
    COMMAND,
    COPY,
    FENCE,
    HOST,
    IDLE,
    KERNEL,
    LAUNCH,
    STEP,
    WAIT,
    Arrow,
    Lane,
    Slice,
    Timeline,
)
from slipstream.common.worker.recorder import Site
from slipstream.common.worker.step import FenceName, Role, StepKind
from slipstream.scheduler.telemetry.timings import DRAFT_TO_VERIFY, VERIFY_TO_DRAFT, VERIFY_TO_VERIFY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.common.worker.step import FencePoint
    from slipstream.common.worker.trace import Trace, TracedStep

FENCES = {
    FenceName.DRAFT_DONE: (Role.DRAFT, "draft.done"),
    FenceName.VERIFY_PUBLISH: (Role.VERIFY, "verify.publish"),
    FenceName.VERIFY_STASH: (Role.VERIFY, "verify.stash"),
}
"""Who signals, and the name."""
CLOCK_SLACK_NS = 1_000_000
LONGEST_STEP_NS = 600 * 10**9
_PHASES = {StepKind.PREFILL: "prefill", StepKind.DECODE: "decode", StepKind.PLAIN: "plain"}
_HOSTS = {Role.DRAFT: Lane.DRAFT_HOST, Role.VERIFY: Lane.VERIFY_HOST}
_STREAMS = {Role.DRAFT: Lane.DRAFT_STREAM, Role.VERIFY: Lane.VERIFY_STREAM}
_LOOP = {Site.SEND: "send", Site.WAIT: "wait for result of", Site.TAKE_IN: "take in", Site.IDLE: "idle after"}
_EDGES = {
    VERIFY_TO_DRAFT: "bubble verify → draft",
    DRAFT_TO_VERIFY: "bubble draft → verify",
    VERIFY_TO_VERIFY: "bubble verify → verify",
}


def timeline_of(trace: Trace) -> Timeline:
    """The slices of all lanes, those of each in order and with what is nested behind what it is in, and the arrows."""
    return _Builder(trace).build()


class _Builder:
    """One trace's. Slices are kept by what they are, for arrows to find."""

    def __init__(self, trace: Trace) -> None:
        self._steps = trace.steps
        self._clock = StampClock(trace.clock_samples)
        self._records = {process.name: process.records for process in trace.processes}
        self._roles = [role for role in Role if role.value in self._records]
        self._timeline = Timeline()
        self._host: dict[tuple[Lane, Site, int], Slice] = {}
        self._kernels: dict[tuple[Role, int], Slice] = {}
        self._idle_after: set[int] = set()

    def build(self) -> Timeline:
        self._add_loop()
        for role in self._roles:
            self._add_host(role)
            self._add_kernels(role)
        for role in self._roles:
            self._add_gaps(role)
        self._add_copies()
        self._add_steps()
        for step in self._steps:
            for role in self._roles:
                self._point_at(role, step)
        self._timeline.slices.sort(key=lambda slice_: (slice_.lane.value, slice_.begin_ns, -slice_.end_ns))
        return self._timeline

    def _add(self, slice_: Slice) -> Slice:
        self._timeline.slices.append(slice_)
        return slice_

    def _add_loop(self) -> None:
        steps = {step.step: step for step in self._steps}
        for site, step, begin, end in self._records["scheduler"]:
            if site is Site.IDLE:
                self._idle_after.add(step)
            if site in _LOOP:
                kind = IDLE if site is Site.IDLE else WAIT if site is Site.WAIT else HOST
                details = _details(steps[step]) if step in steps else {}
                slice_ = Slice(Lane.LOOP, kind, f"{_LOOP[site]} {step}", begin, end, details)
                self._host[Lane.LOOP, site, step] = self._add(slice_)

    def _add_host(self, role: Role) -> None:
        lane = _HOSTS[role]
        for site, step, begin, end in self._records[role.value]:
            if site in (Site.RECEIVE, Site.ENQUEUE):
                name = f"{'receive' if site is Site.RECEIVE else 'enqueue'} {step}"
                self._host[lane, site, step] = self._add(Slice(lane, HOST, name, begin, end, {"step": step}))

    def _add_kernels(self, role: Role) -> None:
        """By stamps, which are the worker's, who may be anybody: what cannot be is left out, or cut to what can."""
        stamps = {record.step: record for record in self._records[role.value] if record.site is Site.STREAM}
        free = 0
        for step in self._steps:
            stamp, sent = stamps.get(step.step), self._host.get((Lane.LOOP, Site.SEND, step.step))
            if stamp is None or sent is None:
                continue
            begin, end = self._clock.host_ns(stamp.begin_ns), self._clock.host_ns(stamp.end_ns)
            earliest = sent.begin_ns - CLOCK_SLACK_NS - self._clock.uncertainty_ns
            if not earliest <= begin <= end <= sent.end_ns + LONGEST_STEP_NS:
                continue
            begin = max(begin, free)
            end = max(end, begin + 1)
            free = end
            name = f"{role.value} {_PHASES[step.kind]} {step.step}"
            slice_ = Slice(_STREAMS[role], KERNEL, name, begin, end, _details(step))
            self._kernels[role, step.step] = self._add(slice_)

    def _add_gaps(self, role: Role) -> None:
        """What the stream did between the work of two steps: nothing to do, then held by a fence, or starting."""
        before: Slice | None = None
        for step in self._steps:
            work = self._kernels.get((role, step.step))
            if work is None:
                continue
            if before is not None and before.end_ns < work.begin_ns:
                self._add_gap(role, step, before.end_ns, work.begin_ns)
            before = work

    def _add_gap(self, role: Role, step: TracedStep, begin: int, end: int) -> None:
        lane, details = _STREAMS[role], {"step": step.step}
        # Of a worker that does not record, it is known when its command went out.
        enqueued = self._host.get((_HOSTS[role], Site.ENQUEUE, step.step))
        sent = self._host.get((Lane.LOOP, Site.SEND, step.step))
        there = enqueued.begin_ns if enqueued is not None else sent.end_ns if sent is not None else begin
        there = min(max(begin, there), end)
        if begin < there:
            self._add(Slice(lane, IDLE, "no command", begin, there, details))
        if there < end:
            held = [_name(point) for point in _waits(role, step) if self._signalled_after(point, there)]
            kind, name = (WAIT, f"wait for {', '.join(held)}") if held else (IDLE, f"start of {step.step}")
            self._add(Slice(lane, kind, name, there, end, details))

    def _signalled_after(self, point: FencePoint, time_ns: int) -> bool:
        signaller = self._kernels.get((FENCES[point.fence][0], point.value))
        return signaller is not None and signaller.end_ns > time_ns

    def _add_copies(self) -> None:
        """The stream of the copies: held by publish, which comes within verify's work, and then the copy."""
        free = 0
        for site, step, begun, landed in self._records["scheduler"]:
            begin, published = max(begun, free), self._kernels.get((Role.VERIFY, step))
            if site is not Site.COPY or begin >= landed:
                continue
            free = landed
            wait, details = f"wait for verify.publish >= {step}", {"step": step}
            ended = begin if published is None else max(begin, published.end_ns)
            if ended >= landed:
                copy = self._add(Slice(Lane.COPIES, WAIT, f"{wait}, and copy", begin, landed, details))
            else:
                if begin < ended:
                    self._add(Slice(Lane.COPIES, WAIT, wait, begin, ended, details))
                copy = self._add(Slice(Lane.COPIES, COPY, f"copy {step}", ended, landed, details))
            if published is not None and published.begin_ns <= copy.last_ns:
                at = max(copy.begin_ns, published.last_ns) if published.last_ns <= copy.last_ns else copy.last_ns
                self._timeline.arrows.append(Arrow(FENCE, "verify.publish", published, published.within(at), copy, at))

    def _add_steps(self) -> None:
        """From the end of one step to the end of the next, with the time in which neither worker worked."""
        before: int | None = None
        all_end = 0
        for step in self._steps:
            verify, draft = self._kernels.get((Role.VERIFY, step.step)), self._kernels.get((Role.DRAFT, step.step))
            if verify is None:
                continue
            if before is not None and step.step - 1 not in self._idle_after:
                name = f"step {step.step}, {_PHASES[step.kind]}"
                self._add(Slice(Lane.STEPS, STEP, name, before, verify.end_ns, _details(step)))
                for edge, begin, bubble_end in _bubbles(step.kind, all_end, verify, draft):
                    end = min(bubble_end, verify.end_ns)
                    if begin < end:
                        self._add(Slice(Lane.STEPS, BUBBLE, _EDGES[edge], begin, end, {"step": step.step}))
            before = verify.end_ns
            all_end = max(all_end, verify.end_ns, 0 if draft is None else draft.end_ns)

    def _point_at(self, role: Role, step: TracedStep) -> None:
        """The arrows that lead to a worker's half of a step."""
        work = self._kernels.get((role, step.step))
        enqueued = self._host.get((_HOSTS[role], Site.ENQUEUE, step.step))
        received = self._host.get((_HOSTS[role], Site.RECEIVE, step.step)) or enqueued
        sent = self._host.get((Lane.LOOP, Site.SEND, step.step))
        if sent is not None and received is not None:
            self._link(COMMAND, f"command {step.step}", sent, sent.within(received.begin_ns), received)
        if work is None:
            return
        if enqueued is not None:
            self._link(LAUNCH, f"launch {step.step}", enqueued, enqueued.begin_ns, work)
        for point in _waits(role, step):
            signaller = self._kernels.get((FENCES[point.fence][0], point.value))
            if signaller is not None:
                self._link(FENCE, FENCES[point.fence][1], signaller, signaller.last_ns, work)

    def _link(self, kind: str, name: str, source: Slice, source_ns: int, target: Slice) -> None:
        # Two clocks agree no better than they were compared: an arrow that led back in time would say nothing.
        if source_ns <= target.begin_ns:
            self._timeline.arrows.append(Arrow(kind, name, source, source_ns, target, target.begin_ns))


def _bubbles(kind: StepKind, all_end: int, verify: Slice, draft: Slice | None) -> Iterable[tuple[str, int, int]]:
    """As `scheduler/telemetry/timings.py` defines them; `all_end`: of everybody's work in the steps before."""
    if draft is not None and kind is StepKind.DECODE:
        return (VERIFY_TO_DRAFT, all_end, draft.begin_ns), (DRAFT_TO_VERIFY, draft.end_ns, verify.begin_ns)
    return ((VERIFY_TO_VERIFY, all_end, verify.begin_ns),)


def _waits(role: Role, step: TracedStep) -> tuple[FencePoint, ...]:
    return step.draft_waits if role is Role.DRAFT else step.verify_waits


def _name(point: FencePoint) -> str:
    return f"{FENCES[point.fence][1]} >= {point.value}"


def _details(step: TracedStep) -> dict[str, object]:
    return {"step": step.step, "kind": _PHASES[step.kind], "slots": step.num_slots}
