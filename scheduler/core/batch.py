"""The batch: which requests run, and what the next step does with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.errors import FutureMapError
from slipstream.common.worker.step import PrefillChunk, SlotUpdate, StepKind
from slipstream.scheduler.core.draft_tally import DraftTally
from slipstream.scheduler.core.pages import PageAllocator
from slipstream.scheduler.core.request import Request
from slipstream.scheduler.core.sequence import SequenceOutput
from slipstream.scheduler.core.slots import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.common.api.output_chunk import TokenLogprobs
    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.core.results import StepResult
    from slipstream.scheduler.core.sequence import Sequence
    from slipstream.scheduler.core.slots import SlotLease
    from slipstream.scheduler.core.waiting_queue import WaitingQueue

Delivery = tuple["Sequence", SequenceOutput]


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


@dataclass(frozen=True, kw_only=True)
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
    chunks: tuple[PrefillChunk, ...] = ()
    updates: tuple[SlotUpdate, ...] = ()

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The slots that take part."""
        return tuple([lease.slot for lease in self.members])

    @property
    def most_top_logprobs(self) -> int | None:
        """What verify is asked for; None where no request of the step asked for logprobs."""
        return max((asked for asked in self.top_logprobs if asked is not None), default=None)


class Applied(NamedTuple):
    """What a step's result came to, of requests that still run."""

    deliveries: list[Delivery]
    """What it brings each job."""
    drafts: DraftTally
    """Of those that speculate; the others' are nobody's."""


class _Decoding(NamedTuple):
    """The requests that decode, the same from step to step until one comes or goes."""

    requests: tuple[Request, ...]
    members: tuple[SlotLease, ...]
    is_drafted: bool
    top_logprobs: tuple[int | None, ...]

    @classmethod
    def of(cls, running: Iterable[Request]) -> _Decoding:
        requests = tuple([request for request in running if request.wants_decode])
        return cls(
            requests=requests,
            members=tuple([request.lease for request in requests]),
            is_drafted=any(request.num_drafted for request in requests),
            top_logprobs=_top_logprobs(requests),
        )


