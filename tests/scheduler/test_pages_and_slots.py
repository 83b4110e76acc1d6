"""Tests the allocation and release of pages and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import ResourceExhaustedError
from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.scheduler.pages import PADDING_PAGE, PrefixCache
from slipstream.scheduler.records import SlotLease
from slipstream.scheduler.slots import SlotAllocator


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_no_page_is_held_twice_and_none_is_lost(num_pages: int, turns: list[tuple[bool, int]]) -> None:
    pages, held = PrefixCache(num_pages, 4), list[tuple[int, ...]]()
    for takes, count in turns:
        free = pages.num_free
        if not takes and held:
            pages.release(held.pop(count % len(held)))
        elif count > free:
            with pytest.raises(ResourceExhaustedError, match=f"{count} KV pages wanted, {free} free"):
                pages.allocate(count)
            assert pages.num_free == free
        else:
            held.append(pages.allocate(count))
        taken = [page for part in held for page in part]
        assert len(set(taken)) == len(taken)
        assert all(PADDING_PAGE < page < num_pages for page in taken)
        assert len(taken) + pages.num_free == pages.num_pages == num_pages - 1


def test_a_page_is_given_back_once() -> None:
    pages = PrefixCache(4, 4)
    taken = pages.allocate(2)
    pages.release(taken)
    with pytest.raises(AssertionError, match="given back but was not taken"):
        pages.release(taken)


@given(st.integers(2, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_a_lease_is_current_until_it_is_given_back_and_never_again(
    num_slots: int, turns: list[tuple[bool, int]]
) -> None:
    slots, held, over = SlotAllocator(num_slots), list[SlotLease](), list[SlotLease]()
    for takes, choice in turns:
        if takes and slots.num_free:
            held.append(slots.allocate())
        elif held:
            over.append(held.pop(choice % len(held)))
            slots.release(over[-1])
        assert all(map(slots.is_current, held))
        assert not any(map(slots.is_current, over))
        assert len({lease.slot for lease in held}) == len(held)
        assert all(PADDING_SLOT < lease.slot < num_slots for lease in held)
        assert len(held) + slots.num_free == slots.num_slots == num_slots - 1


def test_a_slot_is_given_back_once_and_taken_only_when_there_is_one() -> None:
    slots = SlotAllocator(2)
    lease = slots.allocate()
    with pytest.raises(AssertionError, match="a free slot was seen before"):
        slots.allocate()
    slots.release(lease)
    with pytest.raises(AssertionError, match="generation 1 is over"):
        slots.release(lease)
    assert slots.allocate() == SlotLease(lease.slot, lease.generation + 2)
