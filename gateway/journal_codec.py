"""Encodes jobs and their output for the journal, and makes jobs from it again.

The journal has times since 1970, because those of `time.monotonic` begin anew with each boot. The clock may be set
between two of them: they say when something was, and decide nothing.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from slipstream.common.wire.job import FinishReason, Usage
from slipstream.common.wire.sequence import Refusal, SequenceSpec, StepOutput
from slipstream.gateway.job import Job
from slipstream.gateway.request import MAX_SAMPLES, CheckedRequest, samples_of
from slipstream.gateway.sample import RunningSequence, SequenceStats
from slipstream.gateway.sample_output import OutputColumns
from slipstream.protos import journal_pb2, scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.common.errors import SlipstreamError
    from slipstream.gateway.journal_file import StoredJob
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.sample import Sample

_ID_LENGTH = re.compile(rb"\x0a[\x80-\xff]*[\x00-\x7f]\x1a([\x00-\x80])\x01?", re.DOTALL)
"""After the length of JournaledJob's first field, that of the job's id, of 128 bytes at most, in the sequence."""


def record_of(job: Job) -> bytes:
    """The encoded request of a job, and the facts about it that change without output."""
    request = job.request
    return journal_pb2.JournaledJob(
        first=request.samples[0].to_pb(0, 0),
        num_samples=len(request.samples),
        stop=request.stop,
        min_new_tokens=request.min_new_tokens,
        continues_prompt=request.continues_prompt,
        shows_special=request.shows_special,
        digest=request.digest,
        attempt=job.attempt,
        created_ns=round(job.created_at.timestamp() * 1e9),
        is_detached=job.is_detached,
        is_cancelled=job.is_cancelled,
        model_identity=repr(job.model_identity),
        owner=job.owner,
    ).SerializeToString()


def output_of(job: Job) -> bytes:
    """The encoded output of a job so far, and how it ended."""
    return journal_pb2.JournaledOutput(
        samples=[_sample_to_pb(sample) for sample in job.samples],
        failure=_error_to_pb(job.failure),
        left_as=job.left_as or "",
    ).SerializeToString()


def rows_of(step: StepOutput, keys: Mapping[int, int]) -> bytes:
    """The encoded output of a step; `keys` names the sample of each sequence that counts."""
    unix_epoch_ns = _unix_epoch_ns()
    admitted = [
        (keys[sequence], at + unix_epoch_ns)
        for sequence, at in zip(step.admitted, step.admitted_ns, strict=True)
        if sequence in keys
    ]
    return (
        replace(
            step,
            sequences=[keys.get(sequence, 0) for sequence in step.sequences],
            admitted=[key for key, _ in admitted],
            admitted_ns=[at for _, at in admitted],
            published_ns=step.published_ns + unix_epoch_ns,
            logprobs={keys[sequence]: row for sequence, row in step.logprobs.items() if sequence in keys},
            cached_tokens={keys[sequence]: n for sequence, n in step.cached_tokens.items() if sequence in keys},
        )
        .to_pb()
        .SerializeToString()
    )


def job_of(stored: StoredJob, model: ServedModel, *, lacks_output: bool = False) -> Job | None:
    """The job with the output that was saved with it; None if it is one of another model.

    `add_rows` adds the rest, then `Job.settle` must be called. `lacks_output`: clients may have had more output than it
    has; the rest is made again, which is another attempt.
    """
    record = journal_pb2.JournaledJob.FromString(stored.record)
    if record.model_identity != repr(model.identity):
        return None
    first = SequenceSpec.from_pb(record.first)
    request = CheckedRequest(
        job_id=first.job_id,
        digest=record.digest,
        samples=samples_of(first, record.num_samples),
        stop=tuple(record.stop),
        min_new_tokens=record.min_new_tokens,
        continues_prompt=record.continues_prompt,
        shows_special=record.shows_special,
    )
    arrived_at = _to_monotonic(record.created_ns) / 1e9
    output = journal_pb2.JournaledOutput.FromString(stored.output or b"")
    stats = [_stats_from_pb(sample) for sample in output.samples] or [SequenceStats() for _ in request.samples]
    job = Job(
        request,
        [
            RunningSequence(spec, arrived_at=arrived_at, stats=one)
            for spec, one in zip(request.samples, stats, strict=True)
        ],
        model,
        number=stored.number,
        attempt=record.attempt + lacks_output,
        created_at=datetime.fromtimestamp(record.created_ns / 1e9, UTC),
        owner=record.owner,
    )
    for sample, message in zip(job.samples, output.samples, strict=False):
        _restore(sample, message)
    job.is_detached, job.is_cancelled = record.is_detached, record.is_cancelled
    job.left_as = output.left_as or None
    job.failure = _error_from_pb(output.failure) if output.HasField("failure") else None
    return job


def job_id_of(record: bytes) -> str:
    """The id of a job by its record, damaged or not, of which it is the beginning."""
    found = _ID_LENGTH.match(record)
    job_id = record[found.end() :][: found[1][0]].decode(errors="replace") if found is not None else ""
    return job_id if job_id.isprintable() and job_id else "unknown"


def add_rows(row: bytes, jobs: Mapping[int, Job]) -> None:
    """Adds the output of a step to those of these jobs that have a part in it."""
    step = StepOutput.from_pb(scheduler_pb2.StepOutput.FromString(row))
    for key, admitted_ns in zip(step.admitted, step.admitted_ns, strict=True):
        if (sample := _sample(jobs, key)) is not None and sample.stats.admitted_at is None:
            sample.stats.admitted_at = _to_monotonic(admitted_ns) / 1e9
    for key, num_tokens in step.cached_tokens.items():
        if (sample := _sample(jobs, key)) is not None and not sample.output.num_tokens:
            sample.stats.cached_tokens = num_tokens
    end, published_ns = 0, _to_monotonic(step.published_ns)
    columns = (step.sequences, step.num_tokens, step.num_accepted, step.finish_reasons)
    is_beyond = step.is_beyond_draft or [False] * len(step.sequences)
    for key, num_tokens, num_accepted, reason, is_beyond_draft in zip(*columns, is_beyond, strict=True):
        start, end = end, end + num_tokens
        if (sample := _sample(jobs, key)) is not None:
            with sample.failing_alone():
                sample.add(
                    step.tokens[start:end],
                    num_accepted,
                    step.logprobs.get(key, ()),
                    reason,
                    num_draft_tokens=step.num_draft_tokens,
                    published_ns=published_ns,
                    is_beyond_draft=is_beyond_draft,
                )


def _sample(jobs: Mapping[int, Job], key: int) -> Sample | None:
    job = jobs.get(key // MAX_SAMPLES)
    return None if job is None else job.samples[key % MAX_SAMPLES]


def _sample_to_pb(sample: Sample) -> journal_pb2.JournaledSample:
    columns, stats = sample.output.columns(), sample.stats
    return journal_pb2.JournaledSample(
        token_ids=columns.token_ids,
        is_draft=columns.is_draft,
        logprobs=columns.logprobs,
        top_token_ids=columns.top_token_ids,
        top_logprobs=columns.top_logprobs,
        finish_reason=None if columns.finish_reason is None else columns.finish_reason.to_pb(),
        ends_with_token=columns.ends_with_token,
        is_cut=columns.is_cut,
        usage=None if sample.usage is None else sample.usage.to_pb(),
        error=_error_to_pb(sample.error),
        total_draft_tokens=stats.total_draft_tokens,
        drafts_by_accepted=stats.drafts_by_accepted,
        cached_tokens=stats.cached_tokens,
        tokens_beyond_draft=stats.tokens_beyond_draft,
        admitted_ns=_to_unix(stats.admitted_at),
        first_token_ns=_to_unix(stats.first_token_at),
        last_token_ns=_to_unix(stats.last_token_at),
    )


def _restore(sample: Sample, message: journal_pb2.JournaledSample) -> None:
    columns = OutputColumns(
        token_ids=message.token_ids,
        is_draft=message.is_draft,
        logprobs=message.logprobs,
        top_token_ids=message.top_token_ids,
        top_logprobs=message.top_logprobs,
        finish_reason=FinishReason.from_pb(message.finish_reason),
        ends_with_token=message.ends_with_token,
        is_cut=message.is_cut,
    )
    usage = Usage.from_pb(message.usage) if message.HasField("usage") else None
    sample.restore(columns, usage, _error_from_pb(message.error) if message.HasField("error") else None)


def _stats_from_pb(message: journal_pb2.JournaledSample) -> SequenceStats:
    return SequenceStats(
        total_draft_tokens=message.total_draft_tokens,
        drafts_by_accepted=list(message.drafts_by_accepted),
        cached_tokens=message.cached_tokens,
        tokens_beyond_draft=message.tokens_beyond_draft,
        admitted_at=_from_unix(message.admitted_ns),
        first_token_at=_from_unix(message.first_token_ns),
        last_token_at=_from_unix(message.last_token_ns),
    )


def _error_to_pb(error: SlipstreamError | None) -> scheduler_pb2.Refusal | None:
    return None if error is None else Refusal(0, error).to_pb()


def _error_from_pb(message: scheduler_pb2.Refusal) -> SlipstreamError:
    return Refusal.from_pb(message).error


def _to_unix(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1e9) + _unix_epoch_ns()


def _from_unix(unix_ns: int) -> float | None:
    return _to_monotonic(unix_ns) / 1e9 if unix_ns else None


def _to_monotonic(unix_ns: int) -> int:
    """The time of `time.monotonic_ns`: negative for one before the boot, and never in the future."""
    return min(unix_ns - _unix_epoch_ns(), time.monotonic_ns())


def _unix_epoch_ns() -> int:
    """Added to a time of `time.monotonic_ns`, it gives nanoseconds since 1970, as the clock is set now."""
    return time.time_ns() - time.monotonic_ns()
