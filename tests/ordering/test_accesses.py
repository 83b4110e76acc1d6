"""The declared accesses: complete, and one writer for each buffer."""

from __future__ import annotations

import pytest

from slipstream.common.errors import OrderingError
from slipstream.common.wire.events import StreamName
from slipstream.common.wire.layout import LENT_WEIGHTS, SLOT_BUFFERS, BufferName, DraftShape, EpochShape, GrammarShape
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import BufferGroup, Form, Phase, Rows, declared_accesses

NO_DRAFT = DraftTraits(is_present=False)
LANGUAGE_MODEL = DraftTraits(is_present=True)
HEAD = DraftTraits(is_present=True, reads_hidden=True)

SIZES = {"num_slots": 2, "run_ahead": 1, "num_draft_tokens": 1, "chunk_tokens": 1}
SHAPE = DraftShape(hidden_width=1, **SIZES)
MASKS = GrammarShape(num_slots=2, num_draft_tokens=1, vocab_size=33)
OF_GRAMMAR = [*MASKS.given_specs(), *MASKS.own_specs()]
RESULTS, REGION = EpochShape(**SIZES).specs(), [*SHAPE.given_specs(), *SHAPE.own_specs()]
COMMANDS = [
    (Form(takes_prompts, has_draft_rows, is_drafted, is_masked, is_masked and is_drafted), draft)
    for draft in (NO_DRAFT, LANGUAGE_MODEL, HEAD)
    for takes_prompts in (False, True)
    for has_draft_rows, is_drafted in ((False, False), (True, False), (True, True))
    for is_masked in (False, True)
    if draft.is_present or not has_draft_rows
]
commands = pytest.mark.parametrize(("form", "draft"), COMMANDS)


def test_every_buffer_is_in_one_group() -> None:
    grouped = [
        (buffer, group.is_in_region)
        for group in BufferGroup
        for buffer in group.buffers(HEAD)
        # The same buffers: each of these has rows of its own, or is read by another.
        if group not in (BufferGroup.PREFILL_STAMPS, BufferGroup.LATE_STAMPS, BufferGroup.COPIED_PREFILL_STAMPS)
        and group is not BufferGroup.RESULTS_FOR_GRAMMAR
    ]
    assert sorted(grouped) == sorted(
        [(BufferName(spec.name), False) for spec in (*RESULTS, *OF_GRAMMAR)]
        + [(BufferName(spec.name), True) for spec in REGION]
    )


def test_buffers_of_hidden_states_exist_only_for_drafts_that_read_them() -> None:
    grouped = {buffer for group in BufferGroup for buffer in group.buffers(LANGUAGE_MODEL)}
    of_hidden_states = {BufferName.HIDDEN_STATES, BufferName.PREFILL_HIDDEN}
    assert set(BufferName) - grouped - set(LENT_WEIGHTS) == of_hidden_states


@commands
def test_a_group_has_one_writer_and_one_other_reader(form: Form, draft: DraftTraits) -> None:
    for access in declared_accesses(form, draft):
        owners = (access.group.writer,) if access.is_write else (access.group.writer, access.group.reader)
        assert access.phase.stream in owners, access


@commands
def test_rows_are_slots_where_the_buffers_have_slots(form: Form, draft: DraftTraits) -> None:
    for access in declared_accesses(form, draft):
        for buffer in access.group.buffers(draft):
            assert (access.rows in (Rows.SLOTS, Rows.KEPT, Rows.MASKED)) == (buffer in SLOT_BUFFERS)


@commands
def test_every_step_publishes_and_stashes_for_a_draft(form: Form, draft: DraftTraits) -> None:
    written = {(access.phase, access.group) for access in declared_accesses(form, draft) if access.is_write}
    assert (Phase.PUBLISH, BufferGroup.RESULTS) in written
    assert ((Phase.STASH, BufferGroup.STASH) in written) == draft.is_present


@commands
def test_verify_reads_nothing_of_what_it_gives_to_a_draft(form: Form, draft: DraftTraits) -> None:
    for access in declared_accesses(form, draft):
        if access.phase.stream is StreamName.VERIFY and not access.is_write:
            of_draft = (BufferGroup.DRAFT_TOKENS, BufferGroup.DECODE_STAMPS, BufferGroup.PREFILL_STAMPS)
            assert access.group in (*of_draft, BufferGroup.MASKS)


def test_a_prefill_part_of_draft_reads_neither_lengths_nor_bonus_tokens() -> None:
    for draft in (LANGUAGE_MODEL, HEAD):
        accesses = declared_accesses(Form(takes_prompts=True), draft)
        found = [access.group for access in accesses if access.phase is Phase.DRAFT_PREFILL and not access.is_write]
        assert found == ([BufferGroup.PREFILL_HIDDEN] if draft.reads_hidden else [])


def test_a_part_for_a_draft_needs_one() -> None:
    with pytest.raises(OrderingError, match="needs one"):
        declared_accesses(Form(has_draft_rows=True), NO_DRAFT)
