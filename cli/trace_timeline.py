"""The timeline of a trace: slices in lanes say who worked when, arrows say what a slice waited for."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from slipstream.common.wire.events import Site
from slipstream.common.wire.step import FenceName, Role, WaitPlace
from slipstream.scheduler.metrics import DRAFT_TO_VERIFY, VERIFY_TO_DRAFT, VERIFY_TO_VERIFY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from slipstream.common.wire.events import Event
    from slipstream.common.wire.trace import ClockSample, Trace, TracedStep

FENCES = {
    FenceName.DRAFT_PROPOSED: (Role.DRAFT, Site.STREAM, "draft.proposed"),
    FenceName.DRAFT_PREFILLED: (Role.DRAFT, Site.PREFILL, "draft.prefilled"),
    FenceName.VERIFY_PUBLISH: (Role.VERIFY, Site.STREAM, "verify.publish"),
    FenceName.VERIFY_STASH: (Role.VERIFY, Site.STREAM, "verify.stash"),
}
"""The worker that signals a fence, the work after which it does, and the fence's name."""
_RANK = "verify rank "
"""The names of ranks after the first begin so; on a CPU the scheduler has their records."""
_PARTS = {Role.DRAFT: (Site.STREAM, Site.PREFILL), Role.VERIFY: (Site.STREAM,)}
"""A stream's work in a step, in order."""
MAX_DRIFT = 1e-4
"""Highest relative drift between two clocks of a host; quartzes differ by less."""
CLOCK_SLACK_NS = 1_000_000
LONGEST_STEP_NS = 600 * 10**9

# The kinds of slices, and of arrows.
STEP, BUBBLE, HOST, RESULT, KERNEL, WAIT, IDLE = "step", "bubble", "host", "result", "kernel", "wait", "idle"
REQUEST = "request"
FENCE, COMMAND, LAUNCH = "fence", "command", "launch"

_LOOP = {
    Site.SEND: "send",
    Site.WAIT: "wait for result of",
    Site.TAKE_IN: "take in",
    Site.IDLE: "idle after",
    Site.HOLD: "hold back during",
    Site.DRAFT_BACKLOG: "wait for the draft before",
    Site.ACKNOWLEDGEMENT: "wait for the acknowledgement of",
}
_HOST = {Site.RECEIVE: "receive", Site.ENQUEUE: "enqueue", Site.STAGING: "wait for the device before"}
_KINDS = dict.fromkeys((Site.WAIT, Site.DRAFT_BACKLOG, Site.ACKNOWLEDGEMENT, Site.STAGING), WAIT) | dict.fromkeys(
    (Site.IDLE, Site.HOLD), IDLE
)
_REQUEST = {Site.TOKENISE: "tokenise", Site.SUBMIT: "submit", Site.FIRST_TOKEN: "first token"}
_EDGES = {
    VERIFY_TO_DRAFT: "bubble verify → draft",
    DRAFT_TO_VERIFY: "bubble draft → verify",
    VERIFY_TO_VERIFY: "bubble verify → verify",
}


class Place(NamedTuple):
    """Numbers and names of a lane in a viewer. No two threads have the same number, in any process."""

    process_number: int
    thread_number: int
    process: str
    thread: str


class Lane(Place, enum.Enum):
    """A row of the timeline, which has one thing at a time. In the order in which they are shown; ranks after the first
    follow, and gateways."""

    STEPS = 1, 11, "scheduler", "steps, and what they lose"
    LOOP = 1, 12, "scheduler", "loop"
    RESULTS = 1, 13, "scheduler", "results"
    DRAFT_HOST = 2, 21, "draft", "host"
    DRAFT_STREAM = 2, 22, "draft", "stream"
    VERIFY_HOST = 3, 31, "verify", "host"
    VERIFY_STREAM = 3, 32, "verify", "stream"


Row: TypeAlias = Lane | Place
"""A lane, one of a rank, or a row of a gateway: of these there are as many as requests overlap."""
_HOSTS = {Role.DRAFT: Lane.DRAFT_HOST, Role.VERIFY: Lane.VERIFY_HOST}
_STREAMS = {Role.DRAFT: Lane.DRAFT_STREAM, Role.VERIFY: Lane.VERIFY_STREAM}


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time, in nanoseconds of the host's clock."""

    lane: Row
    kind: str
    name: str
    begin_ns: int
    end_ns: int
    details: Mapping[str, object]

    @property
    def last_ns(self) -> int:
        """The last moment that is surely within the slice: its end may be the beginning of the next one."""
        return max(self.begin_ns, self.end_ns - 1)

    def within(self, time_ns: int) -> int:
        """The moment within the slice that is closest to `time_ns`."""
        return min(max(time_ns, self.begin_ns), self.last_ns)


