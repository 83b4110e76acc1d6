"""The accesses that every command makes to the shared buffers, and where in the command they are."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from slipstream.common.errors import OrderingError
from slipstream.common.worker.access_log import StreamName
from slipstream.common.worker.layout import BufferName
from slipstream.common.worker.step import StepKind

if TYPE_CHECKING:
    from slipstream.scheduler.records import DraftTraits


class BufferGroup(enum.IntEnum):
    """Buffers that every command writes together and reads together."""

    RESULTS = 0
    STASH = 1
    PREFILL_HIDDEN = 2
    DRAFT_TOKENS = 3
    DRAFT_STAMPS = 4
    """In the draft's own memory, as verify reads them."""
    LATE_STAMPS = 5
    """The same buffer, as the scheduler reads it where verify has not copied it in time."""
    VERIFY_STAMPS = 6
    COPIED_STAMPS = 7
    """In the results: verify's copy of the draft's stamps."""

    @property
    def writer(self) -> StreamName:
        """The only stream that writes the group."""
        return _WRITERS[self]

    @property
    def reader(self) -> StreamName:
        """The only stream that reads the group, apart from its writer."""
        return _READERS[self]

    @property
    def is_in_region(self) -> bool:
        """True if the buffers belong to the draft's attachment."""
        return self not in (BufferGroup.RESULTS, BufferGroup.VERIFY_STAMPS, BufferGroup.COPIED_STAMPS)

    def buffers(self, draft: DraftTraits) -> tuple[BufferName, ...]:
        """The buffers of the group that exist for this draft."""
        members = _MEMBERS[self]
        if draft.reads_hidden:
            return members
        return tuple(buffer for buffer in members if buffer not in _FOR_HIDDEN_STATES)


class Phase(enum.Enum):
    """A part of a command, in the order of its stream. Each ends with a signal, except verify's first."""

    DRAFT = "draft"
    """All of a draft command, in a mixed step of the first; ends with `draft.done`."""
    TAKE_IN = "take in"
    """In a mixed step: all of draft's second command, which takes in the prompts; ends with `draft.done`."""
    COPY_IN = "copy in"
    """Verify's first work: from here on it uses only its own copy of what draft wrote."""
    PUBLISH = "publish"
    """Verify writes what the scheduler consumes; ends with `verify.publish`."""
    STASH = "stash"
    """Verify writes what the next forward needs; ends with `verify.stash`."""
    CONSUME = "consume"
    """The scheduler reads the result of the step."""
    CONSUME_NEXT = "consume next"
    """The scheduler consumes the step after, and reads the stamps of this one if a poll says they are there."""

    @property
    def stream(self) -> StreamName:
        """The stream that the phase belongs to."""
        return _STREAMS[self]


class Rows(enum.Enum):
    """Which rows of a buffer a step touches."""

    SLOTS = "slots"
    """The rows of the step's slots, of those that take in prompts in a mixed step, too.

    A prefill declares a write of the stash for all its slots: where the prompt ends in it that is the
    stash, where a request takes the slot the poison of debug mode.
    """
    DECODING = "decoding"
    """The rows of those that decode in the step."""
    RING = "ring"
    """The row `step % ring`."""
    DRAFTED = "drafted"
    """The row of the number under which draft drafts: of two numbers of a mixed step the first."""
    LAST_TWO = "last two"
    """That row and the one before."""
    SPARE = "spare"
    """The row of the next step, which the writer poisons in debug mode."""
    WHOLE = "whole"
    """The buffer has no rows."""


@dataclass(frozen=True, slots=True)
class Access:
    """One access that a kind of step declares."""

    phase: Phase
    group: BufferGroup
    rows: Rows
    is_write: bool

    def __str__(self) -> str:
        verb = "write" if self.is_write else "read"
        return f"{self.phase.stream.value}'s {verb} of {self.group.name.lower()} [{self.rows.value}]"


