"""The answer to `slipstream trace`: the steps as they were ordered, and when each process did what."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from slipstream.common.device.clock import ClockSample
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.worker.recorder import Record, Site
from slipstream.common.worker.step import FenceName, FencePoint, StepKind
from slipstream.protos import trace_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_STEPS = 1000
MAX_WAIT_MS = 60_000
DEFAULT_WAIT_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request for a trace. Raises InvalidArgumentError."""

    steps: int
    """How many further steps."""
    wait_ms: int = DEFAULT_WAIT_MS
    """How long to wait for each."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise InvalidArgumentError("steps", self.steps, f"1 to {MAX_STEPS}")
        if not 1 <= self.wait_ms <= MAX_WAIT_MS:
            raise InvalidArgumentError("wait_ms", self.wait_ms, f"1 to {MAX_WAIT_MS}")

    def to_pb(self) -> trace_pb2.TraceRequest:
        return trace_pb2.TraceRequest(steps=self.steps, wait_ms=self.wait_ms)

    @classmethod
    def from_pb(cls, message: trace_pb2.TraceRequest) -> TraceRequest:
        """Raises InvalidArgumentError."""
        return cls(steps=message.steps, wait_ms=message.wait_ms or DEFAULT_WAIT_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step as it was ordered."""

    step: int
    kind: StepKind
    num_slots: int
    """Requests that took part."""
    has_draft: bool
    """True if draft had a command in it."""
    draft_waits: tuple[FencePoint, ...] = ()
    verify_waits: tuple[FencePoint, ...] = ()

    def to_pb(self) -> trace_pb2.TracedStep:
        message = trace_pb2.TracedStep(step=self.step, num_slots=self.num_slots, has_draft=self.has_draft)
        message.kind = int(self.kind)  # type: ignore[assignment]
        for target, points in ((message.draft_waits, self.draft_waits), (message.verify_waits, self.verify_waits)):
            for point in points:
                target.add(fence=int(point.fence), value=point.value)
        return message

    @classmethod
    def from_pb(cls, message: trace_pb2.TracedStep) -> TracedStep:
        """Raises ValueError for a kind or a fence that there cannot be."""
        return cls(
            step=message.step,
            kind=StepKind(message.kind),
            num_slots=message.num_slots,
            has_draft=message.has_draft,
            draft_waits=tuple(FencePoint(FenceName(point.fence), point.value) for point in message.draft_waits),
            verify_waits=tuple(FencePoint(FenceName(point.fence), point.value) for point in message.verify_waits),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProcess:
    """One of the processes, and what it recorded."""

    name: str
    """ "scheduler", "draft" or "verify"."""
    pid: int
    model: str = ""
    records: tuple[Record, ...]

    def to_pb(self) -> trace_pb2.TracedProcess:
        records = records_to_pb(self.records)
        return trace_pb2.TracedProcess(name=self.name, pid=self.pid, model=self.model, records=records)

    @classmethod
    def from_pb(cls, message: trace_pb2.TracedProcess) -> TracedProcess:
        """Leaves out records of sites that only a newer server has."""
        return cls(name=message.name, pid=message.pid, model=message.model, records=records_from_pb(message.records))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Steps of one epoch, with all that is known about when they happened."""

    epoch: int
    device: str
    """ "cpu" or a GPU's UUID."""
    fence: str
    under_mps: bool
    algorithm: str
    run_ahead: int
    steps: tuple[TracedStep, ...]
    """In order."""
    processes: tuple[TracedProcess, ...]
    """Scheduler first, then the workers that are attached."""
    clock_samples: tuple[ClockSample, ...]
    """The stamps' clock against the host's, at one time or at two; between them it runs evenly."""

    def to_pb(self) -> trace_pb2.TraceResponse:
        return trace_pb2.TraceResponse(
            **{name: getattr(self, name) for name in _PLAIN},
            steps=[step.to_pb() for step in self.steps],
            processes=[process.to_pb() for process in self.processes],
            clock_samples=[clock_to_pb(sample) for sample in self.clock_samples],
        )

    @classmethod
    def from_pb(cls, message: trace_pb2.TraceResponse) -> Trace:
        return cls(
            **{name: getattr(message, name) for name in _PLAIN},
            steps=tuple(map(TracedStep.from_pb, message.steps)),
            processes=tuple(map(TracedProcess.from_pb, message.processes)),
            clock_samples=tuple(map(clock_from_pb, message.clock_samples)),
        )


_PLAIN = tuple(field.name for field in fields(Trace) if field.name not in ("steps", "processes", "clock_samples"))
_SITES = {int(site): site for site in Site}


@dataclass(frozen=True, slots=True)
class HostRecords:
    """The records of a worker, and its sample of the clock of the stamps."""

    epoch: int
    records: tuple[Record, ...]
    clock: ClockSample | None

    def to_pb(self) -> trace_pb2.ReadRecordsResponse:
        clock = None if self.clock is None else clock_to_pb(self.clock)
        return trace_pb2.ReadRecordsResponse(epoch=self.epoch, records=records_to_pb(self.records), clock=clock)

    @classmethod
    def from_pb(cls, message: trace_pb2.ReadRecordsResponse) -> HostRecords:
        clock = clock_from_pb(message.clock) if message.HasField("clock") else None
        return cls(message.epoch, records_from_pb(message.records), clock)


def clock_to_pb(sample: ClockSample) -> trace_pb2.ClockSample:
    return trace_pb2.ClockSample(
        device_ns=sample.device_ns, host_ns=sample.host_ns, uncertainty_ns=sample.uncertainty_ns
    )


def clock_from_pb(message: trace_pb2.ClockSample) -> ClockSample:
    return ClockSample(message.device_ns, message.host_ns, message.uncertainty_ns)


def records_to_pb(records: Iterable[Record]) -> list[trace_pb2.TraceRecord]:
    return [
        trace_pb2.TraceRecord(site=int(site), step=step, begin_ns=begin, end_ns=end)  # type: ignore[arg-type]
        for site, step, begin, end in records
    ]


def records_from_pb(messages: Iterable[trace_pb2.TraceRecord]) -> tuple[Record, ...]:
    """Leaves out records of unknown sites."""
    return tuple(
        Record(_SITES[message.site], message.step, message.begin_ns, message.end_ns)
        for message in messages
        if message.site in _SITES
    )
