"""Results of steps: read where verify publishes them, and handed to the gateways as one message a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import FutureMapError
from slipstream.common.wire.events import LogOp
from slipstream.common.wire.job import FinishReason, TokenLogprobs
from slipstream.common.wire.layout import NOT_FINITE, UNMASKED, UNMATCHED, BufferName
from slipstream.common.wire.sequence import PackedStep, Refusal
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.records import NO_LOGPROBS, StepOutcome, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray

    from slipstream.common.device.interface import Arena, PollTime
    from slipstream.common.errors import SlipstreamError
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.layout import EpochShape
    from slipstream.scheduler.records import Sequence, Step

_PUBLISHED = (BufferName.NEW_SEQ_LENS, BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS)
_ACCEPTED = _PUBLISHED.index(BufferName.NUM_ACCEPTED)
_STAMPS = (BufferName.VERIFY_STAMPS, BufferName.DRAFT_STAMPS)
_FAULTS = (NOT_FINITE, UNMASKED, UNMATCHED)
"""Marks of rows without tokens."""
_LOGPROBS = (BufferName.OUTPUT_LOGPROBS, BufferName.TOP_TOKENS, BufferName.TOP_LOGPROBS)


class ResultReader:
    """Reads the rows of the ring after publish."""

    def __init__(self, arena: Arena, shape: EpochShape, log: EventLog, *, is_debug: bool = False) -> None:
        """`arena`: its tensors are the host's.

        `is_debug`: verify marks the lengths in rows that no step has published, and they are looked at.
        """
        self._ring = shape.ring
        self._is_debug = is_debug
        self._log = log
        self._publish = arena.fence(FenceName.VERIFY_PUBLISH)
        # NumPy takes a few numbers in a fraction of PyTorch's time.
        published, stamps = ([arena.tensor(name).numpy() for name in names] for names in (_PUBLISHED, _STAMPS))
        published[_ACCEPTED] = published[_ACCEPTED].view(np.uint32)
        self._num_tokens = [np.arange(1, most + 2, dtype=np.int32) for most in range(shape.num_draft_tokens + 1)]
        """By K: the number of tokens by that of the accepted ones. Without a sign, negative ones are too large."""
        self._ring_rows = [
            (*(column[row] for column in published), stamps[0][row - 1], *stamps[1][row - 1])
            for row in range(self._ring)
        ]
        """By row: what is published, and the stamps of the row before, of draft those of both parts."""
        self._verify_stamps = stamps[0]
        self._logprobs = list(zip(*(arena.tensor(name).unbind() for name in _LOGPROBS), strict=True))
        self._last_consumed = 0

    def resolve(self, step: Step, timeout_s: float, poll_time: PollTime = ANY_TIME) -> StepResult | None:
        """Waits for the row; None if the time is over first.

        Raises FutureMapError if the row was consumed before, if it cannot be the step's result, as it has more tokens
        of a sequence than there can be, or, in debug mode, if no step published it.
        """
        if step.number <= self._last_consumed:
            raise FutureMapError(f"step {step.number} is consumed again, after step {self._last_consumed}")
        if not self._publish.wait_on_host(step.number, timeout_s, poll_time):
            return None
        row = step.number % self._ring
        self._last_consumed = step.number
        if self._log.is_enabled:
            self._log.fence(LogOp.WAIT, FenceName.VERIFY_PUBLISH, step.number, step=step.number)
            for name in (*_PUBLISHED, *(_LOGPROBS if step.top_logprobs else ())):
                self._log.access(name, [row], is_write=False, step=step.number)
        seq_lens, accepted, output_tokens, *stamps = self._ring_rows[row]
        # Copied: the next step's result may overwrite the shared ones.
        rows, to_num_tokens = step.yielding.rows, self._num_tokens[step.most_draft_tokens]
        num_accepted = accepted.take(rows)
        faults: tuple[tuple[int, ...], ...] = ((), (), ())
        try:
            # Checks the bounds as well: an operation of NumPy of its own would take as long again.
            num_tokens = to_num_tokens.take(num_accepted)
            is_good = not step.is_bounded or not np.count_nonzero(num_tokens > step.most_more)
        except IndexError:
            is_good = False
        if not is_good or self._is_debug:
            faults = self._check_rows(step, num_accepted, seq_lens.take(rows))
            num_tokens = to_num_tokens.take(num_accepted)
        return StepResult(
            num_accepted=num_accepted,
            num_tokens=num_tokens,
            tokens=output_tokens.take(rows, 0),
            not_finite=faults[0],
            unmasked=faults[1],
            unmatched=faults[2],
            stamps_before=tuple([tuple(interval.tolist()) for interval in stamps]),
            logprobs=_token_logprobs(step, num_tokens, *self._logprobs[row]) if step.top_logprobs else NO_LOGPROBS,
        )

    def ended_ns(self, number: int) -> int:
        """Verify's stamp at the end of a step that was consumed; 0 if it is not there yet. That of its start is."""
        start, end = self._verify_stamps[number % self._ring].tolist()
        return end if end >= start else 0

    @property
    def published(self) -> int:
        """The last step that verify has published."""
        return self._publish.poll()

    def _check_rows(
        self, step: Step, num_accepted: NDArray[np.uint32], lengths: NDArray[np.int64]
    ) -> tuple[tuple[int, ...], ...]:
        """Returns the rows that have each of _FAULTS, whose numbers become 0. Raises FutureMapError of others."""
        accepted = num_accepted.view(np.int32)
        is_wrong = (accepted < 0) | (accepted >= step.most_more)
        if self._is_debug:
            is_wrong |= lengths < 0
        may_lack_masks = np.isin(step.yielding.rows, step.constrained)
        has_fault = [
            (accepted == fault) & (lengths >= 0) & (may_lack_masks | (fault == NOT_FINITE)) for fault in _FAULTS
        ]
        for rows in has_fault:
            accepted[rows], is_wrong[rows] = 0, False
        if is_wrong.any():
            at = is_wrong.argmax()
            what = f"length {lengths[at]} and {accepted[at]} accepted tokens"
            raise FutureMapError(f"step {step.number}, slot {step.yielding.slots[at]}: {what} cannot be its result")
        return tuple(tuple(rows.nonzero()[0].tolist()) for rows in has_fault)


