"""A step cut into halves, one for each stream, in the form that the derivation runs over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.worker.access_log import StreamName
from slipstream.common.worker.step import FenceName, StepKind
from tests.ordering.accesses import Access, BufferGroup, Phase, Rows, declared_accesses
from tests.ordering.knowledge import CONSUMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from slipstream.scheduler.records import DraftTraits, OrderedStep

DRAFT, VERIFY, SCHEDULER = 0, 1, 2
"""The streams, numbered."""

Halves = tuple["Half", ...]


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


class Half(NamedTuple):
    """The part of a step on one stream."""

    stream: int
    accesses: tuple[PlannedAccess, ...]
    signals: tuple[FenceName, ...]
    """The stream's signals, in order."""
    is_drafting: bool
    """True for a command that drafts: in a mixed step it has a number of its own."""


def halves_by_kind(draft: DraftTraits) -> Mapping[tuple[StepKind, bool], Halves]:
    """The halves of every kind of step that is possible with this draft; True for a mixed one."""
    kinds = [(StepKind.PREFILL, False), (StepKind.PLAIN, False)]
    if draft.is_present:
        kinds += [(StepKind.DECODE, False), (StepKind.DECODE, True)]
    return {
        (kind, is_mixed): _cut(declared_accesses(kind, draft, is_mixed=is_mixed), draft) for kind, is_mixed in kinds
    }


def row_masks(command: OrderedStep, num_ring_rows: int) -> tuple[int, ...]:
    """The rows of a step, in the order of `ROWS_ORDER`."""
    row, after, drafted, before = (
        1 << number % num_ring_rows for number in (command.step, command.step + 1, command.drafted, command.drafted - 1)
    )
    return command.rows | command.prompts, command.rows, row, drafted, after, 1, drafted | before


ROWS_ORDER = (Rows.SLOTS, Rows.DECODING, Rows.RING, Rows.DRAFTED, Rows.SPARE, Rows.WHOLE, Rows.LAST_TWO)

_SIGNALS = {
    StreamName.DRAFT: (FenceName.DRAFT_DONE,),
    StreamName.VERIFY: (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH),
    StreamName.SCHEDULER: (),
}

_STREAM_NUMBERS = {StreamName.DRAFT: DRAFT, StreamName.VERIFY: VERIFY, StreamName.SCHEDULER: SCHEDULER}

_COUNTERS = {
    Phase.DRAFT: FenceName.DRAFT_DONE.value,
    Phase.TAKE_IN: FenceName.DRAFT_DONE.value,
    Phase.COPY_IN: FenceName.VERIFY_PUBLISH.value,
    Phase.PUBLISH: FenceName.VERIFY_PUBLISH.value,
    Phase.STASH: FenceName.VERIFY_STASH.value,
    Phase.CONSUME: CONSUMED,
    Phase.CONSUME_NEXT: CONSUMED,
}


def _cut(accesses: tuple[Access, ...], draft: DraftTraits) -> Halves:
    commands = dict.fromkeys((access.phase.stream, access.phase is Phase.TAKE_IN) for access in accesses)
    return tuple(
        Half(
            _STREAM_NUMBERS[stream],
            _reduced(
                access
                for access in accesses
                if (access.phase.stream, access.phase is Phase.TAKE_IN) == (stream, takes_in)
            ),
            _SIGNALS[stream] if draft.is_present or stream is not StreamName.VERIFY else (FenceName.VERIFY_PUBLISH,),
            is_drafting=stream is StreamName.DRAFT and not takes_in,
        )
        for stream, takes_in in commands
    )


def _reduced(accesses: Iterable[Access]) -> tuple[PlannedAccess, ...]:
    # A stream's reads of what only itself writes conflict with nothing. Of the same access twice in a
    # command the last one stands: waits come before both, and an access after the last one is after both.
    reduced: dict[tuple[BufferGroup, Rows, bool], PlannedAccess] = {}
    for access in accesses:
        # The copy of draft's stamps is read before the step after the next may write it: like the results.
        if access.group is BufferGroup.COPIED_STAMPS:
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
