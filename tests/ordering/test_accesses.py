"""The declared accesses: complete, and one writer for each buffer."""

from __future__ import annotations

import pytest

from slipstream.common.errors import OrderingError
from slipstream.common.worker.access_log import StreamName
from slipstream.common.worker.layout import LENT_WEIGHTS, SLOT_BUFFERS, BufferName, DraftShape, EpochShape
from slipstream.common.worker.step import StepKind
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import (
    BufferGroup,
    Phase,
    Rows,
    declared_accesses,
)

NO_DRAFT = DraftTraits(is_present=False)
LANGUAGE_MODEL = DraftTraits(is_present=True)
HEAD = DraftTraits(is_present=True, reads_hidden=True)

SIZES = {"num_slots": 2, "run_ahead": 1, "num_draft_tokens": 1, "chunk_tokens": 1}
SHAPE = DraftShape(hidden_width=1, **SIZES)
RESULTS, REGION = EpochShape(**SIZES).specs(), [*SHAPE.given_specs(), *SHAPE.own_specs()]
COMMANDS = [
    (kind, draft, is_mixed)
    for kind in (StepKind.PREFILL, StepKind.DECODE, StepKind.PLAIN)
    for draft in (NO_DRAFT, LANGUAGE_MODEL, HEAD)
    for is_mixed in (False, True)
    if (kind is not StepKind.DECODE or draft.is_present) and (kind is StepKind.DECODE or not is_mixed)
]


def test_every_buffer_is_in_one_group() -> None:
    grouped = [
        (buffer, group.is_in_region)
        for group in BufferGroup
        for buffer in group.buffers(HEAD)
        # The same buffer, by its other reader.
        if group is not BufferGroup.LATE_STAMPS
    ]
    assert sorted(grouped) == sorted(
        [(BufferName(spec.name), False) for spec in RESULTS] + [(BufferName(spec.name), True) for spec in REGION]
    )


def test_buffers_of_hidden_states_exist_only_for_drafts_that_read_them() -> None:
    grouped = {buffer for group in BufferGroup for buffer in group.buffers(LANGUAGE_MODEL)}
    of_hidden_states = {BufferName.HIDDEN_STATES, BufferName.PREFILL_HIDDEN}
    assert set(BufferName) - grouped - set(LENT_WEIGHTS) == of_hidden_states


@pytest.mark.parametrize(("kind", "draft", "is_mixed"), COMMANDS)
def test_a_group_has_one_writer_and_one_other_reader(kind: StepKind, draft: DraftTraits, is_mixed: bool) -> None:
    for access in declared_accesses(kind, draft, is_mixed=is_mixed):
        owners = (access.group.writer,) if access.is_write else (access.group.writer, access.group.reader)
        assert access.phase.stream in owners, access


@pytest.mark.parametrize(("kind", "draft", "is_mixed"), COMMANDS)
def test_rows_are_slots_where_the_buffers_have_slots(kind: StepKind, draft: DraftTraits, is_mixed: bool) -> None:
    for access in declared_accesses(kind, draft, is_mixed=is_mixed):
        for buffer in access.group.buffers(draft):
            assert (access.rows in (Rows.SLOTS, Rows.DECODING)) == (buffer in SLOT_BUFFERS)


@pytest.mark.parametrize(("kind", "draft", "is_mixed"), COMMANDS)
def test_every_kind_publishes_and_stashes_for_a_draft(kind: StepKind, draft: DraftTraits, is_mixed: bool) -> None:
    written = {
        (access.phase, access.group) for access in declared_accesses(kind, draft, is_mixed=is_mixed) if access.is_write
    }
    assert (Phase.PUBLISH, BufferGroup.RESULTS) in written
    assert ((Phase.STASH, BufferGroup.STASH) in written) == draft.is_present


@pytest.mark.parametrize(("kind", "draft", "is_mixed"), COMMANDS)
def test_verify_reads_nothing_of_what_it_gives_to_a_draft(kind: StepKind, draft: DraftTraits, is_mixed: bool) -> None:
    for access in declared_accesses(kind, draft, is_mixed=is_mixed):
        if access.phase.stream is StreamName.VERIFY and not access.is_write:
            assert access.group in (BufferGroup.DRAFT_TOKENS, BufferGroup.DRAFT_STAMPS)


def test_a_prefill_of_draft_reads_neither_lengths_nor_bonus_tokens() -> None:
    for draft in (LANGUAGE_MODEL, HEAD):
        accesses = declared_accesses(StepKind.PREFILL, draft)
        assert not [access for access in accesses if access.phase is Phase.DRAFT and access.group is BufferGroup.STASH]


def test_decoding_needs_a_draft() -> None:
    with pytest.raises(OrderingError, match="needs a draft"):
        declared_accesses(StepKind.DECODE, NO_DRAFT)
