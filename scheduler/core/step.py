"""A step as the loop sends it, and the result that comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.common.api.output_chunk import TokenLogprobs
    from slipstream.common.worker.step import PrefillChunk, SlotUpdate, StepKind
    from slipstream.scheduler.core.allocators import SlotLease

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
