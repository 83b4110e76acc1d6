"""Tests the prefix cache: who finds which page, who may wait for one, and which one goes first."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import ResourceExhaustedError
from slipstream.scheduler.pages import PrefixCache
from slipstream.scheduler.records import NO_DRAFT, DraftKV, Prefix

PAGE_TOKENS = 2
MODEL, HEAD = DraftKV(7), DraftKV(8, tokens_ahead=1)


def row(*tokens: int) -> np.ndarray:
    """The tokens of a slot, with some behind them that mean nothing."""
    return np.array([*tokens, -1, -1], np.int32)


def fill(cache: PrefixCache, *tokens: int, draft: DraftKV = NO_DRAFT, salt: str = "") -> tuple[int, ...]:
    """Runs a prompt through the cache, up to where the draft needs more of it; returns the pages that it had."""
    prefix = Prefix(salt, PAGE_TOKENS)
    found = cache.begin(prefix, row(*tokens), len(tokens), draft, ())
    assert found is not None, "it waits for none"
    pages = (*found, *cache.allocate(-(-len(tokens) // PAGE_TOKENS) - len(found)))
    cache.keep(prefix, pages, row(*tokens), len(tokens) - max(1, draft.tokens_ahead))
    cache.release(pages)
    return pages


def found(cache: PrefixCache, *tokens: int, draft: DraftKV = NO_DRAFT, salt: str = "") -> tuple[int, ...]:
    """The pages that a prompt begins with; gives them back."""
    pages = cache.begin(Prefix(salt, PAGE_TOKENS), row(*tokens), len(tokens), draft, ())
    assert pages is not None, "it waits for none"
    cache.release(pages)
    return tuple(pages)


def test_a_page_is_found_by_all_tokens_up_to_its_end_and_the_salt() -> None:
    cache = PrefixCache(20, PAGE_TOKENS)
    pages = fill(cache, 1, 2, 3, 4, 5)
    assert found(cache, 1, 2, 3, 4, 9) == pages[:2]
    assert found(cache, 1, 2, 3, 4) == pages[:1], "the last token is computed in any case"
    for num_tokens, num_found in ((5, 4), (4, 2), (1, 0)):
        assert cache.touch(Prefix("", PAGE_TOKENS), row(1, 2, 3, 4, 5), num_tokens) == num_found
    assert found(cache, 1, 2, 9, 4, 5) == pages[:1]
    assert found(cache, 9, 2, 3, 4, 5) == found(cache, 3, 4, 5) == ()
    assert found(cache, 1, 2, 3, 4, 5, salt="a tenant") == ()
    assert fill(cache, 1, 2, 3, 4, 5, salt="a tenant")[0] not in pages[:2]
    disabled = PrefixCache(20, PAGE_TOKENS, is_enabled=False)
    fill(disabled, 1, 2, 3, 4, 5)
    assert (found(disabled, 1, 2, 3), disabled.num_cached) == ((), 0)


def test_a_page_is_for_the_draft_that_filled_it_and_for_none() -> None:
    cache = PrefixCache(20, PAGE_TOKENS)
    without = fill(cache, 1, 2, 3)
    assert found(cache, 1, 2, 3, draft=MODEL) == ()
    of_model = fill(cache, 1, 2, 3, draft=MODEL)
    assert of_model[0] != without[0]
    assert found(cache, 1, 2, 9, draft=MODEL) == found(cache, 1, 2, 9) == of_model[:1]
    assert found(cache, 1, 2, 3, draft=MODEL._replace(attachment=9)) == ()
    assert fill(cache, 1, 2, 3)[0] == of_model[0], "which serves more"
    unpaged = DraftKV(10, is_paged=False)
    fill(cache, 5, 6, 7, draft=unpaged)
    assert found(cache, 5, 6, 7, draft=unpaged) == ()
    assert found(cache, 5, 6, 7) != ()
    assert cache.num_free == cache.num_pages


def test_a_heads_page_is_for_the_token_behind_it() -> None:
    cache = PrefixCache(20, PAGE_TOKENS)
    before = fill(cache, 1, 2, 3, draft=HEAD)
    assert found(cache, 1, 2, 3, draft=HEAD) == before[:1]
    assert found(cache, 1, 2, 4, draft=HEAD) == ()
    after = fill(cache, 1, 2, 4, draft=HEAD)
    assert found(cache, 1, 2, 4, draft=HEAD) == after[:1]
    assert found(cache, 1, 2, 3, draft=HEAD) == (), "the last one has taken its place"
    assert (cache.num_cached, cache.num_free) == (1, cache.num_pages)


def test_a_page_of_several_modules_is_for_as_many_tokens_behind_it() -> None:
    cache, modules = PrefixCache(20, PAGE_TOKENS), DraftKV(9, tokens_ahead=3)
    before = fill(cache, 1, 2, 3, 4, 5, 6, draft=modules)
    assert found(cache, 1, 2, 3, 4, 5, draft=modules) == before[:1]
    assert found(cache, 1, 2, 3, 4, 6, draft=modules) == found(cache, 1, 2, 3, 4, draft=modules) == ()
    assert found(cache, 1, 2, 3, 4, 6) == before[:1], "the target's depend on the tokens in it alone"


def test_a_sequence_waits_for_pages_that_another_one_is_filling() -> None:
    cache, first, second = PrefixCache(20, PAGE_TOKENS), Prefix("", PAGE_TOKENS), Prefix("", PAGE_TOKENS)
    tokens = row(1, 2, 3, 4, 5)
    assert cache.begin(first, tokens, 5, NO_DRAFT, ()) == []
    assert len(first.filling) == 2
    assert cache.begin(second, tokens, 5, NO_DRAFT, first.filling) is None
    assert cache.begin(second, row(1, 2), 2, NO_DRAFT, first.filling) == [], "it has no full page to wait for"
    pages = cache.allocate(3)
    cache.keep(first, pages, tokens, 3)
    assert cache.begin(second, tokens, 5, NO_DRAFT, first.filling) is None
    cache.keep(first, pages, tokens, 4)
    assert first.filling == []
    assert cache.begin(second, tokens, 5, NO_DRAFT, first.filling) == list(pages[:2])
    assert second.filling == []


def test_the_least_recently_used_page_goes_first_and_a_sequences_last_page_before_its_first() -> None:
    cache = PrefixCache(7, PAGE_TOKENS)
    old, new = fill(cache, 1, 2, 3, 4, 5), fill(cache, 6, 7, 8, 9, 10)
    assert cache.num_free == 6
    held = cache.allocate(2)
    assert not {*held} & {*old[:2], *new[:2]}, "pages without content go before all others"
    assert found(cache, 1, 2, 3, 4, 5) == old[:2]
    assert cache.allocate(1) == (new[1],)
    assert cache.allocate(1) == (new[0],)
    assert cache.allocate(1) == (old[1],)
    assert found(cache, 1, 2, 3, 4, 5) == old[:1]
    with pytest.raises(ResourceExhaustedError, match="2 KV pages wanted, 1 free"):
        cache.allocate(2)
    assert cache.num_cached == 1


def test_pages_in_use_are_not_evicted_and_those_that_are_dropped_are_not_found() -> None:
    cache = PrefixCache(4, PAGE_TOKENS)
    fill(cache, 1, 2, 3, 4, 5)
    pages = cache.begin(Prefix("", PAGE_TOKENS), row(1, 2, 3, 4, 5), 5, NO_DRAFT, ())
    assert pages is not None
    assert cache.num_free == 1
    again = cache.begin(Prefix("", PAGE_TOKENS), row(1, 2, 3, 4, 5), 5, NO_DRAFT, ())
    assert again == pages
    cache.release(again)
    assert cache.num_free == 1
    cache.drop(pages)
    assert found(cache, 1, 2, 3, 4, 5) == ()
    cache.release(pages)
    assert (cache.num_free, cache.num_cached) == (3, 0)
    with pytest.raises(AssertionError, match="given back but was not taken"):
        cache.release(pages)


@given(st.integers(2, 30), st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 1), max_size=9)), max_size=60))
def test_no_page_is_lost_or_has_two_owners_but_for_the_same_tokens(
    num_pages: int, turns: list[tuple[int, list[int]]]
) -> None:
    cache, held = PrefixCache(num_pages, PAGE_TOKENS), list[tuple[tuple[int, ...], list[int]]]()
    content: dict[int, list[int]] = {}
    """By page: the tokens up to its end."""
    for choice, ending in turns:
        if choice < 3 and held:
            pages, _ = held.pop(choice % len(held))
            cache.release(pages)
            continue
        tokens, prefix = [0, *ending], Prefix("", PAGE_TOKENS)
        begun = cache.begin(prefix, row(*tokens), len(tokens), NO_DRAFT, ())
        assert begun is not None
        for number, page in enumerate(begun, start=1):
            assert content[page] == tokens[: number * PAGE_TOKENS]
        count = -(-len(tokens) // PAGE_TOKENS) - len(begun)
        if count > cache.num_free:
            cache.release(begun)
            continue
        pages = (*begun, *cache.allocate(count))
        content |= {page: tokens[: number * PAGE_TOKENS] for number, page in enumerate(pages, start=1)}
        cache.keep(prefix, pages, row(*tokens), len(tokens) - 1)
        held.append((pages, tokens))
        assert cache._references == Counter(page for one, _ in held for page in one)
        assert cache.num_free + len(cache._references) == cache.num_pages
    for pages, _ in held:
        cache.release(pages)
    assert cache.num_free == cache.num_pages
