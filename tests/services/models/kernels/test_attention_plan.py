"""The plan of attention over ragged rows: every split of every tile once, within the room that there is for them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from slipstream.services.models.attention import RaggedRows
from slipstream.services.models.kernels.paged_attention import RaggedPlan

TILE, CAPACITY = 32, 40_000


def plan_of(
    lengths: list[int],
    contexts: list[int],
    device: torch.device,
    *,
    spare: int,
    padding: int | None = None,
    knows_keys: bool = False,
) -> RaggedPlan:
    """Plans rows of `lengths` behind `contexts`; with `padding` tokens behind them as a graph does."""
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    positions = torch.cat([torch.arange(length) + start for length, start in zip(lengths, contexts, strict=True)])
    positions = torch.cat((positions, torch.full((padding or 0,), 2**62)))
    ragged = RaggedRows(
        tuple(lengths) if padding is None else None,
        torch.zeros_like(positions).to(device),
        begins.to(device),
        tuple(length + start for length, start in zip(lengths, contexts, strict=True)) if knows_keys else None,
    )
    limits = torch.full((len(lengths),), CAPACITY, device=device)
    return RaggedPlan.of(ragged, positions.to(device), limits, capacity=CAPACITY, tokens=TILE, spare=spare)


def tiles_of(lengths: list[int]) -> Counter[tuple[int, int]]:
    """The first tokens of all tiles, and their rows."""
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    return Counter((begins[row] + place, row) for row, length in enumerate(lengths) for place in range(0, length, TILE))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_random_rows(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_rows = draw(1, 300) if seed % 4 == 0 else draw(1, 12)
    longest = (2, 9, 200)[draw(0, 3)]
    lengths = [draw(0, longest) for _ in range(num_rows)]
    contexts = [draw(0, (10, 3000, 32_000)[draw(0, 3)]) for _ in range(num_rows)]
    spare, padding = draw(1, 70), (None, draw(0, 99))[draw(0, 2)]
    plan = plan_of(lengths, contexts, device, spare=spare, padding=padding)
    num_tokens = sum(lengths) + (padding or 0)
    items = [item for item in zip(*plan.items.tolist(), strict=True) if item[0] < num_tokens]
    splits = {(begin, row): num_splits for begin, row, _, num_splits, _ in items}
    assert Counter((begin, row, split) for begin, row, split, _, _ in items) == Counter(
        (*tile, split) for tile, count in splits.items() for split in range(count)
    ), "each split once"
    assert Counter(splits.keys()) == tiles_of(lengths), "each tile"

    ends = {row: sum(lengths[: row + 1]) for row in range(num_rows)}
    several = {tile: count for tile, count in splits.items() if count > 1}
    listed = [tile for tile in zip(*plan.split_tiles.tolist(), strict=True) if tile[2]]
    places = {(begin, split): place for begin, _, split, count, place in items if count > 1}
    assert sorted(tile[:3] for tile in listed) == sorted((begin, ends[row], n) for (begin, row), n in several.items())
    assert all(places[begin, split] == first + split for begin, _, count, first in listed for split in range(count))
    assert len(set(places.values())) == len(places) == sum(several.values())
    assert all(0 <= place < plan.num_places for place in places.values())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_where_the_host_knows_that_none_is_shared_there_is_no_room_for_it(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (8,), generator=generator).tolist()
    contexts = torch.randint(0, (10, 300, 9000)[seed % 3], (8,), generator=generator).tolist()
    plan, informed = (plan_of(lengths, contexts, device, spare=20, knows_keys=knows) for knows in (False, True))
    if plan.split_tiles[2].any():
        assert torch.equal(informed.items, plan.items)
        assert torch.equal(informed.split_tiles[2], plan.split_tiles[2])
    else:
        assert torch.equal(informed.items, plan.items[:, :-20])
        assert informed.num_places == 0


def test_long_rows_are_shared_by_as_many_programs_as_are_spare(device: torch.device) -> None:
    """One token behind a long context, alone, beside a shorter one, and beside a crowd."""
    assert plan_of([1], [32_000], device, spare=33).split_tiles[2].tolist() == [33] + [0] * 32
    both = plan_of([5, 5], [20_000, 10_000], device, spare=30).split_tiles[2].tolist()
    assert both[:3] == [20, 10, 0]
    assert not plan_of([1] * 64, [1000] * 64, device, spare=33).split_tiles[2].any()


def test_without_spare_programs_nothing_is_shared(device: torch.device) -> None:
    plan = plan_of([1, 100], [32_000, 9000], device, spare=0)
    assert plan.items[3].tolist() == [1] * 5
    assert plan.num_places == 0
