"""What a worker keeps of a slot between commands."""

from __future__ import annotations

import torch

from slipstream.common.sampling import SamplingParams
from slipstream.common.step import SlotUpdate
from slipstream.services.slot_table import SlotTable
from tests.workers import attachment_to, make_arena


def _table() -> SlotTable:
    arena = make_arena()
    table = SlotTable(attachment_to(arena), torch.device("cpu"))
    arena.close()
    return table


def test_padding_has_the_padding_page_and_no_room() -> None:
    table = _table()
    table.apply((SlotUpdate(slot=2, generation=1, pages=(4, 5), limit_tokens=30, sampling=SamplingParams(top_k=3)),))
    assert not table.page_table[0].any()
    assert int(table.limits[0]) == 0
    assert table.page_table[2].tolist() == [4, 5, 0, 0, 0]
    assert table.sampling.top_k.tolist() == [0, 0, 3, 0]


def test_a_request_that_takes_a_slot_finds_nothing_of_the_last_one() -> None:
    table = _table()
    hot = SamplingParams(temperature=1.5, top_k=3, top_p=0.5, min_p=0.1, seed=2**64 - 1)
    table.apply((SlotUpdate(slot=1, generation=1, pages=(1, 2, 3, 4, 5), limit_tokens=64, sampling=hot),))
    table.apply((SlotUpdate(slot=1, generation=2, pages=(8,), limit_tokens=9, sampling=SamplingParams()),))
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
    table.apply((SlotUpdate(slot=1, generation=1, pages=(1, 2), limit_tokens=20, sampling=SamplingParams(top_k=7)),))
    table.apply((SlotUpdate(slot=1, generation=1, first_page_index=2, pages=(6,), limit_tokens=40),))
    assert table.page_table[1].tolist() == [1, 2, 6, 0, 0]
    assert int(table.limits[1]) == 40
    assert int(table.sampling.top_k[1]) == 7


def test_two_updates_of_a_command_are_taken_in_turn() -> None:
    table = _table()
    table.apply(
        (
            SlotUpdate(slot=3, generation=1, pages=(2,), limit_tokens=5, sampling=SamplingParams(seed=1)),
            SlotUpdate(slot=1, generation=1, pages=(3,), limit_tokens=6, sampling=SamplingParams(seed=2)),
        )
    )
    assert table.limits.tolist() == [0, 6, 0, 5]
    assert table.sampling.seed.tolist() == [0, 2, 0, 1]
