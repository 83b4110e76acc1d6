"""A job's state, as `CreateJob`, `GetJob` and `ListJobs` answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime

from slipstream.common.api.output_chunk import (
    READERS,
    FinishReason,
    MatchedStop,
    Usage,
    matched_stop_from_pb,
    matched_stop_to_pb,
)
from slipstream.common.messages import decode, encode
from slipstream.protos import generation_pb2


class JobState(enum.StrEnum):
    """The state of a job."""

    WAITING = "waiting"
    """In the queue."""
    RUNNING = "running"
    ENDED = "ended"
    """`finish_reason` or `error` says how."""


_STATE_FROM_PB = {generation_pb2.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInfo:
    """One of a job's outputs at one moment."""

    num_tokens: int
    """Tokens generated so far."""
    finish_reason: FinishReason | None = None
    """Why it ended; None before that, and when the job failed first."""
    matched_stop: MatchedStop | None = None
    """The stop that matched, when the reason is "stop"."""
    usage: Usage | None = None
    """Set when it has ended."""

    def to_pb(self) -> generation_pb2.Sample:
        return encode(generation_pb2.Sample, self, **matched_stop_to_pb(self.matched_stop))

    @classmethod
    def from_pb(cls, message: generation_pb2.Sample) -> SampleInfo:
        return decode(cls, message, READERS, matched_stop=matched_stop_from_pb(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job at one moment."""

    job_id: str
    state: JobState
    created_at: datetime
    """By the server's clock, in UTC."""
    num_tokens: int
    """Tokens generated so far, of all samples together."""
    finish_reason: FinishReason | None = None
    """Why it ended; None before that, and for a job that failed. If its samples differ: "abort", else "length"."""
    error: str = ""
    """The error that ended it; empty if there was none."""
    usage: Usage | None = None
    """The usage of all samples together. Set when it has ended."""
    samples: tuple[SampleInfo, ...] = ()
    """Each of its outputs."""
    attempt: int = 0
    """Names this beginning of the job: another job of the same name, which began later, has a larger number."""

    @property
    def is_over(self) -> bool:
        """True if there will be no more tokens."""
        return self.state is JobState.ENDED

    def to_pb(self) -> generation_pb2.Job:
        message = encode(generation_pb2.Job, self, state=f"JOB_STATE_{self.state.name}")
        message.create_time.FromDatetime(self.created_at)
        return message

    @classmethod
    def from_pb(cls, message: generation_pb2.Job) -> JobInfo:
        """Decodes it. A state that this version does not know counts as running."""
        state = _STATE_FROM_PB.get(message.state, JobState.RUNNING)
        readers = {**READERS, "samples": SampleInfo.from_pb}
        return decode(cls, message, readers, state=state, created_at=message.create_time.ToDatetime(tzinfo=UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Some of a server's jobs, the latest first."""

    jobs: tuple[JobInfo, ...]
    next_page_token: str = ""
    """For the next page; empty when this is the last."""

    def to_pb(self) -> generation_pb2.ListJobsResponse:
        return encode(generation_pb2.ListJobsResponse, self)

    @classmethod
    def from_pb(cls, message: generation_pb2.ListJobsResponse) -> JobPage:
        return decode(cls, message, {"jobs": JobInfo.from_pb})
