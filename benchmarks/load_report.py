"""Sums up a run of the load generator: throughput, and percentiles of the latencies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from slipstream.benchmarks.load_generator import COMPLETED, FAILED, LEFT, REJECTED
from slipstream.common.api.output_chunk import mean_accept_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from slipstream.benchmarks.load_generator import LoadRun, RequestRecord


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of latencies in milliseconds; all 0 when there were none."""

    count: int
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Self:
        """From latencies in seconds."""
        milliseconds = 1e3 * np.fromiter(values, dtype=np.float64)
        if not milliseconds.size:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (round(float(p), 3) for p in np.percentile(milliseconds, (50, 90, 99)))
        return cls(milliseconds.size, p50, p90, p99, round(float(milliseconds.max()), 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One run. Latencies count from the due time of requests, for requests that were due after the warm-up."""

    seconds: float
    """The window: from the warm-up's end to the due time of the last request."""
    num_requests: int
    """Due in the window; the next four are their outcomes."""
    num_completed: int
    num_rejected: int
    num_failed: int
    num_left: int
    """The run was given up first."""
    requests_per_second: float
    """Completed in the window."""
    tokens_per_second: float
    """Received in the window, of all requests."""
    completed_tokens_per_second: float
    """Received in the window, of requests that were completed, then or later."""
    all_tokens_per_second: float
    """Received in the window, and the prompts of requests that were completed in it."""
    ttft_ms: Percentiles
    """To the first token, of completed requests."""
    inter_token_ms: Percentiles
    """Between tokens of completed requests; those of one message share the time since the one before."""
    message_gap_ms: Percentiles
    """Between messages of completed requests."""
    time_per_token_ms: Percentiles
    """The mean of each completed request behind its first token; one with a single token has none."""
    end_to_end_ms: Percentiles
    """From the due time to the end of completed requests."""
    rejection_ms: Percentiles
    """To the answer, of rejected requests."""
    lateness_ms: Percentiles
    """From a request's due time to the time at which it was made: the generator's own delay, part of the latencies."""
    generator_cpu_share: float
    """CPU time of the generator's busiest process, as a share of one core; near 1 it measures itself."""
    cached_share: float
    """The part of the prompts' tokens that was in the prefix cache, of completed requests."""
    mean_accept_length: float
    """Tokens of a step that checked a draft; 1 without drafts."""


def report_of(run: LoadRun, warm_up_s: float) -> LoadReport:
    """Sums up a run; requests that were due in the first seconds do not count."""
    records = [record for record in run.records if record.intended_s >= warm_up_s]
    outcomes = Counter(record.outcome for record in records)
    completed = [record for record in records if record.outcome == COMPLETED]
    window_s = run.seconds - warm_up_s
    all_completed = [record for record in run.records if record.outcome == COMPLETED]
    ended = [record for record in all_completed if warm_up_s <= record.ended_s < run.seconds]
    tokens_per_second = _tokens_between(run.records, warm_up_s, run.seconds) / window_s
    usages = [record.usage for record in completed if record.usage is not None]
    return LoadReport(
        seconds=window_s,
        num_requests=len(records),
        num_completed=outcomes[COMPLETED],
        num_rejected=outcomes[REJECTED],
        num_failed=outcomes[FAILED],
        num_left=outcomes[LEFT],
        requests_per_second=len(ended) / window_s,
        tokens_per_second=tokens_per_second,
        completed_tokens_per_second=_tokens_between(all_completed, warm_up_s, run.seconds) / window_s,
        all_tokens_per_second=tokens_per_second + sum(r.usage.prompt_tokens for r in ended if r.usage) / window_s,
        ttft_ms=Percentiles.of_seconds(record.times_s[0] - record.intended_s for record in completed),
        inter_token_ms=Percentiles.of_seconds(_inter_token(completed)),
        message_gap_ms=Percentiles.of_seconds(b - a for record in completed for a, b in pairwise(record.times_s)),
        time_per_token_ms=Percentiles.of_seconds(
            (r.times_s[-1] - r.times_s[0]) / (r.num_tokens - 1) for r in completed if r.num_tokens > 1
        ),
        end_to_end_ms=Percentiles.of_seconds(record.ended_s - record.intended_s for record in completed),
        rejection_ms=Percentiles.of_seconds(r.ended_s - r.intended_s for r in records if r.outcome == REJECTED),
        lateness_ms=Percentiles.of_seconds(record.sent_s - record.intended_s for record in records),
        generator_cpu_share=run.cpu_s / run.wall_s,
        cached_share=sum(u.cached_tokens for u in usages) / max(1, sum(u.prompt_tokens for u in usages)),
        mean_accept_length=mean_accept_length(
            sum(usage.total_accepted_tokens for usage in usages), sum(usage.num_verify_steps for usage in usages)
        ),
    )


def failures(run: LoadRun) -> list[str]:
    """A line for each request that failed: the error, or what its end had to be."""
    return [record.error for record in run.records if record.outcome == FAILED]


def _tokens_between(records: Sequence[RequestRecord], start_s: float, end_s: float) -> int:
    return sum(
        count
        for record in records
        for at, count in zip(record.times_s, record.counts, strict=True)
        if start_s <= at < end_s
    )


def _inter_token(records: Iterable[RequestRecord]) -> Iterator[float]:
    for record in records:
        for (before, after), count in zip(pairwise(record.times_s), record.counts[1:], strict=True):
            for _ in range(count):
                yield (after - before) / count
