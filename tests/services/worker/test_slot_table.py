"""A worker's state of a slot between commands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import SlotUpdate
from slipstream.services.worker.slots import PinnedStaging, SamplingMode, SlotTable, Staging
from tests.harness.workers import SHAPE, SharedArenas, attachment_to, decode

VOCAB_SIZE = 272


def apply(table: SlotTable, updates: tuple[SlotUpdate, ...]) -> None:
    """Through a staging area, as on a GPU."""
    staging = PinnedStaging(num_slots=4, num_bytes=64, depth=2, device=torch.device("cpu"), fetch=torch.Tensor.copy_)
    staging.begin(0, ())
    changes = table.changes(updates, staging)
    staging.flush()
    table.take_over(changes)


def _table() -> SlotTable:
    arena = SharedArenas()
    table = SlotTable(attachment_to(arena), VOCAB_SIZE, torch.device("cpu"))
    arena.close()
    return table


def test_padding_has_the_padding_page_and_no_room() -> None:
    table = _table()
    apply(table, (SlotUpdate(slot=2, generation=1, pages=(4, 5), limit_tokens=30, sampling=SamplingParams(top_k=3)),))
    assert not table.page_table[0].any()
    assert int(table.limits[0]) == 0
    assert table.page_table[2].tolist() == [4, 5, 0, 0, 0]
    assert table.sampling.top_k.tolist() == [0, 0, 3, 0]


def test_a_request_that_takes_a_slot_finds_nothing_of_the_last_one() -> None:
    table = _table()
    hot = SamplingParams(temperature=1.5, top_k=3, top_p=0.5, min_p=0.1, seed=2**64 - 1)
    apply(table, (SlotUpdate(slot=1, generation=1, pages=(1, 2, 3, 4, 5), limit_tokens=64, sampling=hot),))
    apply(table, (SlotUpdate(slot=1, generation=2, pages=(8,), limit_tokens=9, sampling=SamplingParams()),))
    assert table.page_table[1].tolist() == [8, 0, 0, 0, 0]
    assert int(table.limits[1]) == 9
    row = table.sampling.take(torch.tensor([1]))
    assert [float(row.temperature), int(row.top_k), float(row.top_p), float(row.min_p), int(row.seed)] == [
        0,
        0,
        1,
        0,
        0,
    ]


def test_more_pages_leave_the_first_ones_and_the_sampling() -> None:
    table = _table()
    apply(table, (SlotUpdate(slot=1, generation=1, pages=(1, 2), limit_tokens=20, sampling=SamplingParams(top_k=7)),))
    apply(table, (SlotUpdate(slot=1, generation=1, first_page_index=2, pages=(6,), limit_tokens=40),))
    assert table.page_table[1].tolist() == [1, 2, 6, 0, 0]
    assert int(table.limits[1]) == 40
    assert int(table.sampling.top_k[1]) == 7


def test_of_two_requests_that_take_a_slot_in_one_command_the_last_one_counts() -> None:
    table = _table()
    first = SlotUpdate(slot=1, generation=1, pages=(1,), limit_tokens=9, sampling=SamplingParams(), cached_tokens=8)
    apply(table, (replace(first, pages=(7, 8)), replace(first, first_page_index=2, pages=(9,)), first))
    assert table.page_table[1].tolist() == [1, 0, 0, 0, 0], "nothing of the one before"
    apply(table, (first, replace(first, generation=2, history_from=3, cached_tokens=2)))
    assert (int(table.history_from[1]), int(table.written_from[1]), table.has_late_history) == (3, 3, True)
    apply(table, (replace(first, generation=3, history_from=3), replace(first, generation=4)))
    assert (int(table.history_from[1]), int(table.written_from[1]), table.has_late_history) == (0, 8, False)


def test_a_plain_request_has_no_bias_of_one_that_the_stream_has_not_come_to() -> None:
    """On a CPU updates are staged ahead of the stream."""
    table, staging = _table(), Staging()
    biased, plain = (
        SlotUpdate(slot=1, generation=1, limit_tokens=9, sampling=sampling)
        for sampling in (SamplingParams(logit_bias=((3, 100.0),)), SamplingParams(temperature=1.0))
    )
    staged = [table.changes((update,), staging) for update in (biased, plain)]
    for changes in staged:
        table.take_over(changes)
    assert not table.adjustments.is_on[1]


def test_a_salt_is_that_of_the_request_in_the_slot() -> None:
    table, salted = _table(), SlotUpdate(slot=2, generation=1, sampling=SamplingParams(), has_cache_salt=True)
    apply(table, (salted, replace(salted, slot=3, has_cache_salt=False)))
    assert table.have_cache_salt.tolist() == [False, False, True, False]
    apply(table, (SlotUpdate(slot=2, generation=1, first_page_index=1, pages=(5,)),))
    assert table.have_cache_salt.tolist() == [False, False, True, False], "more pages leave it"
    apply(table, (replace(salted, generation=2, has_cache_salt=False),))
    assert not table.have_cache_salt.any()


def test_two_updates_of_a_command_are_taken_in_turn() -> None:
    table = _table()
    apply(
        table,
        (
            SlotUpdate(slot=3, generation=1, pages=(2,), limit_tokens=5, sampling=SamplingParams(seed=1)),
            SlotUpdate(slot=1, generation=1, pages=(3,), limit_tokens=6, sampling=SamplingParams(seed=2)),
        ),
    )
    assert table.limits.tolist() == [0, 6, 0, 5]
    assert table.sampling.seed.tolist() == [0, 2, 0, 1]


def test_how_many_draft_tokens_stand_is_said_with_each_update() -> None:
    table = _table()
    assert table.max_draft_tokens.tolist() == [SHAPE.num_draft_tokens] * 4
    for given, kept in ((0, 0), (1, 1), (SHAPE.num_draft_tokens + 5, SHAPE.num_draft_tokens), (None, 2)):
        apply(table, (SlotUpdate(slot=2, generation=1, limit_tokens=5, max_draft_tokens=given),))
        assert table.max_draft_tokens.tolist() == [2, 2, kept, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": ((3, 1.0), (VOCAB_SIZE, 1.0))},
        {"masked_token_ids": (VOCAB_SIZE,), "masked_before": 4},
    ],
)
def test_token_ids_that_there_are_not_are_refused(changes: dict[str, Any]) -> None:
    update = SlotUpdate(slot=2, generation=1, limit_tokens=5, sampling=SamplingParams(**changes))
    with pytest.raises(InvalidArgumentError, match=f"got {VOCAB_SIZE}, accepted: token ids of 0 to 271"):
        _table().check(replace(decode(1, 2), updates=(update,)))


def test_a_mask_leaves_a_token() -> None:
    every = SamplingParams(masked_token_ids=tuple(range(5)), masked_before=9)
    with pytest.raises(InvalidArgumentError, match="masked_token_ids: got 'every token'"):
        every.check_token_ids(5)
    every.check_token_ids(6)


def test_the_sampling_mode_depends_on_the_slots_that_take_part() -> None:
    table = _table()
    requests = (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(presence_penalty=1.0),
    )
    apply(
        table,
        tuple(SlotUpdate(slot=slot, generation=1, sampling=params) for slot, params in enumerate(requests, start=1)),
    )
    assert [table.sampling_mode((slot,)) for slot in (1, 2, 3)] == [
        SamplingMode.NOISE,
        SamplingMode.FILTERS,
        SamplingMode.ADJUSTMENTS,
    ]
    assert table.sampling_mode((1, 2)) is SamplingMode.FILTERS
    assert table.sampling_mode((3, 2)) is SamplingMode.ADJUSTMENTS
    assert table.sampling_mode(()) is SamplingMode.NOISE
    apply(table, (SlotUpdate(slot=3, generation=2, sampling=SamplingParams(top_k=5)),))
    assert table.sampling_mode((3,)) is SamplingMode.NOISE, "a greedy request has no use for filters"
