"""What a client is told of its job: progress in tokens becomes chunks with text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slipstream.common.chunk import Chunk, FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.scheduler.detokenizer import Detokenizer
    from slipstream.scheduler.jobs import Job, Progress
    from slipstream.scheduler.request_metrics import RequestMetrics


class JobOutput:
    """The output of one job, in order."""

    def __init__(self, job: Job, detokenizer: Detokenizer, metrics: RequestMetrics) -> None:
        self._job = job
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._num_tokens = 0
        self._last_tokens_at = 0.0

    def add(self, progress: Sequence[Progress]) -> Chunk | None:
        """One chunk of everything in `progress`, which is not empty; None if a client need not hear of it."""
        token_ids = tuple(token for part in progress for token in part.token_ids)
        reason = progress[-1].finish_reason
        if not token_ids and reason is None:
            return None
        # A token that stops the output is no part of the text.
        num_shown = len(token_ids) - (reason is FinishReason.STOP)
        texts = [self._detokenizer.push(token) for token in token_ids[:num_shown]]
        texts += [""] * (len(token_ids) - num_shown)
        rest = self._detokenizer.finish() if reason is not None else ""
        if texts:
            texts[-1] += rest
        chunk = Chunk(
            job_id=self._job.spec.job_id,
            token_offset=self._num_tokens,
            token_ids=token_ids,
            text="".join(texts) if texts else rest,
            is_draft=tuple(is_draft for part in progress for is_draft in part.is_draft),
            text_lengths=tuple(map(len, texts)),
            finish_reason=reason,
            usage=None if reason is None else self._usage(),
        )
        self._measure(chunk)
        return chunk

    def _measure(self, chunk: Chunk) -> None:
        now = time.monotonic()
        num_new = len(chunk.token_ids)
        if num_new:
            self._metrics.sent(num_new)
            if self._num_tokens == 0:
                self._measure_start(now)
                num_new -= 1
            if num_new:
                self._metrics.went_on(num_new, now - self._last_tokens_at)
            self._last_tokens_at = now
        self._num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._metrics.finished(chunk.finish_reason, now - self._job.arrived_at)

    def _measure_start(self, now: float) -> None:
        counts, arrived_at = self._job.counts, self._job.arrived_at
        self._last_tokens_at = now if counts.first_token_at is None else counts.first_token_at
        self._metrics.started(
            prompt_tokens=len(self._job.spec.prompt),
            queue_seconds=(now if counts.admitted_at is None else counts.admitted_at) - arrived_at,
            first_token_seconds=self._last_tokens_at - arrived_at,
        )

    def _usage(self) -> Usage:
        job, counts = self._job, self._job.counts
        ended_at = time.monotonic() if counts.finished_at is None else counts.finished_at
        admitted_at = ended_at if counts.admitted_at is None else counts.admitted_at
        first_token_at = job.arrived_at if counts.first_token_at is None else counts.first_token_at
        return Usage(
            prompt_tokens=len(job.spec.prompt),
            completion_tokens=counts.num_output_tokens,
            total_draft_tokens=counts.total_draft_tokens,
            total_accepted_tokens=counts.total_accepted_tokens,
            num_verify_steps=counts.num_verify_steps,
            mean_accept_length=counts.mean_accept_length,
            seed=job.spec.sampling.seed,
            queue_seconds=admitted_at - job.arrived_at,
            time_to_first_token_seconds=first_token_at - job.arrived_at,
            end_to_end_seconds=ended_at - job.arrived_at,
        )
