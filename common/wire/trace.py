"""The answer to `slipstream trace`: the steps as they were ordered, and when each process did what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.events import Event, Site
from slipstream.common.wire.messages import Readers, decode, encode
from slipstream.common.wire.step import FenceName, FenceWait, WaitPlace
from slipstream.protos import trace_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.protos import worker_pb2

MAX_STEPS = 1000
MAX_WAIT_MS = 60_000
DEFAULT_WAIT_MS = 10_000


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One moment on both clocks, in nanoseconds."""

    device_ns: int
    host_ns: int
    uncertainty_ns: int = 0
    """The largest error of one against the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request for a trace. Raises InvalidArgumentError."""

    steps: int
    """Number of further steps to trace."""
    wait_ms: int = DEFAULT_WAIT_MS
    """Longest wait for a further step to complete, in milliseconds."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise InvalidArgumentError("steps", self.steps, f"1 to {MAX_STEPS}")
        if not 1 <= self.wait_ms <= MAX_WAIT_MS:
            raise InvalidArgumentError("wait_ms", self.wait_ms, f"1 to {MAX_WAIT_MS}")

    def to_pb(self) -> trace_pb2.TraceRequest:
        return encode(trace_pb2.TraceRequest, self)

    @classmethod
    def from_pb(cls, message: trace_pb2.TraceRequest) -> TraceRequest:
        """Raises InvalidArgumentError."""
        return cls(steps=message.steps, wait_ms=message.wait_ms or DEFAULT_WAIT_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step as it was ordered."""

    step: int
    num_slots: int
    """Requests that took part."""
    has_draft: bool
    """True if draft had a command in it."""
    num_decoding: int = 0
    """Requests that it decoded; the others took in prompts."""
    num_draft_tokens: int = 0
    """The most draft tokens of a request."""
    num_prompt_tokens: int = 0
    """Tokens of prompts that it took in."""
    draft_waits: tuple[FenceWait, ...] = ()
    verify_waits: tuple[FenceWait, ...] = ()

    @property
    def label(self) -> str:
        """What it does, in a word."""
        if self.num_prompt_tokens:
            return "mixed" if self.num_decoding else "prefill"
        return "decode" if self.num_draft_tokens else "plain"

    @classmethod
    def from_pb(cls, message: trace_pb2.TracedStep) -> TracedStep:
        """Raises ValueError for a fence or a place that does not exist."""
        return decode(cls, message, {"draft_waits": _wait, "verify_waits": _wait})


def _wait(message: worker_pb2.FenceWait) -> FenceWait:
    return FenceWait(FenceName(message.fence), message.value, WaitPlace(message.place))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProcess:
    """A process and its records."""

    name: str
    """ "scheduler", "draft", "verify" or "verify rank 1" and so on, or the name of a gateway."""
    pid: int
    model: str = ""
    records: tuple[Event, ...]

    @classmethod
    def from_pb(cls, message: trace_pb2.TracedProcess) -> TracedProcess:
        return decode(cls, message, records=_records(message.records))


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
    """Scheduler first, then the workers that are attached, each with its ranks, then gateways if they were asked."""
    clock_samples: tuple[ClockSample, ...]
    """The stamps' clock against the host's, at one time or at two; between them it runs evenly."""

    def to_pb(self) -> trace_pb2.TraceResponse:
        return encode(trace_pb2.TraceResponse, self)

    @classmethod
    def from_pb(cls, message: trace_pb2.TraceResponse) -> Trace:
        readers: Readers = {
            "steps": TracedStep.from_pb,
            "processes": TracedProcess.from_pb,
            "clock_samples": _clock_sample,
        }
        return decode(cls, message, readers)


@dataclass(frozen=True, slots=True)
class HostRecords:
    """The records of a worker, and its sample of the clock of the stamps."""

    epoch: int
    records: tuple[Event, ...]
    clock: ClockSample | None
    ranks: tuple[TracedProcess, ...] = ()
    """The ranks after the first, "rank 1" and so on."""

    def to_pb(self) -> trace_pb2.ReadRecordsResponse:
        return encode(trace_pb2.ReadRecordsResponse, self)

    @classmethod
    def from_pb(cls, message: trace_pb2.ReadRecordsResponse) -> HostRecords:
        readers: Readers = {"clock": _clock_sample, "ranks": TracedProcess.from_pb}
        return decode(cls, message, readers, records=_records(message.records))


_clock_sample = partial(decode, ClockSample)
_SITES = frozenset(int(site) for site in Site)


def _records(messages: Iterable[trace_pb2.TraceRecord]) -> tuple[Event, ...]:
    """Leaves out records of sites that only a newer server has."""
    return tuple(decode(Event, message, {"site": Site}) for message in messages if message.site in _SITES)
