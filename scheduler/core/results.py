"""A step as the loop sends it, and the copy of its result from the FutureMap to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import TokenLogprobs
from slipstream.common.errors import FutureMapError
from slipstream.common.worker.access_log import LogOp
from slipstream.common.worker.layout import BufferName
from slipstream.common.worker.step import FenceName, StepKind

if TYPE_CHECKING:
    import torch

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.layout import FutureMapShape
    from slipstream.common.worker.step import PrefillChunk, SlotUpdate
    from slipstream.scheduler.core.allocators import SlotLease

_PUBLISHED = (BufferName.NEW_SEQ_LENS, BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS)
_LOGPROBS = (BufferName.OUTPUT_LOGPROBS, BufferName.TOP_TOKENS, BufferName.TOP_LOGPROBS)


Interval = tuple[int, int]
"""Start and end of a worker's part of a step, in nanoseconds of the clock that all stamps share."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step: the sequences that take part, and the data that the workers need for it."""

    number: int
    kind: StepKind
    members: tuple[SlotLease, ...]
    """The slots that take part."""
    yielding: tuple[SlotLease, ...]
    """The slots that the step brings tokens for."""
    top_logprobs: tuple[int | None, ...] = ()
    """For each of `yielding`, how many of the most likely tokens its sequence asked for; empty if none asked at all."""
    chunks: tuple[PrefillChunk, ...] = ()
    updates: tuple[SlotUpdate, ...] = ()

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the slots that take part."""
        return tuple([lease.slot for lease in self.members])

    @property
    def most_top_logprobs(self) -> int | None:
        """The most top logprobs that a sequence asked for; None if none asked for logprobs."""
        return max((asked for asked in self.top_logprobs if asked is not None), default=None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, on the host."""

    tokens: list[list[int]]
    """For each of the step's `yielding`, in order: accepted draft tokens, then the target's own."""
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """For these tokens, for each slot whose sequence asked for them; empty for a step in which none asked."""
    stamps_before: tuple[Interval, ...] = ()
    """Stamps of the step before, as of this step's publication: verify's, and draft's if there is one."""


class ResultReader:
    """Copies results on a private stream that waits for publish alone: other queued work does not delay it."""

    def __init__(self, device: Device, arena: Arena, shape: FutureMapShape, log: AccessLog) -> None:
        self._shape = shape
        self._log = log
        publish = arena.fence(FenceName.VERIFY_PUBLISH)
        stamps = [BufferName.VERIFY_STAMPS] + [BufferName.DRAFT_STAMPS] * (shape.num_draft_tokens > 0)
        published = [arena.tensor(name).unbind() for name in _PUBLISHED]
        before = [_row_before(arena.tensor(name).unbind()) for name in stamps]
        self._copy = device.host_copy(publish, [*published, *before])
        self._logprobs = device.host_copy(publish, [arena.tensor(name).unbind() for name in _LOGPROBS])
        self._last_consumed = 0

    def start(self, step: Step) -> None:
        """Enqueues the copy of the step's row, which waits for its publication."""
        row = step.number % self._shape.ring
        self._copy.start(step.number, row)
        if step.top_logprobs:
            self._logprobs.start(step.number, row)

    def resolve(self, step: Step, timeout_s: float) -> StepResult | None:
        """Waits for the row; None if the time is over first.

        Raises FutureMapError if the row was consumed before, or if no step published it.
        """
        if step.number <= self._last_consumed:
            raise FutureMapError(f"step {step.number} is consumed again, after step {self._last_consumed}")
        row = step.number % self._shape.ring
        copied = self._copy.finish(step.number, row, timeout_s)
        likely = self._logprobs.finish(step.number, row, timeout_s) if step.top_logprobs else []
        if copied is None or likely is None:
            return None
        self._last_consumed = step.number
        if self._log.is_enabled:
            self._log.fence(LogOp.WAIT, FenceName.VERIFY_PUBLISH, step.number, step=step.number)
            for name in (*_PUBLISHED, *(_LOGPROBS if likely else ())):
                self._log.access(name, [row], is_write=False, step=step.number)
        published, stamps = copied[: len(_PUBLISHED)], copied[len(_PUBLISHED) :]
        tokens = self._tokens(step, *published)
        return StepResult(
            tokens=tokens,
            stamps_before=tuple((start, end) for start, end in (stamp.tolist() for stamp in stamps)),
            logprobs=_token_logprobs(step, tokens, *likely) if likely else [],
        )

    def close(self) -> None:
        """Ends the stream without waiting for copies under way."""
        self._copy.close()
        self._logprobs.close()

    def _tokens(
        self, step: Step, seq_lens: torch.Tensor, num_accepted: torch.Tensor, output_tokens: torch.Tensor
    ) -> list[list[int]]:
        most = self._shape.num_draft_tokens if step.kind is StepKind.DECODE else 0
        slots = [lease.slot for lease in step.yielding]
        accepted, lengths = num_accepted.tolist(), seq_lens.tolist()
        rows = output_tokens.tolist()
        counts = [accepted[slot] for slot in slots]
        if slots and (min(counts) < 0 or max(counts) > most or min([lengths[slot] for slot in slots]) < 0):
            raise FutureMapError(_unpublished(step, lengths, accepted, most))
        return [rows[slot][: count + 1] for slot, count in zip(slots, counts, strict=True)]


def _unpublished(step: Step, lengths: list[int], accepted: list[int], most: int) -> str:
    slots = (lease.slot for lease in step.yielding)
    slot = next(slot for slot in slots if lengths[slot] < 0 or not 0 <= accepted[slot] <= most)
    found = f"length {lengths[slot]} and {accepted[slot]} accepted tokens"
    return f"step {step.number}, slot {slot}: {found} were never published"


def _row_before(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The row before each row of a ring."""
    return (*rows[-1:], *rows[:-1])


def _token_logprobs(
    step: Step, tokens: list[list[int]], output: torch.Tensor, top_tokens: torch.Tensor, top: torch.Tensor
) -> list[tuple[TokenLogprobs, ...]]:
    """`output`: [slots, K+1]; `top_tokens`, `top`: [slots, K+1, 20]."""
    found: list[tuple[TokenLogprobs, ...]] = []
    for lease, asked, row in zip(step.yielding, step.top_logprobs, tokens, strict=True):
        num_places = 0 if asked is None else len(row)
        places = zip(
            output[lease.slot, :num_places].tolist(),
            top_tokens[lease.slot, :num_places, :asked].tolist(),
            top[lease.slot, :num_places, :asked].tolist(),
            strict=True,
        )
        found.append(tuple(TokenLogprobs(own, tuple(zip(ids, values, strict=True))) for own, ids, values in places))
    return found