def has_draft_half(kind: StepKind, draft: DraftTraits) -> bool:
    """True if a step of this kind has a command for draft."""
    return draft.is_present and kind is not StepKind.PLAIN


@cache
def declared_accesses(kind: StepKind, draft: DraftTraits, *, is_mixed: bool = False) -> tuple[Access, ...]:
    """Every access of a step of this kind.

    In the step's own order: the half that feeds the other comes first (draft in a decode step, verify
    in a prefill), then the scheduler's reads. `is_mixed`: a decode step that takes in prompts, too.
    """
    if kind is StepKind.DECODE and not draft.is_present:
        raise OrderingError("a decode step needs a draft; without one the step is plain")
    takes_prompts = kind is StepKind.PREFILL or is_mixed
    verify = _verify_accesses(kind, draft, takes_prompts=takes_prompts)
    drafting = _draft_accesses(kind, draft) if has_draft_half(kind, draft) else ()
    if is_mixed:
        taking_in = _taking_in(Phase.TAKE_IN, draft)
        scheduler = _read(Phase.CONSUME, BufferGroup.COPIED_STAMPS, Rows.DRAFTED), *_scheduler_accesses()
        return drafting + verify + taking_in + scheduler
    halves = drafting + verify if kind is StepKind.DECODE else verify + drafting
    return halves + _scheduler_accesses(has_stamps_of_draft=bool(drafting))


def _draft_accesses(kind: StepKind, draft: DraftTraits) -> tuple[Access, ...]:
    if kind is StepKind.DECODE:
        stamps = _stamps(Phase.DRAFT, Rows.DRAFTED)
        gather = _read(Phase.DRAFT, BufferGroup.STASH, Rows.DECODING)
        return *stamps, gather, _write(Phase.DRAFT, BufferGroup.DRAFT_TOKENS, Rows.DECODING), *stamps
    if kind is StepKind.PREFILL:
        return _taking_in(Phase.DRAFT, draft)
    return *_stamps(Phase.DRAFT, Rows.RING), *_stamps(Phase.DRAFT, Rows.RING)


def _taking_in(phase: Phase, draft: DraftTraits) -> tuple[Access, ...]:
    stamps = _stamps(phase, Rows.RING)
    hidden = (_read(phase, BufferGroup.PREFILL_HIDDEN, Rows.WHOLE),) if draft.reads_hidden else ()
    return *stamps, *hidden, *stamps


def _stamps(phase: Phase, ring: Rows) -> tuple[Access, ...]:
    return _write(phase, BufferGroup.DRAFT_STAMPS, ring), _write(phase, BufferGroup.LATE_STAMPS, ring)


def _verify_accesses(kind: StepKind, draft: DraftTraits, *, takes_prompts: bool) -> tuple[Access, ...]:
    accesses = [_write(Phase.COPY_IN, BufferGroup.VERIFY_STAMPS, Rows.RING)]
    if kind is StepKind.DECODE:
        accesses.append(_read(Phase.COPY_IN, BufferGroup.DRAFT_TOKENS, Rows.DECODING))
        accesses.append(_read(Phase.COPY_IN, BufferGroup.DRAFT_STAMPS, Rows.LAST_TWO))
        accesses.append(_write(Phase.COPY_IN, BufferGroup.COPIED_STAMPS, Rows.LAST_TWO))
    accesses.append(_write(Phase.PUBLISH, BufferGroup.RESULTS, Rows.RING))
    accesses.append(_write(Phase.PUBLISH, BufferGroup.RESULTS, Rows.SPARE))
    if draft.is_present:
        if takes_prompts and draft.reads_hidden:
            accesses.append(_write(Phase.STASH, BufferGroup.PREFILL_HIDDEN, Rows.WHOLE))
        accesses.append(_write(Phase.STASH, BufferGroup.STASH, Rows.SLOTS))
    accesses.append(_write(Phase.STASH, BufferGroup.VERIFY_STAMPS, Rows.RING))
    return tuple(accesses)


