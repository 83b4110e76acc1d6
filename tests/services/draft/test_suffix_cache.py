"""What prompt lookup remembers of outputs, against a plain Python reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.services.draft.ngram import look_up
from slipstream.services.draft.suffix_cache import NewTokens, SuffixCache
from tests.harness.prompt_lookup import PlainSuffixCache, match_length

CPU = torch.device("cpu")
LIMIT = 60
BOUNDS = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


@dataclass
class Text:
    """A sequence in a slot."""

    tokens: list[int]
    is_shared: bool = True
    limit: int = LIMIT
    piece: object = field(default_factory=object)


def step(
    cache: SuffixCache, texts: dict[int, Text], num_new: dict[int, int], bounds: tuple[int, int], num_tokens: int
) -> dict[int, list[int]]:
    """Records what the last step brought, with garbage behind it and a row of padding; returns the guesses by slot."""
    rows = [*num_new, 0]
    texts = {**texts, 0: Text([1], limit=0)}
    history = torch.tensor([(texts[row].tokens + [1] * LIMIT)[:LIMIT] for row in rows], dtype=torch.int32)
    last = [texts[row].tokens[-num_new.get(row, 1) :] for row in rows]
    ends = torch.tensor([len(texts[row].tokens) - 1 for row in rows])
    new = NewTokens(
        rows=torch.tensor(rows),
        ends=ends,
        num_new=torch.tensor([num_new.get(row, 1) for row in rows]),
        tokens=torch.tensor([(tokens + [2] * num_tokens)[: num_tokens + 1] for tokens in last]),
        limits=torch.tensor([texts[row].limit for row in rows]),
        are_shared=torch.tensor([texts[row].is_shared for row in rows]),
    )
    cache.record(new, history)
    own = look_up(history, ends, num_tokens, shortest=bounds[0], longest=bounds[1])
    guesses = cache.improve(own, new, history)
    assert guesses.dtype == torch.int64
    return dict(zip(num_new, guesses.tolist(), strict=False))


@given(seed=st.integers(0, 2**32), size=st.integers(13, 60), bounds=BOUNDS, num_tokens=st.integers(1, 3))
def test_it_finds_what_a_plain_search_finds(seed: int, size: int, bounds: list[int], num_tokens: int) -> None:
    """Three sequences at a time, and later others in their slots; some take no part in a step, or miss one."""
    rng, shortest, longest = random.Random(seed), *bounds
    cache, reference = SuffixCache(size, 4, (shortest, longest), CPU), PlainSuffixCache(size)
    texts: dict[int, Text] = {}
    for _ in range(20):
        for slot in (1, 2, 3):
            if slot not in texts or len(texts[slot].tokens) > LIMIT - 5 or rng.random() < 0.1:
                prompt = rng.choices(range(3), k=rng.randrange(1, 12))
                limit = rng.choice((LIMIT, LIMIT, len(prompt) + 3))
                texts[slot] = Text(prompt, is_shared=rng.random() < 0.8, limit=limit)
                cache.interrupt(torch.tensor([slot]))
            elif rng.random() < 0.1:
                texts[slot].tokens += rng.choices(range(3), k=2)
                texts[slot].piece = object()
        num_new = {slot: rng.randrange(1, num_tokens + 2) for slot in rng.sample((1, 2, 3), k=rng.randrange(1, 4))}
        for slot, count in num_new.items():
            text = texts[slot]
            text.tokens += rng.choices(range(3), k=count)
            kept = max(0, min(count, text.limit - len(text.tokens) + count))
            if text.is_shared:
                reference.record(text.tokens[: len(text.tokens) - count + kept], kept, text.piece)
        found = step(cache, texts, num_new, (shortest, longest), num_tokens)
        for slot, guesses in found.items():
            plain = reference if texts[slot].is_shared else PlainSuffixCache(1)
            assert guesses == plain.continued(texts[slot].tokens, num_tokens, shortest, longest)


def test_the_own_text_wins_over_an_equally_long_match() -> None:
    cache = SuffixCache(64, 4, (1, 3), CPU)
    other, own = Text([1, 2, 3, 7, 7]), Text([9, 2, 3, 8, 8, 2, 3])
    step(cache, {1: other}, {1: 2}, (1, 3), 2)
    assert match_length(own.tokens, 1, 3) == 2
    assert step(cache, {2: own}, {2: 1}, (1, 3), 2) == {2: [8, 8]}
    longer = Text([9, 2, 3, 8, 8, 1, 2, 3])
    assert step(cache, {3: longer}, {3: 1}, (1, 3), 2) == {3: [7, 7]}


def test_what_follows_a_match_ends_with_its_output() -> None:
    """Also where the next sequence in the slot goes on at the same position."""
    cache, bounds = SuffixCache(64, 4, (2, 2), CPU), (2, 2)
    step(cache, {1: Text([9, 1, 2, 3])}, {1: 3}, bounds, 3)
    cache.interrupt(torch.tensor([1]))
    step(cache, {1: Text([5, 5, 6, 6, 7])}, {1: 1}, bounds, 3)
    assert step(cache, {2: Text([9, 1])}, {2: 1}, bounds, 3) == {2: [2, 3, 2]}


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_sequence_with_a_salt_gives_nothing_and_gets_nothing(is_shared: bool) -> None:
    cache, bounds = SuffixCache(64, 4, (2, 3), CPU), (2, 3)
    step(cache, {1: Text([1, 2, 3, 4, 5], is_shared=is_shared)}, {1: 3}, bounds, 3)
    same = Text([1, 2])
    assert step(cache, {2: same}, {2: 1}, bounds, 3) == {2: [3, 4, 5] if is_shared else [2, 2, 2]}
    step(cache, {1: Text([1, 2, 3, 4, 5])}, {1: 3}, bounds, 3)
    same.is_shared = is_shared
    assert step(cache, {2: same}, {2: 1}, bounds, 3) == {2: [3, 4, 5] if is_shared else [2, 2, 2]}


def test_what_is_read_and_written_stays_in_range_whatever_the_stash_says() -> None:
    """Lengths come from shared memory: they are in their ranges, and may not fit each other."""
    cache = SuffixCache(8, 2, (1, 2), CPU)
    for end, num_new in ((0, 4), (LIMIT, 1), (LIMIT, 4), (2, 4)):
        history = torch.ones(1, LIMIT, dtype=torch.int32)
        new = NewTokens(
            rows=torch.tensor([1]),
            ends=torch.tensor([end]),
            num_new=torch.tensor([num_new]),
            tokens=torch.ones(1, 4, dtype=torch.int64),
            limits=torch.tensor([LIMIT]),
            are_shared=torch.tensor([True]),
        )
        cache.record(new, history)
        own = look_up(history, new.ends, 3, shortest=1, longest=2)
        assert cache.improve(own, new, history).tolist() == [[1, 1, 1]]