@dataclass(frozen=True, slots=True)
class Arrow:
    """Leads from a slice to a slice that it let begin. Both times are within their slices."""

    kind: str
    name: str
    source: Slice
    source_ns: int
    target: Slice
    target_ns: int


class StampClock:
    """Maps times of the stamps' clock to the host's by samples of both, between which they drift evenly apart.

    If the samples are less certain than the drift can be large, only the better sample counts.
    """

    def __init__(self, samples: Sequence[ClockSample]) -> None:
        """`samples`: at least one; of more, the first and the last count."""
        first, last = samples[0], samples[-1]
        elapsed_ns = last.device_ns - first.device_ns
        if first.uncertainty_ns + last.uncertainty_ns >= MAX_DRIFT * elapsed_ns:
            first = last = min(first, last, key=lambda sample: sample.uncertainty_ns)
        self._first, self._last = first, last
        self.uncertainty_ns = max(first.uncertainty_ns, last.uncertainty_ns)
        """Largest error of a mapped time, in nanoseconds."""

    def host_ns(self, device_ns: int) -> int:
        """The time on the host's clock."""
        first, last = self._first, self._last
        offset = first.host_ns - first.device_ns
        elapsed = last.device_ns - first.device_ns
        if elapsed <= 0:
            return device_ns + offset
        drift = last.host_ns - last.device_ns - offset
        return device_ns + offset + drift * (device_ns - first.device_ns) // elapsed