def _token_logprobs(
    step: Step,
    num_tokens: NDArray[np.int32],
    output: torch.Tensor,
    top_tokens: torch.Tensor,
    top: torch.Tensor,
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """`output`: [slots, K+1]; `top_tokens`, `top`: [slots, K+1, 20]."""
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for at, asked in step.top_logprobs.items():
        slot, num_places = step.yielding.slots[at], int(num_tokens[at])
        places = zip(
            output[slot, :num_places].tolist(),
            top_tokens[slot, :num_places, :asked].tolist(),
            top[slot, :num_places, :asked].tolist(),
            strict=True,
        )
        found[at] = tuple(TokenLogprobs(own, tuple(zip(ids, values, strict=True))) for own, ids, values in places)
    return found


class Outgoing:
    """The output of a turn of the loop, as arrays, which the loop's thread adds. Messages are made of it on another."""

    __slots__ = ("aborted", "admitted", "cached_tokens", "outcomes", "refused", "taken_ns")

    def __init__(self) -> None:
        self.outcomes: tuple[tuple[StepOutcome, int, int], ...] = ()
        """The outcome of a step, with what was drafted for each sequence and the time of its publication.

        In parts if the step has drafted more for some of them than for others.
        """
        # By stream.
        self.admitted: dict[int, list[tuple[int, int]]] = {}
        self.cached_tokens: dict[int, dict[int, int]] = {}
        self.aborted: dict[int, list[int]] = {}
        self.refused: dict[int, list[Refusal]] = {}
        self.taken_ns = 0
        """When it was taken out of the batch; 0 before, and if it is empty."""

    def add_step(self, outcome: StepOutcome, published_ns: int) -> None:
        """Adds the outcome of a step; one at a time."""
        assert not self.outcomes, "the outcome of a step leaves before the next one's arrives"
        if not len(outcome.rows):
            return
        num_drafted = outcome.num_drafted
        most = int(num_drafted[0])
        if not np.count_nonzero(num_drafted != most):
            self.outcomes = ((outcome, most, published_ns),)
            return
        self.outcomes = tuple(
            (_part(outcome, (num_drafted == drafted).nonzero()[0]), drafted, published_ns)
            for drafted in sorted(set(num_drafted.tolist()), reverse=True)
        )

    def add_admitted(self, sequence: Sequence) -> None:
        """Adds the admission of a sequence, now."""
        self.admitted.setdefault(sequence.stream, []).append((sequence.id, time.monotonic_ns()))

    def add_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds the tokens of a sequence's prompt that the prefix cache had."""
        self.cached_tokens.setdefault(sequence.stream, {})[sequence.id] = num_tokens

    def add_aborted(self, sequence: Sequence) -> None:
        """Adds the end of a cancelled sequence, after all its output."""
        self.aborted.setdefault(sequence.stream, []).append(sequence.id)

    def add_refused(self, sequence: Sequence, error: SlipstreamError) -> None:
        """Adds the end of a sequence that cannot be run."""
        self.refused.setdefault(sequence.stream, []).append(Refusal(sequence.id, error))

    @property
    def is_empty(self) -> bool:
        """True if nothing was added."""
        return not (self.outcomes or self.admitted or self.cached_tokens or self.aborted or self.refused)

    def deliveries(self) -> Iterator[tuple[int, PackedStep | None, tuple[Refusal, ...]]]:
        """Yields what each gateway's stream gets, in order: its number, output, refusals. Called once."""
        for stream, packed in self._of_step():
            yield stream, packed, ()
        for stream in {**self.admitted, **self.cached_tokens}:
            yield stream, PackedStep(published_ns=self.taken_ns, **self._beginnings(stream)), ()
        for stream, ids in self.aborted.items():
            yield stream, self._aborted(ids), ()
        for stream, refusals in self.refused.items():
            yield stream, None, tuple(refusals)

    def _of_step(self) -> Iterator[tuple[int, PackedStep]]:
        for outcome, num_draft_tokens, published_ns in self.outcomes:
            for stream, part in _by_stream(outcome):
                packed = _packed(part, num_draft_tokens, published_ns)
                if stream in self.admitted or stream in self.cached_tokens:
                    packed = packed._replace(**self._beginnings(stream))
                yield stream, packed

    def _beginnings(self, stream: int) -> dict[str, Any]:
        admitted = self.admitted.pop(stream, [])
        return {
            "admitted": [number for number, _ in admitted],
            "admitted_ns": [when for _, when in admitted],
            "cached_tokens": self.cached_tokens.pop(stream, {}),
        }

    def _aborted(self, ids: list[int]) -> PackedStep:
        counts, reasons = np.zeros(len(ids), np.uint32).tobytes(), bytes([FinishReason.ABORT.to_pb()] * len(ids))
        return PackedStep(np.array(ids, np.uint64).tobytes(), counts, counts, reasons, published_ns=self.taken_ns)


def _by_stream(outcome: StepOutcome) -> Iterator[tuple[int, StepOutcome]]:
    """Yields each stream with its part."""
    streams: list[int] = outcome.streams.tolist()
    if streams.count(streams[0]) == len(streams):
        yield streams[0], outcome
        return
    for stream in sorted(set(streams)):
        yield stream, _part(outcome, (outcome.streams == stream).nonzero()[0])


def _part(outcome: StepOutcome, places: NDArray[np.int64]) -> StepOutcome:
    """The outcome for the sequences at these places, which are in order."""
    columns = {name: column[places] for name, column in outcome._asdict().items() if name != "logprobs"}
    # By place in the part.
    at = {int(place): number for number, place in enumerate(places)} if outcome.logprobs else {}
    logprobs = {at[place]: likely for place, likely in outcome.logprobs.items() if place in at}
    return StepOutcome(**columns, logprobs=logprobs)


def _packed(outcome: StepOutcome, num_draft_tokens: int, published_ns: int) -> PackedStep:
    """The message of a step. STOP and LENGTH have the numbers of `FinishReason` in generation.proto.

    Counts have 32 bits as in the message, and none is negative.
    """
    num_tokens, ids, logprobs = outcome.num_tokens, outcome.ids, outcome.logprobs
    return PackedStep(
        ids.tobytes(),
        num_tokens.tobytes(),
        outcome.num_accepted.tobytes(),
        outcome.reasons.tobytes(),
        outcome.tokens[outcome.is_new].astype(np.uint32).tobytes(),
        num_draft_tokens,
        published_ns,
        is_beyond_draft=outcome.is_beyond_draft.tobytes() if outcome.is_beyond_draft.any() else b"",
        logprobs={int(ids[at]): likely for at, likely in sorted(logprobs.items())},
    )