class Batch:
    """The running requests of an epoch. Every method returns at once; none looks at the device."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes
        self.pages = PageAllocator(sizes.num_pages)
        self.slots = SlotAllocator(sizes.num_slots)
        self._running: dict[int, Request] = {}
        """By slot, in the order of their start."""
        self._prefilling: list[Request] = []
        """Those of them whose prompt was not sent in full, in the same order."""
        self._decoding: _Decoding | None = None
        """None where somebody came or went since."""
        self.last_step = 0
        """Number of the last step that was made."""
        self._was_prefill = False

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    def admit(self, queue: WaitingQueue) -> None:
        """Starts waiting jobs, oldest first, while a slot and the pages of the whole request are free."""
        while (job := queue.take_next(self._has_room_for)) is not None:
            request = Request(
                job, self.slots.allocate(), self.pages.allocate(self._num_pages(job)), self._num_drafted(job)
            )
            job.counts.admitted_at = time.monotonic()
            job.counts.accepted_per_position = [0] * self.sizes.num_draft_tokens
            self._running[request.lease.slot] = request
            self._prefilling.append(request)

    def next_step(self) -> Step | None:
        """What to do next, or None if there is nothing: prompts and decoding take turns."""
        decoding = self._decoding = self._decoding or _Decoding.of(self._running.values())
        if not self._prefilling and not decoding.requests:
            return None
        self._was_prefill = bool(self._prefilling) and not (decoding.requests and self._was_prefill)
        self.last_step += 1
        return self._prefill_step() if self._was_prefill else self._decode_step(decoding)

    def apply(self, step: Step, result: StepResult) -> Applied:
        """Takes in the result of a step. Rows of requests that are over are dropped.

        Raises FutureMapError, and takes in nothing, if it has more tokens of a request than there can be.
        """
        is_drafted = step.kind is StepKind.DECODE
        deliveries, drafts = [], DraftTally(self.sizes.num_draft_tokens)
        now = time.monotonic()
        for request, tokens, likely, num_drafted in self._rows(step, result, is_drafted=is_drafted):
            job = request.job
            if num_drafted:
                num_accepted = len(tokens) - 1
                job.counts.add_draft(num_drafted, num_accepted)
                drafts.add(num_drafted, num_accepted)
            progress = request.end_output(tokens, num_drafted + 1, likely, now)
            if progress.finish_reason is not None:
                self._end(request)
            elif request.is_sure_to_end:
                self._decoding = None
            deliveries.append((job, progress))
        return Applied(deliveries, drafts)

    def _rows(
        self, step: Step, result: StepResult, *, is_drafted: bool
    ) -> list[tuple[Request, list[int], tuple[TokenLogprobs, ...], int]]:
        """Of requests that still run: what the step brings, and how many of it may be the draft's.

        All are checked before any is taken in: no job may have come to its end with a step that fails.
        """
        rows = []
        is_current, running = self.slots.is_current, self._running
        logprobs = result.logprobs or [()] * len(result.tokens)
        for lease, tokens, likely in zip(step.yielding, result.tokens, logprobs, strict=True):
            if not is_current(lease):
                continue
            request = running[lease.slot]
            most = request.num_drafted if is_drafted else 0
            if len(tokens) > most + 1:
                raise FutureMapError(
                    f"step {step.number}, slot {lease.slot}: {len(tokens) - 1} tokens accepted of {most} at most"
                )
            rows.append((request, tokens, likely, most))
        return rows

    def cancel(self, jobs: list[Sequence]) -> list[Delivery]:
        """Ends jobs, running or not yet; those that are over stay as they are."""
        return [self._abort(job, SequenceOutput(finish_reason=FinishReason.ABORT)) for job in jobs if not _is_over(job)]

    def fail(self, error: SlipstreamError, *, waiting: list[Sequence]) -> list[Delivery]:
        """Ends every running job, and those that wait, with an error."""
        running = [request.job for request in self._running.values()]
        return [self._abort(job, SequenceOutput(error=error)) for job in (*running, *waiting)]

    def _abort(self, job: Sequence, progress: SequenceOutput) -> Delivery:
        job.counts.finished_at = time.monotonic()
        for request in self._running.values():
            if request.job is job:
                self._end(request)
                break
        return job, progress

    def _end(self, request: Request) -> None:
        del self._running[request.lease.slot]
        self._decoding = None
        if request in self._prefilling:
            self._prefilling.remove(request)
        self.slots.release(request.lease)
        self.pages.release(request.pages)

    def _has_room_for(self, job: Sequence) -> bool:
        return self.slots.num_free > 0 and self.pages.num_free >= self._num_pages(job)

    def _num_drafted(self, job: Sequence) -> int:
        most, num_draft_tokens = job.spec.max_draft_tokens, self.sizes.num_draft_tokens
        return num_draft_tokens if most is None else min(num_draft_tokens, most)

    def _num_pages(self, job: Sequence) -> int:
        return self.sizes.pages_for(len(job.spec.prompt) + job.spec.max_new_tokens)

    def _prefill_step(self) -> Step:
        chunks, members, ending, updates = [], [], [], []
        room = self.sizes.chunk_tokens
        for request in self._prefilling:
            if room == 0:
                break
            chunk = request.next_chunk(room)
            room -= len(chunk.tokens)
            chunks.append(chunk)
            members.append(request.lease)
            if chunk.start == 0:
                updates.append(request.slot_update())
            if chunk.is_last:
                ending.append(request)
        if ending:
            self._prefilling = self._prefilling[len(ending) :]
            self._decoding = None
        return Step(
            number=self.last_step,
            kind=StepKind.PREFILL,
            members=tuple(members),
            yielding=tuple(request.lease for request in ending),
            top_logprobs=_top_logprobs(ending),
            chunks=tuple(chunks),
            updates=tuple(updates),
        )

    def _decode_step(self, decoding: _Decoding) -> Step:
        is_drafted = decoding.is_drafted
        for request in decoding.requests:
            request.begin_output(1 + (request.num_drafted if is_drafted else 0))
            if request.is_sure_to_end:
                self._decoding = None
        return Step(
            number=self.last_step,
            kind=StepKind.DECODE if is_drafted else StepKind.PLAIN,
            members=decoding.members,
            yielding=decoding.members,
            top_logprobs=decoding.top_logprobs,
        )


def _top_logprobs(requests: Iterable[Request]) -> tuple[int | None, ...]:
    asked = tuple([request.job.spec.top_logprobs for request in requests])
    return asked if any(number is not None for number in asked) else ()


def _is_over(job: Sequence) -> bool:
    return job.counts.finished_at is not None