class Timeline:
    """The slices and arrows of a trace. A lane's slices are in order, nested ones after the one around them."""

    def __init__(self, trace: Trace) -> None:
        self.slices: list[Slice] = []
        self.arrows: list[Arrow] = []
        self._steps = trace.steps
        self._clock = StampClock(trace.clock_samples)
        self._records = {process.name: process.records for process in trace.processes}
        self._host: dict[tuple[Lane, Site, int], Slice] = {}
        self._kernels: dict[tuple[Role, Site, int], Slice] = {}
        roles = [role for role in Role if role.value in self._records]
        details = {step.step: _details(step) for step in self._steps}
        self._add_host("scheduler", Lane.LOOP, _LOOP, lambda step: details.get(step, {}))
        for role in roles:
            self._add_host(role.value, _HOSTS[role], _HOST, lambda step: {"step": step})
            self._add_kernels(role)
        for role in roles:
            self._add_gaps(role)
        self._add_results()
        self._add_steps()
        for step in self._steps:
            for role in roles:
                self._add_arrows(role, step)
        begin_ns = min((slice_.begin_ns for slice_ in self.slices), default=0)
        end_ns = max((slice_.end_ns for slice_ in self.slices), default=0)
        ranks = [name for name in self._records if name.startswith(_RANK)]
        gateways = [name for name in self._records if name.startswith("gateway")]
        for number, name in enumerate(ranks + gateways, start=len(_PARTS) + 2):
            if name in ranks:
                self._add_rank(number, name)
            else:
                self._add_requests(number, name, begin_ns, end_ns)
        self.slices.sort(key=lambda slice_: (slice_.lane, slice_.begin_ns, -slice_.end_ns))

    def _add(self, lane: Row, kind: str, name: str, begin_ns: int, end_ns: int, details: Mapping[str, object]) -> Slice:
        self.slices.append(Slice(lane, kind, name, begin_ns, end_ns, details))
        return self.slices[-1]

    def _add_host(
        self, process: str, lane: Lane, names: Mapping[Site, str], details_of: Callable[[int], Mapping[str, object]]
    ) -> None:
        """Adds what a host thread did, by the names of its sites."""
        for site, step, begin, end in self._records[process]:
            if site in names:
                kind, name = _KINDS.get(site, HOST), f"{names[site]} {step}"
                self._host[lane, site, step] = self._add(lane, kind, name, begin, end, details_of(step))

    def _add_kernels(self, role: Role) -> None:
        """Adds a stream's work by its stamps. A drafter may stamp anything: impossible times are left out or cut."""
        stamps = {(record.site, record.step): record for record in self._records[role.value]}
        free = 0
        for step, site in product(self._steps, _PARTS[role]):
            stamp, sent = stamps.get((site, step.step)), self._host.get((Lane.LOOP, Site.SEND, step.step))
            if stamp is None or sent is None:
                continue
            begin, end = self._clock.host_ns(stamp.begin_ns), self._clock.host_ns(stamp.end_ns)
            earliest = sent.begin_ns - CLOCK_SLACK_NS - self._clock.uncertainty_ns
            if not earliest <= begin <= end <= sent.end_ns + LONGEST_STEP_NS:
                continue
            begin = max(begin, free)
            free = end = max(end, begin + 1)
            what = step.label if role is Role.VERIFY else "prefill" if site is Site.PREFILL else "decode"
            name = f"{role.value} {what} {step.step}"
            self._kernels[role, site, step.step] = self._add(_STREAMS[role], KERNEL, name, begin, end, _details(step))

    def _add_gaps(self, role: Role) -> None:
        """Adds what a stream did between the work of two steps: idle, then held by a fence, or starting."""
        works = [
            (step, site, work)
            for step, site in product(self._steps, _PARTS[role])
            if (work := self._kernels.get((role, site, step.step))) is not None
        ]
        for (_, _, before), (step, site, work) in pairwise(works):
            begin, end, details = before.end_ns, work.begin_ns, {"step": step.step}
            # For a worker that does not record, only the sending of its command is known; work is shown only if it is.
            enqueued = self._host.get((_HOSTS[role], Site.ENQUEUE, step.step))
            there = self._host[Lane.LOOP, Site.SEND, step.step].end_ns if enqueued is None else enqueued.begin_ns
            there = min(max(begin, there), end)
            if begin < there:
                self._add(work.lane, IDLE, "no command", begin, there, details)
            if there < end:
                held = [
                    f"{name} >= {value}"
                    for name, value, signaller in self._waits(role, site, step)
                    if signaller.end_ns > there
                ]
                kind, name = (WAIT, f"wait for {', '.join(held)}") if held else (IDLE, f"start of {step.step}")
                self._add(work.lane, kind, name, there, end, details)

    def _waits(self, role: Role, site: Site, step: TracedStep) -> Iterator[tuple[str, int, Slice]]:
        """Yields the waits before a worker's work: the fence's name, its value, the work that signals it."""
        before = WaitPlace.PREFILL_HIDDEN if site is Site.PREFILL else WaitPlace.START
        for fence, value, place in step.draft_waits if role is Role.DRAFT else step.verify_waits:
            if place is not before:
                continue
            signalling, part, name = FENCES[fence]
            if (signaller := self._kernels.get((signalling, part, value))) is not None:
                yield name, value, signaller

    def _add_results(self) -> None:
        """Adds the results: awaited until publish, about the end of verify's work, and then not seen yet."""
        free = 0
        for site, step, begun, seen in self._records["scheduler"]:
            begin, published = max(begun, free), self._kernels.get((Role.VERIFY, Site.STREAM, step))
            if site is not Site.RESULT or begin >= seen:
                continue
            free = seen
            wait, details = f"wait for verify.publish >= {step}", {"step": step}
            ended = begin if published is None else max(begin, published.end_ns)
            if ended >= seen:
                result = self._add(Lane.RESULTS, WAIT, f"{wait}, and look", begin, seen, details)
            else:
                if begin < ended:
                    self._add(Lane.RESULTS, WAIT, wait, begin, ended, details)
                result = self._add(Lane.RESULTS, RESULT, f"unseen {step}", ended, seen, details)
            if published is not None and published.begin_ns <= result.last_ns:
                at = max(result.begin_ns, published.last_ns) if published.last_ns <= result.last_ns else result.last_ns
                self.arrows.append(Arrow(FENCE, "verify.publish", published, published.within(at), result, at))

    def _add_steps(self) -> None:
        """Adds steps, each from the end of the one before, with the time in which neither worker worked."""
        idle_after = {record.step for record in self._records["scheduler"] if record.site is Site.IDLE}
        before: int | None = None
        all_end = 0
        for step in self._steps:
            verify = self._kernels.get((Role.VERIFY, Site.STREAM, step.step))
            drafts = [self._kernels.get((Role.DRAFT, site, step.step)) for site in _PARTS[Role.DRAFT]]
            if verify is None:
                continue
            if before is not None and step.step - 1 not in idle_after:
                name = f"step {step.step}, {step.label}"
                self._add(Lane.STEPS, STEP, name, before, verify.end_ns, _details(step))
                awaited = drafts[0] if step.num_draft_tokens else None
                for edge, begin, bubble_end in _bubbles(before, all_end, verify, awaited):
                    end = min(bubble_end, verify.end_ns)
                    if begin < end:
                        self._add(Lane.STEPS, BUBBLE, _EDGES[edge], begin, end, {"step": step.step})
            before = verify.end_ns
            all_end = max(all_end, verify.end_ns, *(draft.end_ns for draft in drafts if draft is not None))

    def _add_rank(self, process_number: int, name: str) -> None:
        """Adds the work of a rank after the first: what it computed, and waited for the others in collectives."""
        lane = Place(process_number, 1000 * process_number, name, "forwards and logits")
        steps = {step.step: step for step in self._steps}
        waited_ns = {
            (r.step, r.begin_ns): r.end_ns - r.begin_ns for r in self._records[name] if r.site is Site.COLLECTIVES
        }
        for site, step, begin, end in self._records[name]:
            if site is Site.STREAM and step in steps:
                waited = waited_ns.get((step, begin), 0)
                times = {"busy us": (end - begin - waited) / 1000, "in collectives us": waited / 1000}
                self._add(lane, KERNEL, f"{steps[step].label} {step}", begin, end, _details(steps[step]) | times)

    def _add_requests(self, process_number: int, name: str, earliest_ns: int, latest_ns: int) -> None:
        """Adds a gateway's requests that overlap this time, each in the first row that is free."""
        requests: dict[int, list[Event]] = {}
        for record in self._records[name]:
            if record.site in _REQUEST:
                requests.setdefault(record.step, []).append(record)
        free_ns: list[int] = []
        for job, records in sorted(requests.items(), key=lambda item: item[1][0].begin_ns):
            begin, end = records[0].begin_ns, records[-1].end_ns
            if end < earliest_ns or begin > latest_ns:
                continue
            row = next((row for row, free in enumerate(free_ns) if free <= begin), len(free_ns))
            free_ns[row : row + 1] = [end]
            lane = Place(process_number, 1000 * process_number + row, name, "requests, until their first token")
            for site, _, begin_ns, end_ns in records:
                self._add(lane, REQUEST, _REQUEST[site], begin_ns, end_ns, {"job": job})

    def _add_arrows(self, role: Role, step: TracedStep) -> None:
        """Adds the arrows that lead to a worker's part of a step."""
        enqueued = self._host.get((_HOSTS[role], Site.ENQUEUE, step.step))
        received = self._host.get((_HOSTS[role], Site.RECEIVE, step.step)) or enqueued
        sent = self._host.get((Lane.LOOP, Site.SEND, step.step))
        if sent is not None and received is not None:
            self._link(COMMAND, f"command {step.step}", sent, sent.within(received.begin_ns), received)
        for site in _PARTS[role]:
            work = self._kernels.get((role, site, step.step))
            if work is None:
                continue
            if enqueued is not None:
                self._link(LAUNCH, f"launch {step.step}", enqueued, enqueued.begin_ns, work)
            for name, _, signaller in self._waits(role, site, step):
                self._link(FENCE, name, signaller, signaller.last_ns, work)

    def _link(self, kind: str, name: str, source: Slice, source_ns: int, target: Slice) -> None:
        # Two clocks agree only as well as they were compared: an arrow back in time would say nothing.
        if source_ns <= target.begin_ns:
            self.arrows.append(Arrow(kind, name, source, source_ns, target, target.begin_ns))


def _bubbles(verify_end: int, all_end: int, verify: Slice, draft: Slice | None) -> Iterable[tuple[str, int, int]]:
    """Bubbles as `scheduler/metrics.py` defines them.

    `verify_end`: when verify ended the step before; `all_end`: end of all work in the steps before. `draft`: its decode
    part, if verify waits for that at its start.
    """
    if draft is not None:
        drafted = max(draft.end_ns, verify_end)
        return (VERIFY_TO_DRAFT, all_end, draft.begin_ns), (DRAFT_TO_VERIFY, drafted, verify.begin_ns)
    return ((VERIFY_TO_VERIFY, all_end, verify.begin_ns),)


def _details(step: TracedStep) -> dict[str, object]:
    details: dict[str, object] = {"step": step.step, "kind": step.label, "slots": step.num_slots}
    return details | {"prompt tokens": step.num_prompt_tokens} if step.num_prompt_tokens else details
