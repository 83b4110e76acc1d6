"""A step cut into parts, one for each place of waits on a stream, in the form that the derivation runs over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import NamedTuple

from slipstream.common.wire.events import StreamName
from slipstream.common.wire.step import FenceName, WaitPlace
from slipstream.scheduler.records import DraftTraits, mask_of
from tests.ordering.accesses import COPIED, Access, BufferGroup, Command, Form, Phase, Rows, declared_accesses
from tests.ordering.knowledge import CONSUMED

DRAFT, VERIFY, SCHEDULER, GRAMMAR = range(4)
"""The streams, numbered."""


class PlannedAccess(NamedTuple):
    """A declared access, reduced to numbers."""

    group: int
    rows: int
    """Place in the tuple of row masks of the step."""
    is_write: bool
    counter: int
    """The first counter that the stream signals after the access."""
    is_polled: bool
    """Done when the next step is consumed, behind a poll; nothing waits for it."""
    declared: Access


class StepPart(NamedTuple):
    """What a stream does in a step from a place of waits to the next."""

    stream: int
    place: WaitPlace
    accesses: tuple[PlannedAccess, ...]
    signals: tuple[FenceName, ...]
    """The stream's signals, in order."""


@cache
def parts_of(form: Form, draft: DraftTraits) -> tuple[StepPart, ...]:
    """The parts of a step, each stream's in order, and each before what waits for it."""
    return tuple(_cut(declared_accesses(form, draft), draft))


def row_masks(command: Command, num_ring_rows: int, consumed: int) -> tuple[int, ...]:
    """The rows of a step, in the order of `ROWS_ORDER`. `consumed`: the last step consumed when it is sent."""
    before, row, after = (number % num_ring_rows for number in range(command.step - 1, command.step + 2))
    parts = 1 << 2 * row, 1 << 2 * row + 1, 1 << 2 * before + 1
    unconsumed = mask_of(number % num_ring_rows for number in range(consumed + 1, command.step))
    slots = command.rows | command.prompts
    return slots, command.kept, 1 << row, *parts, unconsumed, command.masked, 1 << after, 1


ROWS_ORDER = (
    Rows.SLOTS,
    Rows.KEPT,
    Rows.RING,
    Rows.DECODE_PART,
    Rows.PREFILL_PART,
    Rows.PREFILL_PART_BEFORE,
    Rows.UNCONSUMED,
    Rows.MASKED,
    Rows.SPARE,
    Rows.WHOLE,
)

_STREAM_NUMBERS = {
    StreamName.DRAFT: DRAFT,
    StreamName.VERIFY: VERIFY,
    StreamName.SCHEDULER: SCHEDULER,
    StreamName.GRAMMAR: GRAMMAR,
}

_COUNTERS = {
    Phase.DRAFT_DECODE: FenceName.DRAFT_PROPOSED.value,
    Phase.DRAFT_PREFILL: FenceName.DRAFT_PREFILLED.value,
    Phase.COPY_IN: FenceName.VERIFY_PUBLISH.value,
    Phase.COPY_OUT: FenceName.VERIFY_COPIED.value,
    Phase.MASK: FenceName.GRAMMAR_READY.value,
    # No draft sees publish, which is of the results.
    Phase.LEAVE_STATES: FenceName.VERIFY_STASH.value,
    Phase.PUBLISH: FenceName.VERIFY_PUBLISH.value,
    Phase.STASH: FenceName.VERIFY_STASH.value,
    Phase.CONSUME: CONSUMED,
    Phase.CONSUME_NEXT: CONSUMED,
}


def _cut(accesses: tuple[Access, ...], draft: DraftTraits) -> Iterator[StepPart]:
    place = WaitPlace.START

    def part(access: Access) -> tuple[StreamName, WaitPlace]:
        nonlocal place
        place = access.phase.place or place
        return access.phase.stream, place

    for (stream, begins), found in groupby(accesses, part):
        declared = tuple(found)
        signals = dict.fromkeys(access.phase.signal for access in declared)
        yield StepPart(
            _STREAM_NUMBERS[stream],
            begins,
            _reduced(declared),
            # Without a draft nothing is stashed.
            tuple(fence for fence in signals if fence and (draft.is_present or fence is not FenceName.VERIFY_STASH)),
        )


def _reduced(accesses: Iterable[Access]) -> tuple[PlannedAccess, ...]:
    # A stream's reads of what only itself writes conflict with nothing. Of the same access twice in a
    # part the last one stands: waits come before both, and an access after the last one is after both.
    reduced: dict[tuple[BufferGroup, Rows, bool], PlannedAccess] = {}
    for access in accesses:
        # The copy of draft's stamps is read before the step after the next may write it: like the results.
        if access.group in COPIED:
            continue
        if access.is_write or access.group.writer is not access.phase.stream:
            reduced[access.group, access.rows, access.is_write] = _in_numbers(access)
    return tuple(reduced.values())


def _in_numbers(access: Access) -> PlannedAccess:
    return PlannedAccess(
        group=access.group.value,
        rows=ROWS_ORDER.index(access.rows),
        is_write=access.is_write,
        counter=_COUNTERS[access.phase],
        is_polled=access.phase is Phase.CONSUME_NEXT,
        declared=access,
    )
