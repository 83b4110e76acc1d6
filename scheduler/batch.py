"""The batch: which requests run, and what the next step does with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.chunk import FinishReason
from slipstream.common.errors import FutureMapError
from slipstream.common.step import PromptChunk, SlotUpdate, StepKind
from slipstream.scheduler.jobs import Progress
from slipstream.scheduler.pages import PageAllocator
from slipstream.scheduler.request import Request
from slipstream.scheduler.slots import SlotAllocator

if TYPE_CHECKING:
    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.future_map import StepResult
    from slipstream.scheduler.job_queue import JobQueue
    from slipstream.scheduler.jobs import Job
    from slipstream.scheduler.slots import SlotLease

Delivery = tuple["Job", Progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """What bounds a batch."""

    num_slots: int
    """Row 0 included."""
    num_pages: int
    """Page 0 included."""
    page_tokens: int
    chunk_tokens: int
    """Prompt tokens in one prefill step at most."""
    num_draft_tokens: int
    """K; 0 when nothing drafts."""
    run_ahead: int

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of so many tokens, prompt and output, takes, with what run-ahead may add."""
        slack = (self.run_ahead + 1) * (self.num_draft_tokens + 1)
        return -(-(num_tokens + slack) // self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step as it is sent: who takes part, and what the workers must know for it."""

    number: int
    kind: StepKind
    members: tuple[SlotLease, ...]
    """The slots that take part."""
    yielding: tuple[SlotLease, ...]
    """Those that the step brings tokens for."""
    top_logprobs: tuple[int | None, ...] = ()
    """For each of `yielding`, how many of the most likely tokens its request asked for; empty if none asked at all."""
    chunks: tuple[PromptChunk, ...] = ()
    updates: tuple[SlotUpdate, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that take part."""
        return tuple(lease.slot for lease in self.members)

    @property
    def most_top_logprobs(self) -> int | None:
        """What verify is asked for; None where no request of the step asked for logprobs."""
        return max((asked for asked in self.top_logprobs if asked is not None), default=None)


class DraftCount(NamedTuple):
    """What became of a draft."""

    num_drafted: int
    """Its tokens that could be accepted, at least one."""
    num_accepted: int


class Batch:
    """The running requests of an epoch. Every method returns at once; none looks at the device."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes
        self.pages = PageAllocator(sizes.num_pages)
        self.slots = SlotAllocator(sizes.num_slots)
        self._running: dict[int, Request] = {}
        """By slot, in the order of their start."""
        self._new: list[Request] = []
        self.last_step = 0
        """Number of the last step that was made."""
        self._was_prefill = False

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    def admit(self, queue: JobQueue) -> None:
        """Starts waiting jobs, oldest first, while a slot and the pages of the whole request are free."""
        while (job := queue.take_next(self._has_room_for)) is not None:
            request = Request(
                job, self.slots.allocate(), self.pages.allocate(self._num_pages(job)), self._num_drafted(job)
            )
            job.counts.admitted_at = time.monotonic()
            job.counts.accepted_per_position = [0] * self.sizes.num_draft_tokens
            self._running[request.lease.slot] = request
            self._new.append(request)

    def next_step(self) -> Step | None:
        """What to do next, or None if there is nothing: prompts and decoding take turns."""
        waiting = [request for request in self._running.values() if not request.is_prefilled]
        decoding = [request for request in self._running.values() if request.wants_decode]
        if not waiting and not decoding:
            return None
        self._was_prefill = bool(waiting) and not (decoding and self._was_prefill)
        self.last_step += 1
        return self._prefill_step(waiting) if self._was_prefill else self._decode_step(decoding)

    def apply(self, step: Step, result: StepResult) -> list[Delivery]:
        """Takes in the result of a step: what it brings each job. Rows of requests that are over are dropped.

        Raises FutureMapError, and takes in nothing, if it has more tokens of a request than there can be.
        """
        self._check(step, result)
        deliveries = []
        now, is_drafted = time.monotonic(), step.kind is StepKind.DECODE
        logprobs = result.logprobs or [()] * len(result.tokens)
        for lease, tokens, likely in zip(step.yielding, result.tokens, logprobs, strict=True):
            if not self.slots.is_current(lease):
                continue
            request = self._running[lease.slot]
            num_drafted = request.num_drafted if is_drafted else 0
            if num_drafted:
                request.job.counts.add_draft(num_drafted, len(tokens) - 1)
            progress = request.end_output(tokens, num_drafted + 1, likely, now)
            if progress.is_last:
                self._end(request)
            deliveries.append((request.job, progress))
        return deliveries

    def _check(self, step: Step, result: StepResult) -> None:
        # Of all rows before any is taken in: no job may have come to its end with a step that fails.
        for lease, tokens in zip(step.yielding, result.tokens, strict=True):
            if self.slots.is_current(lease):
                most = self._running[lease.slot].num_drafted if step.kind is StepKind.DECODE else 0
                if len(tokens) - 1 > most:
                    raise FutureMapError(
                        f"step {step.number}, slot {lease.slot}: {len(tokens) - 1} tokens accepted of {most} at most"
                    )

    def drafts(self, step: Step, result: StepResult) -> list[DraftCount]:
        """What became of the drafts of a step, of requests that still run and speculate; the others are nobody's."""
        if step.kind is not StepKind.DECODE:
            return []
        rows = zip(step.yielding, result.tokens, strict=True)
        kept = [(self._running[lease.slot], tokens) for lease, tokens in rows if self.slots.is_current(lease)]
        return [DraftCount(request.num_drafted, len(tokens) - 1) for request, tokens in kept if request.num_drafted]

    def cancel(self, jobs: list[Job]) -> list[Delivery]:
        """Ends jobs, running or not yet; those that are over stay as they are."""
        return [self._abort(job, Progress(finish_reason=FinishReason.ABORT)) for job in jobs if not _is_over(job)]

    def fail(self, error: SlipstreamError, *, waiting: list[Job]) -> list[Delivery]:
        """Ends every running job, and those that wait, with an error."""
        running = [request.job for request in self._running.values()]
        return [self._abort(job, Progress(error=error)) for job in (*running, *waiting)]

    def _abort(self, job: Job, progress: Progress) -> Delivery:
        job.counts.finished_at = time.monotonic()
        for request in self._running.values():
            if request.job is job:
                self._end(request)
                break
        return job, progress

    def _end(self, request: Request) -> None:
        del self._running[request.lease.slot]
        if request in self._new:
            self._new.remove(request)
        self.slots.release(request.lease)
        self.pages.release(request.pages)

    def _has_room_for(self, job: Job) -> bool:
        return self.slots.num_free > 0 and self.pages.num_free >= self._num_pages(job)

    def _num_drafted(self, job: Job) -> int:
        most, num_draft_tokens = job.spec.max_draft_tokens, self.sizes.num_draft_tokens
        return num_draft_tokens if most is None else min(num_draft_tokens, most)

    def _num_pages(self, job: Job) -> int:
        return self.sizes.pages_for(len(job.spec.prompt) + job.spec.max_new_tokens)

    def _prefill_step(self, waiting: list[Request]) -> Step:
        chunks, members, ending = [], [], []
        room = self.sizes.chunk_tokens
        for request in waiting:
            if room == 0:
                break
            chunk = request.next_chunk(room)
            room -= len(chunk.tokens)
            chunks.append(chunk)
            members.append(request.lease)
            if chunk.is_last:
                ending.append(request)
        updates = tuple(request.slot_update() for request in self._new)
        self._new.clear()
        return Step(
            number=self.last_step,
            kind=StepKind.PREFILL,
            members=tuple(members),
            yielding=tuple(request.lease for request in ending),
            top_logprobs=_top_logprobs(ending),
            chunks=tuple(chunks),
            updates=updates,
        )

    def _decode_step(self, decoding: list[Request]) -> Step:
        is_drafted = any(request.num_drafted for request in decoding)
        kind = StepKind.DECODE if is_drafted else StepKind.PLAIN
        for request in decoding:
            request.begin_output(1 + (request.num_drafted if is_drafted else 0))
        members = tuple(request.lease for request in decoding)
        return Step(
            number=self.last_step,
            kind=kind,
            members=members,
            yielding=members,
            top_logprobs=_top_logprobs(decoding),
        )


def _top_logprobs(requests: list[Request]) -> tuple[int | None, ...]:
    asked = tuple(request.job.spec.top_logprobs for request in requests)
    return asked if any(number is not None for number in asked) else ()


def _is_over(job: Job) -> bool:
    return job.counts.finished_at is not None
