"""The accesses that every command makes to the shared buffers, and where in the command they are."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from slipstream.common.errors import OrderingError
from slipstream.common.wire.events import StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName, WaitPlace
from slipstream.scheduler.records import DraftTraits


class Command(NamedTuple):
    """A step as the plan is given it."""

    step: int
    rows: int = 0
    """Mask of the slots that decode."""
    prompts: int = 0
    """Mask of the slots that take in chunks."""
    kept: int = 0
    """Mask of those of `rows` that draft's decode part has."""
    is_drafted: bool = False
    """True if some of these have draft tokens."""
    masked: int = 0
    """Mask of the slots that decode, or whose prompts end, and have a constraint."""

    @property
    def copies(self) -> bool:
        """True if some of `masked` have draft tokens."""
        return self.is_drafted and bool(self.masked & self.kept)

    @property
    def form(self) -> Form:
        """What the accesses depend on."""
        return Form(bool(self.prompts), bool(self.kept), self.is_drafted, bool(self.masked), self.copies)


class Form(NamedTuple):
    """The parts of a step. Rows that decode without a draft access nothing that a step without rows does not."""

    takes_prompts: bool = False
    has_draft_rows: bool = False
    """True if draft has a decode part."""
    is_drafted: bool = False
    is_masked: bool = False
    copies: bool = False


class BufferGroup(enum.IntEnum):
    """Buffers that every command writes together and reads together."""

    RESULTS = 0
    STASH = 1
    PREFILL_HIDDEN = 2
    DRAFT_TOKENS = 3
    DECODE_STAMPS = 4
    """Of draft's decode part, in its own memory, as verify reads them."""
    PREFILL_STAMPS = 5
    """The same of its prefill part."""
    LATE_STAMPS = 6
    """Those of the prefill part, as the scheduler reads them where verify has not copied them in time."""
    VERIFY_STAMPS = 7
    COPIED_DECODE_STAMPS = 8
    """In the results: verify's copy of the draft's stamps."""
    COPIED_PREFILL_STAMPS = 9
    RESULTS_FOR_GRAMMAR = 10
    """The results, as the grammar worker reads them."""
    COPIED_TOKENS = 11
    MASKS = 12

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
        return self not in _RESULTS and not self.is_of_grammar

    @property
    def is_of_grammar(self) -> bool:
        """True if the buffers belong to the grammar worker's attachment."""
        return self in (BufferGroup.COPIED_TOKENS, BufferGroup.MASKS)

    def buffers(self, draft: DraftTraits) -> tuple[BufferName, ...]:
        """The buffers of the group that exist for this draft."""
        members = _MEMBERS[self]
        if draft.reads_hidden:
            return members
        return tuple(buffer for buffer in members if buffer not in _FOR_HIDDEN_STATES)


class Phase(enum.Enum):
    """A part of a command, in the order of its stream; the waits of its place come before it, its signal after it."""

    DRAFT_DECODE = "draft's decode part"
    DRAFT_PREFILL = "draft's prefill part"
    COPY_IN = "copy in"
    """Verify's first work: from here on it uses only its own copy of what draft wrote."""
    COPY_OUT = "copy out"
    """Verify writes that copy for the grammar worker."""
    MASK = "mask"
    """The grammar worker reads results and draft tokens, and writes masks."""
    LEAVE_STATES = "leave states"
    """Verify writes the chunks' hidden states."""
    PUBLISH = "publish"
    """Verify samples, and writes what the scheduler consumes."""
    STASH = "stash"
    """Verify writes what the next forward needs."""
    CONSUME = "consume"
    """The scheduler reads the result of the step."""
    CONSUME_NEXT = "consume next"
    """The scheduler consumes the step after, and reads the stamps of this one if a poll says they are there."""

    @property
    def stream(self) -> StreamName:
        """The stream that the phase belongs to."""
        return _PHASES[self][0]

    @property
    def place(self) -> WaitPlace | None:
        """The place of the waits before it; None if no wait stands there."""
        return _PHASES[self][1]

    @property
    def signal(self) -> FenceName | None:
        """The fence that is signalled after it."""
        return _PHASES[self][2]


_PHASES = {
    Phase.DRAFT_DECODE: (StreamName.DRAFT, WaitPlace.START, FenceName.DRAFT_PROPOSED),
    Phase.DRAFT_PREFILL: (StreamName.DRAFT, WaitPlace.PREFILL_HIDDEN, FenceName.DRAFT_PREFILLED),
    Phase.COPY_IN: (StreamName.VERIFY, WaitPlace.START, None),
    Phase.COPY_OUT: (StreamName.VERIFY, None, FenceName.VERIFY_COPIED),
    Phase.MASK: (StreamName.GRAMMAR, WaitPlace.START, FenceName.GRAMMAR_READY),
    Phase.LEAVE_STATES: (StreamName.VERIFY, WaitPlace.PREFILL_HIDDEN, None),
    Phase.PUBLISH: (StreamName.VERIFY, WaitPlace.SAMPLING, FenceName.VERIFY_PUBLISH),
    Phase.STASH: (StreamName.VERIFY, None, FenceName.VERIFY_STASH),
    Phase.CONSUME: (StreamName.SCHEDULER, WaitPlace.START, None),
    Phase.CONSUME_NEXT: (StreamName.SCHEDULER, None, None),
}
"""The stream of each, its place, and its signal."""