def _scheduler_accesses(*, has_stamps_of_draft: bool = True) -> tuple[Access, ...]:
    accesses = (
        _read(Phase.CONSUME, BufferGroup.RESULTS, Rows.RING),
        _read(Phase.CONSUME_NEXT, BufferGroup.VERIFY_STAMPS, Rows.RING),
        _read(Phase.CONSUME_NEXT, BufferGroup.COPIED_STAMPS, Rows.RING),
    )
    if not has_stamps_of_draft:
        return accesses
    return *accesses, _read(Phase.CONSUME_NEXT, BufferGroup.LATE_STAMPS, Rows.RING)


def _read(phase: Phase, group: BufferGroup, rows: Rows) -> Access:
    return Access(phase, group, rows, is_write=False)


def _write(phase: Phase, group: BufferGroup, rows: Rows) -> Access:
    return Access(phase, group, rows, is_write=True)


_STREAMS = {
    Phase.DRAFT: StreamName.DRAFT,
    Phase.TAKE_IN: StreamName.DRAFT,
    Phase.COPY_IN: StreamName.VERIFY,
    Phase.PUBLISH: StreamName.VERIFY,
    Phase.STASH: StreamName.VERIFY,
    Phase.CONSUME: StreamName.SCHEDULER,
    Phase.CONSUME_NEXT: StreamName.SCHEDULER,
}

_WRITERS = {
    BufferGroup.RESULTS: StreamName.VERIFY,
    BufferGroup.STASH: StreamName.VERIFY,
    BufferGroup.PREFILL_HIDDEN: StreamName.VERIFY,
    BufferGroup.DRAFT_TOKENS: StreamName.DRAFT,
    BufferGroup.DRAFT_STAMPS: StreamName.DRAFT,
    BufferGroup.LATE_STAMPS: StreamName.DRAFT,
    BufferGroup.VERIFY_STAMPS: StreamName.VERIFY,
    BufferGroup.COPIED_STAMPS: StreamName.VERIFY,
}

_READERS = {
    BufferGroup.RESULTS: StreamName.SCHEDULER,
    BufferGroup.STASH: StreamName.DRAFT,
    BufferGroup.PREFILL_HIDDEN: StreamName.DRAFT,
    BufferGroup.DRAFT_TOKENS: StreamName.VERIFY,
    BufferGroup.DRAFT_STAMPS: StreamName.VERIFY,
    BufferGroup.LATE_STAMPS: StreamName.SCHEDULER,
    BufferGroup.VERIFY_STAMPS: StreamName.SCHEDULER,
    BufferGroup.COPIED_STAMPS: StreamName.SCHEDULER,
}

_FOR_HIDDEN_STATES = frozenset({BufferName.HIDDEN_STATES, BufferName.PREFILL_HIDDEN})

_MEMBERS = {
    BufferGroup.RESULTS: (
        BufferName.NEW_SEQ_LENS,
        BufferName.NUM_ACCEPTED,
        BufferName.OUTPUT_TOKENS,
        BufferName.OUTPUT_LOGPROBS,
        BufferName.TOP_TOKENS,
        BufferName.TOP_LOGPROBS,
    ),
    BufferGroup.STASH: (
        BufferName.SEQ_LENS,
        BufferName.BONUS_TOKENS,
        BufferName.NUM_NEW,
        BufferName.LAST_TOKENS,
        BufferName.HIDDEN_STATES,
    ),
    BufferGroup.PREFILL_HIDDEN: (BufferName.PREFILL_HIDDEN,),
    BufferGroup.DRAFT_TOKENS: (BufferName.DRAFT_TOKENS,),
    BufferGroup.DRAFT_STAMPS: (BufferName.DRAFT_STAMPS,),
    BufferGroup.LATE_STAMPS: (BufferName.DRAFT_STAMPS,),
    BufferGroup.VERIFY_STAMPS: (BufferName.VERIFY_STAMPS,),
    BufferGroup.COPIED_STAMPS: (BufferName.DRAFT_STAMPS,),
}
