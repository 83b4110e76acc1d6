"""The batch: the running sequences, and the next step for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.api.sequence import SequenceOutput
from slipstream.common.errors import FutureMapError
from slipstream.common.worker.step import StepKind
from slipstream.scheduler.core.allocators import PageAllocator, SlotAllocator
from slipstream.scheduler.core.results import Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.common.api.output_chunk import TokenLogprobs
    from slipstream.common.api.sequence import Outputs, SubmittedSequence
    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.core.allocators import SlotLease
    from slipstream.scheduler.core.results import StepResult
    from slipstream.scheduler.core.sequence import Sequence
    from slipstream.scheduler.core.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The limits of a batch."""

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
        """Pages for so many tokens, prompt and output, with those that run-ahead may add."""
        slack = (self.run_ahead + 1) * (self.num_draft_tokens + 1)
        return -(-(num_tokens + slack) // self.page_tokens)


class Applied(NamedTuple):
    """The outcome of a step for the sequences that still run."""

    outputs: Outputs
    num_accepted: list[int]
    """Accepted draft tokens of each sequence with speculation enabled."""


class _Decoding(NamedTuple):
    """The sequences that decode, the same from step to step until one comes or goes."""

    sequences: tuple[Sequence, ...]
    members: tuple[SlotLease, ...]
    is_drafted: bool
    top_logprobs: tuple[int | None, ...]

    @classmethod
    def of(cls, running: Iterable[Sequence]) -> _Decoding:
        sequences = tuple([sequence for sequence in running if sequence.wants_decode])
        return cls(
            sequences=sequences,
            members=tuple([sequence.lease for sequence in sequences]),
            is_drafted=any(sequence.num_drafted for sequence in sequences),
            top_logprobs=_top_logprobs(sequences),
        )


class Batch:
    """The running sequences of an epoch. Every method returns at once; none looks at the device."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes
        self.pages = PageAllocator(sizes.num_pages)
        self.slots = SlotAllocator(sizes.num_slots)
        self._running: dict[int, Sequence] = {}
        """By slot, in the order of their start."""
        self._prefilling: list[Sequence] = []
        """The running sequences whose prompt was not sent in full, in the same order."""
        self._decoding: _Decoding | None = None
        """None if a sequence came or went since it was made."""
        self.last_step = 0
        """Number of the last step that was made."""
        self._was_prefill = False

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    def admit(self, queue: WaitingQueue) -> None:
        """Starts waiting sequences, oldest first, while a slot and the pages of the whole request are free."""
        while (sequence := queue.take_next(self._has_room_for)) is not None:
            lease, pages = self.slots.allocate(), self.pages.allocate(self._num_pages(sequence))
            sequence.admit(lease, pages, self.sizes.num_draft_tokens)
            self._running[lease.slot] = sequence
            self._prefilling.append(sequence)

    def next_step(self) -> Step | None:
        """The next step, or None if there is nothing to do: prompts and decoding take turns."""
        decoding = self._decoding = self._decoding or _Decoding.of(self._running.values())
        if not self._prefilling and not decoding.sequences:
            return None
        self._was_prefill = bool(self._prefilling) and not (decoding.sequences and self._was_prefill)
        self.last_step += 1
        return self._prefill_step() if self._was_prefill else self._decode_step(decoding)

    def apply(self, step: Step, result: StepResult) -> Applied:
        """Takes in the result of a step. Rows of sequences that are over are dropped.

        Raises FutureMapError, and takes in nothing, if it has more tokens of a sequence than there can be.
        """
        is_drafted = step.kind is StepKind.DECODE
        outputs: Outputs = []
        accepted: list[int] = []
        now = time.monotonic()
        for sequence, tokens, likely, num_drafted in self._rows(step, result, is_drafted=is_drafted):
            if num_drafted:
                num_accepted = len(tokens) - 1
                sequence.stats.add_draft(self.sizes.num_draft_tokens, num_accepted)
                accepted.append(num_accepted)
            output = sequence.end_output(tokens, num_drafted + 1, likely, now)
            if output.finish_reason is not None:
                self._end(sequence)
            elif sequence.is_sure_to_end:
                self._decoding = None
            outputs.append((sequence, output))
        return Applied(outputs, accepted)

    def cancel(self, sequences: list[Sequence]) -> Outputs:
        """Ends sequences, running or not yet; those that are over stay as they are."""
        abort = SequenceOutput(finish_reason=FinishReason.ABORT)
        return [self._abort(sequence, abort) for sequence in sequences if not sequence.is_over]

    def fail(self, error: SlipstreamError, *, waiting: list[Sequence]) -> Outputs:
        """Ends every running sequence, and those that wait, with an error."""
        failed = SequenceOutput(error=error)
        return [self._abort(sequence, failed) for sequence in (*self._running.values(), *waiting)]

    def _rows(
        self, step: Step, result: StepResult, *, is_drafted: bool
    ) -> list[tuple[Sequence, list[int], tuple[TokenLogprobs, ...], int]]:
        """For each sequence that still runs: its tokens, their logprobs, and how many tokens may be the draft's.

        All rows are checked before any is taken in: no sequence may have ended with a step that fails.
        """
        rows = []
        is_current, running = self.slots.is_current, self._running
        logprobs = result.logprobs or [()] * len(result.tokens)
        for lease, tokens, likely in zip(step.yielding, result.tokens, logprobs, strict=True):
            if not is_current(lease):
                continue
            sequence = running[lease.slot]
            most = sequence.num_drafted if is_drafted else 0
            if len(tokens) > most + 1:
                raise FutureMapError(
                    f"step {step.number}, slot {lease.slot}: {len(tokens) - 1} tokens accepted of {most} at most"
                )
            rows.append((sequence, tokens, likely, most))
        return rows

    def _abort(self, sequence: Sequence, output: SequenceOutput) -> tuple[SubmittedSequence, SequenceOutput]:
        sequence.stats.finished_at = time.monotonic()
        if self._running.get(sequence.lease.slot) is sequence:
            self._end(sequence)
        return sequence, output

    def _end(self, sequence: Sequence) -> None:
        del self._running[sequence.lease.slot]
        self._decoding = None
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.slots.release(sequence.lease)
        self.pages.release(sequence.pages)

    def _has_room_for(self, sequence: Sequence) -> bool:
        return self.slots.num_free > 0 and self.pages.num_free >= self._num_pages(sequence)

    def _num_pages(self, sequence: Sequence) -> int:
        return self.sizes.pages_for(sequence.num_tokens_at_most)

    def _prefill_step(self) -> Step:
        chunks, members, ending, updates = [], [], [], []
        room = self.sizes.chunk_tokens
        for sequence in self._prefilling:
            if room == 0:
                break
            chunk = sequence.next_chunk(room)
            room -= len(chunk.tokens)
            chunks.append(chunk)
            members.append(sequence.lease)
            if chunk.start == 0:
                updates.append(sequence.slot_update())
            if chunk.is_last:
                ending.append(sequence)
        if ending:
            self._prefilling = self._prefilling[len(ending) :]
            self._decoding = None
        return Step(
            number=self.last_step,
            kind=StepKind.PREFILL,
            members=tuple(members),
            yielding=tuple(sequence.lease for sequence in ending),
            top_logprobs=_top_logprobs(ending),
            chunks=tuple(chunks),
            updates=tuple(updates),
        )

    def _decode_step(self, decoding: _Decoding) -> Step:
        is_drafted = decoding.is_drafted
        for sequence in decoding.sequences:
            sequence.begin_output(1 + (sequence.num_drafted if is_drafted else 0))
            if sequence.is_sure_to_end:
                self._decoding = None
        return Step(
            number=self.last_step,
            kind=StepKind.DECODE if is_drafted else StepKind.PLAIN,
            members=decoding.members,
            yielding=decoding.members,
            top_logprobs=decoding.top_logprobs,
        )


def _top_logprobs(sequences: Iterable[Sequence]) -> tuple[int | None, ...]:
    asked = tuple([sequence.spec.top_logprobs for sequence in sequences])
    return asked if any(number is not None for number in asked) else ()