class Rows(enum.Enum):
    """Which rows of a buffer a step touches."""

    SLOTS = "slots"
    """The rows of the step's slots, of those that take in prompts, too.

    A step declares a write of the stash for all its slots: where a prompt ends in it that is the stash, where a request
    takes the slot the poison of debug mode.
    """
    KEPT = "kept"
    """The rows of draft's decode part."""
    RING = "ring"
    """The row `step % ring`."""
    DECODE_PART = "decode part"
    """The row of the step's decode part: each part of draft has a row of the stamps."""
    PREFILL_PART = "prefill part"
    """The row of the step's prefill part."""
    PREFILL_PART_BEFORE = "prefill part before"
    """The row of the prefill part of the step before."""
    UNCONSUMED = "unconsumed"
    """The rows of the steps before that are not consumed when the command is sent."""
    MASKED = "masked"
    """The rows of the slots that have a constraint."""
    SPARE = "spare"
    """The row of the next step, which the writer poisons in debug mode."""
    WHOLE = "whole"
    """The buffer has no rows."""


@dataclass(frozen=True, slots=True)
class Access:
    """One access that a form of step declares."""

    phase: Phase
    group: BufferGroup
    rows: Rows
    is_write: bool

    def __str__(self) -> str:
        verb = "write" if self.is_write else "read"
        return f"{self.phase.stream.value}'s {verb} of {self.group.name.lower()} [{self.rows.value}]"


@cache
def declared_accesses(form: Form, draft: DraftTraits) -> tuple[Access, ...]:
    """Every access of a step, in an order that may be: draft decodes, verify, draft prefills, the scheduler."""
    if form.has_draft_rows and not draft.is_present:
        raise OrderingError("a step with a part for a draft needs one")
    return (
        *(_draft_decode() if form.has_draft_rows else ()),
        *_verify(form, draft),
        *(_draft_prefill(draft) if draft.is_present and form.takes_prompts else ()),
        *_scheduler(form, draft),
    )


def _draft_decode() -> tuple[Access, ...]:
    stamps = _write(Phase.DRAFT_DECODE, BufferGroup.DECODE_STAMPS, Rows.DECODE_PART)
    gather = _read(Phase.DRAFT_DECODE, BufferGroup.STASH, Rows.KEPT)
    return stamps, gather, _write(Phase.DRAFT_DECODE, BufferGroup.DRAFT_TOKENS, Rows.KEPT), stamps


def _draft_prefill(draft: DraftTraits) -> tuple[Access, ...]:
    groups = BufferGroup.PREFILL_STAMPS, BufferGroup.LATE_STAMPS
    stamps = tuple(_write(Phase.DRAFT_PREFILL, group, Rows.PREFILL_PART) for group in groups)
    hidden = _read(Phase.DRAFT_PREFILL, BufferGroup.PREFILL_HIDDEN, Rows.WHOLE)
    return (*stamps, *((hidden,) if draft.reads_hidden else ()), *stamps)


def _verify(form: Form, draft: DraftTraits) -> tuple[Access, ...]:
    # Draft's stamps are copied where verify has waited for its decode part.
    phase = Phase.COPY_IN if form.is_drafted else Phase.PUBLISH
    stamps = [
        _read(phase, BufferGroup.DECODE_STAMPS, Rows.DECODE_PART),
        _write(phase, BufferGroup.COPIED_DECODE_STAMPS, Rows.DECODE_PART),
        _read(phase, BufferGroup.PREFILL_STAMPS, Rows.PREFILL_PART_BEFORE),
        _write(phase, BufferGroup.COPIED_PREFILL_STAMPS, Rows.PREFILL_PART_BEFORE),
    ]
    accesses = [_write(Phase.COPY_IN, BufferGroup.VERIFY_STAMPS, Rows.RING)]
    if form.is_drafted:
        accesses += [_read(Phase.COPY_IN, BufferGroup.DRAFT_TOKENS, Rows.KEPT), *stamps]
    if form.copies:
        accesses.append(_write(Phase.COPY_OUT, BufferGroup.COPIED_TOKENS, Rows.KEPT))
    if form.takes_prompts and draft.reads_hidden:
        accesses.append(_write(Phase.LEAVE_STATES, BufferGroup.PREFILL_HIDDEN, Rows.WHOLE))
    if form.is_masked:
        accesses += _grammar(form)
    if form.has_draft_rows and not form.is_drafted:
        accesses += stamps
    if form.is_masked:
        accesses.append(_read(Phase.PUBLISH, BufferGroup.MASKS, Rows.MASKED))
    for group in (BufferGroup.RESULTS, BufferGroup.RESULTS_FOR_GRAMMAR):
        accesses.append(_write(Phase.PUBLISH, group, Rows.RING))
        accesses.append(_write(Phase.PUBLISH, group, Rows.SPARE))
    if draft.is_present:
        accesses.append(_write(Phase.STASH, BufferGroup.STASH, Rows.SLOTS))
    accesses.append(_write(Phase.STASH, BufferGroup.VERIFY_STAMPS, Rows.RING))
    return tuple(accesses)


