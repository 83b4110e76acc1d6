"""Stands for the scheduler's loop, workers and all: a thread that brings each job its prompt over and over."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import FinishReason, TokenLogprobs
from slipstream.common.api.sequence import SequenceOutput

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

    from slipstream.common.errors import SlipstreamError
    from slipstream.gateway.manager import JobManager
    from slipstream.scheduler.core.sequence import Sequence
    from slipstream.scheduler.core.waiting_queue import WaitingQueue

TOKENS_PER_STEP = 3


class FakeLoop:
    """Takes jobs from a queue and delivers tokens to a desk, every job's in one batch a step.

    A job's k-th token is the k-th of its prompt, from the beginning again at its end. The last token of a step is the
    target's own, those before it were drafted.
    """

    def __init__(
        self, queue: WaitingQueue, desk: JobManager, loop: asyncio.AbstractEventLoop, *, slots: int = 64
    ) -> None:
        self.may_step = threading.Event()
        self.may_step.set()
        self.pause_tokens: int | None = None
        """A job that has as many tokens gets no more."""
        self.error: SlipstreamError | None = None
        """Ends every running job at the next step."""
        self.slots = slots
        self.running: list[Sequence] = []
        self.cancelled: list[Sequence] = []
        self._queue = queue
        self._desk = desk
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="fake loop")

    def __enter__(self) -> FakeLoop:
        self._queue.open()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._queue.is_stopped:
            deliveries = [
                (job, SequenceOutput(finish_reason=FinishReason.ABORT)) for job in self._queue.take_cancelled()
            ]
            for job, _ in deliveries:
                self.cancelled.append(job)
                if job in self.running:
                    self.running.remove(job)
            while job := self._queue.take_next(lambda _: len(self.running) < self.slots):
                job.stats.admitted_at = time.monotonic()
                job.stats.accepted_per_position = [0] * (TOKENS_PER_STEP - 1)
                self.running.append(job)
            if self.may_step.is_set():
                deliveries += [(job, self._step(job)) for job in tuple(self.running) if not self._is_paused(job)]
            if deliveries:
                bundle = {job: [progress] for job, progress in deliveries}
                self._loop.call_soon_threadsafe(self._desk.deliver, bundle)
            if not deliveries:
                self._queue.wait_for_change(0.002 if self.running else 0.5)

    def _is_paused(self, job: Sequence) -> bool:
        return self.pause_tokens is not None and job.stats.num_output_tokens >= self.pause_tokens

    def _step(self, job: Sequence) -> SequenceOutput:
        if self.error is not None:
            self.running.remove(job)
            return SequenceOutput(error=self.error)
        counts, spec = job.stats, job.spec
        start = counts.num_output_tokens
        tokens = [spec.prompt[(start + number) % len(spec.prompt)] for number in range(TOKENS_PER_STEP)]
        tokens = tokens[: spec.max_new_tokens - start]
        reason = FinishReason.LENGTH if start + len(tokens) == spec.max_new_tokens else None
        for number, token in enumerate(tokens):
            if token in spec.stop_token_ids:
                tokens, reason = tokens[: number + 1], FinishReason.STOP
                break
        counts.last_token_at = time.monotonic()
        counts.first_token_at = counts.first_token_at or counts.last_token_at
        counts.num_output_tokens += len(tokens)
        counts.add_draft(TOKENS_PER_STEP - 1, TOKENS_PER_STEP - 1)
        if reason is not None:
            counts.finished_at = time.monotonic()
            self.running.remove(job)
        num_draft = min(TOKENS_PER_STEP - 1, len(tokens))
        logprobs = () if spec.top_logprobs is None else tuple(logprobs_of(token, spec.top_logprobs) for token in tokens)
        return SequenceOutput(token_ids=tuple(tokens), num_draft=num_draft, logprobs=logprobs, finish_reason=reason)


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """A token's, made up."""
    return TokenLogprobs(-token / 2, tuple((token + number, -number / 4) for number in range(num_top)))
