"""A step cut into halves, one for each stream, in the form that the derivation runs over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.worker.access_log import StreamName
from slipstream.common.worker.step import FenceName, StepKind
from tests.ordering.accesses import Access, BufferGroup, Phase, Rows, declared_accesses
from tests.ordering.knowledge import CONSUMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from slipstream.scheduler.core.plan import DraftTraits

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


def halves_by_kind(draft: DraftTraits) -> Mapping[StepKind, Halves]:
    """The halves of every kind of step that is possible with this draft."""
    kinds = (StepKind.PREFILL, StepKind.PLAIN, *(StepKind.DECODE,) * draft.is_present)
    return {kind: _cut(declared_accesses(kind, draft), draft) for kind in kinds}


def row_masks(rows: int, step: int, num_ring_rows: int) -> tuple[int, ...]:
    """The rows of a step, in the order of `ROWS_ORDER`; `rows` is the mask of its slots."""
    row, before = 1 << step % num_ring_rows, 1 << (step - 1) % num_ring_rows
    return rows, row, 1 << (step + 1) % num_ring_rows, 1, row | before


ROWS_ORDER = (Rows.SLOTS, Rows.RING, Rows.SPARE, Rows.WHOLE, Rows.LAST_TWO)

_SIGNALS = {
    StreamName.DRAFT: (FenceName.DRAFT_DONE,),
    StreamName.VERIFY: (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH),
    StreamName.SCHEDULER: (),
}

_STREAM_NUMBERS = {StreamName.DRAFT: DRAFT, StreamName.VERIFY: VERIFY, StreamName.SCHEDULER: SCHEDULER}

_COUNTERS = {
    Phase.DRAFT: FenceName.DRAFT_DONE.value,
    Phase.COPY_IN: FenceName.VERIFY_PUBLISH.value,
    Phase.PUBLISH: FenceName.VERIFY_PUBLISH.value,
    Phase.STASH: FenceName.VERIFY_STASH.value,
    Phase.CONSUME: CONSUMED,
    Phase.CONSUME_NEXT: CONSUMED,
}


def _cut(accesses: tuple[Access, ...], draft: DraftTraits) -> Halves:
    streams = dict.fromkeys(access.phase.stream for access in accesses)
    return tuple(
        Half(
            _STREAM_NUMBERS[stream],
            _reduced(access for access in accesses if access.phase.stream is stream),
            _SIGNALS[stream] if draft.is_present or stream is not StreamName.VERIFY else (FenceName.VERIFY_PUBLISH,),
        )
        for stream in streams
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