def _grammar(form: Form) -> tuple[Access, ...]:
    copied = (_read(Phase.MASK, BufferGroup.COPIED_TOKENS, Rows.MASKED),) if form.copies else ()
    results = _read(Phase.MASK, BufferGroup.RESULTS_FOR_GRAMMAR, Rows.UNCONSUMED)
    return *copied, results, _write(Phase.MASK, BufferGroup.MASKS, Rows.MASKED)


def _scheduler(form: Form, draft: DraftTraits) -> tuple[Access, ...]:
    accesses = [
        _read(Phase.CONSUME, BufferGroup.RESULTS, Rows.RING),
        _read(Phase.CONSUME_NEXT, BufferGroup.VERIFY_STAMPS, Rows.RING),
        _read(Phase.CONSUME_NEXT, BufferGroup.COPIED_DECODE_STAMPS, Rows.DECODE_PART),
        _read(Phase.CONSUME_NEXT, BufferGroup.COPIED_PREFILL_STAMPS, Rows.PREFILL_PART),
    ]
    if draft.is_present and form.takes_prompts:
        accesses.append(_read(Phase.CONSUME_NEXT, BufferGroup.LATE_STAMPS, Rows.PREFILL_PART))
    return tuple(accesses)


def _read(phase: Phase, group: BufferGroup, rows: Rows) -> Access:
    return Access(phase, group, rows, is_write=False)


def _write(phase: Phase, group: BufferGroup, rows: Rows) -> Access:
    return Access(phase, group, rows, is_write=True)


_WRITERS = {
    BufferGroup.RESULTS: StreamName.VERIFY,
    BufferGroup.STASH: StreamName.VERIFY,
    BufferGroup.PREFILL_HIDDEN: StreamName.VERIFY,
    BufferGroup.DRAFT_TOKENS: StreamName.DRAFT,
    BufferGroup.DECODE_STAMPS: StreamName.DRAFT,
    BufferGroup.PREFILL_STAMPS: StreamName.DRAFT,
    BufferGroup.LATE_STAMPS: StreamName.DRAFT,
    BufferGroup.VERIFY_STAMPS: StreamName.VERIFY,
    BufferGroup.COPIED_DECODE_STAMPS: StreamName.VERIFY,
    BufferGroup.COPIED_PREFILL_STAMPS: StreamName.VERIFY,
    BufferGroup.RESULTS_FOR_GRAMMAR: StreamName.VERIFY,
    BufferGroup.COPIED_TOKENS: StreamName.VERIFY,
    BufferGroup.MASKS: StreamName.GRAMMAR,
}

_READERS = {
    BufferGroup.RESULTS: StreamName.SCHEDULER,
    BufferGroup.STASH: StreamName.DRAFT,
    BufferGroup.PREFILL_HIDDEN: StreamName.DRAFT,
    BufferGroup.DRAFT_TOKENS: StreamName.VERIFY,
    BufferGroup.DECODE_STAMPS: StreamName.VERIFY,
    BufferGroup.PREFILL_STAMPS: StreamName.VERIFY,
    BufferGroup.LATE_STAMPS: StreamName.SCHEDULER,
    BufferGroup.VERIFY_STAMPS: StreamName.SCHEDULER,
    BufferGroup.COPIED_DECODE_STAMPS: StreamName.SCHEDULER,
    BufferGroup.COPIED_PREFILL_STAMPS: StreamName.SCHEDULER,
    BufferGroup.RESULTS_FOR_GRAMMAR: StreamName.GRAMMAR,
    BufferGroup.COPIED_TOKENS: StreamName.GRAMMAR,
    BufferGroup.MASKS: StreamName.VERIFY,
}

COPIED = (BufferGroup.COPIED_DECODE_STAMPS, BufferGroup.COPIED_PREFILL_STAMPS)
_RESULTS = (BufferGroup.RESULTS, BufferGroup.RESULTS_FOR_GRAMMAR, BufferGroup.VERIFY_STAMPS, *COPIED)
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
    BufferGroup.DRAFT_TOKENS: (BufferName.DRAFT_TOKENS, BufferName.NUM_PROPOSED),
    BufferGroup.VERIFY_STAMPS: (BufferName.VERIFY_STAMPS,),
    BufferGroup.RESULTS_FOR_GRAMMAR: (BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS),
    BufferGroup.COPIED_TOKENS: (BufferName.COPIED_TOKENS,),
    BufferGroup.MASKS: (BufferName.MASKS, BufferName.MASK_STAMPS),
} | dict.fromkeys(
    (BufferGroup.DECODE_STAMPS, BufferGroup.PREFILL_STAMPS, BufferGroup.LATE_STAMPS, *COPIED),
    (BufferName.DRAFT_STAMPS,),
)
