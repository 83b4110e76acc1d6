"""Prompt lookup against a plain Python reference: the search by itself, and the drafter over pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bundled import target_dir
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import ConfigError
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import PrefillChunk, SlotUpdate
from slipstream.services.draft.ngram import NgramDrafter, look_up
from slipstream.services.factory import describe_draft, describe_verify
from slipstream.services.worker.config import NGRAM, WorkerConfig
from slipstream.services.worker.epoch import EpochState
from slipstream.services.worker.future_map import NextStepState, Region
from slipstream.services.worker.slots import FlatChunks, SamplingMode, SlotTable, Staging
from tests.harness.prompt_lookup import continued
from tests.harness.workers import SharedArenas, attachment_to

TOKENS = st.integers(0, 3)
BOUNDS = st.tuples(st.integers(1, 7), st.integers(1, 7)).map(sorted)


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4),
    behind=st.integers(0, 5),
    bounds=BOUNDS,
    num_tokens=st.integers(1, 9),
)
def test_it_finds_what_a_plain_search_finds(
    rows: list[list[int]], behind: int, bounds: list[int], num_tokens: int
) -> None:
    """Columns behind a row's end hold what was there before, which is no part of it."""
    shortest, longest = bounds
    width = max(map(len, rows)) + behind
    history = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], dtype=torch.int32)
    ends = torch.tensor([len(row) - 1 for row in rows])
    found = look_up(history, ends, num_tokens, shortest=shortest, longest=longest)
    assert found.tokens.tolist() == [continued(row, num_tokens, shortest, longest) for row in rows]
    assert found.tokens.dtype == torch.int64


def test_the_longest_match_counts_and_of_equal_ones_the_last() -> None:
    def guess(shortest: int, longest: int, text: str) -> str:
        history = torch.tensor([list(text.encode())], dtype=torch.int32)
        found = look_up(history, torch.tensor([len(text) - 1]), 3, shortest=shortest, longest=longest)
        return bytes(found.tokens[0].tolist()).decode()

    assert guess(1, 3, "xabcPQR.bcSTU.abc") == "PQR"
    assert guess(1, 2, "xabcPQR.bcSTU.abc") == "STU"
    assert guess(4, 5, "xabcPQR.bcSTU.abc") == "ccc"
    # What follows a match is shorter than the draft: it is repeated.
    assert guess(2, 2, "ababab") == "aba"


def test_many_long_rows_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(0, 3, (11, 40), dtype=torch.int32, generator=generator)
    ends = torch.randint(0, 40, (11,), generator=generator)
    together = look_up(history, ends, 5, shortest=1, longest=4)
    monkeypatch.setattr("slipstream.services.draft.ngram._MOST_COLUMNS", 100)
    in_parts = look_up(history, ends, 5, shortest=1, longest=4)
    assert all(torch.equal(part, whole) for part, whole in zip(in_parts, together, strict=True))


def test_lengths_out_of_range_are_read_nowhere_else() -> None:
    """A length comes from shared memory, and is clamped to the limit, which may be the whole row."""
    history = torch.arange(8, dtype=torch.int32)[None]
    assert look_up(history, torch.tensor([8]), 4, shortest=1, longest=3).tokens.tolist() == [[7, 7, 7, 7]]
    assert look_up(history, torch.tensor([0]), 2, shortest=1, longest=20).tokens.tolist() == [[0, 0]]


@given(data=st.data(), num_draft_tokens=st.integers(1, 6), bounds=BOUNDS, page_tokens=st.sampled_from((1, 4, 16)))
def test_it_knows_what_chunks_and_stashes_bring_and_nothing_else(
    data: st.DataObject, num_draft_tokens: int, bounds: list[int], page_tokens: int
) -> None:
    """Two sequences at a time, and later others in the same slots and pages; what verify rejected is garbage."""
    arenas, drafter = SharedArenas(), NgramDrafter(*bounds, torch.device("cpu"))
    sizes = {"page_tokens": page_tokens, "num_pages": 2 * 48 // page_tokens + 1, "slot_pages": 48 // page_tokens}
    attachment = attachment_to(arenas, context_tokens=48, **sizes)
    slots = SlotTable(attachment, 8, torch.device("cpu"))
    drafter.open(EpochState(attachment, cast("Region", None), Region, slots))
    for generation in (1, 2):
        numbers = data.draw(st.permutations(range(1, sizes["num_pages"])))
        known = {slot: data.draw(st.lists(TOKENS, min_size=1, max_size=20)) for slot in (1, 3)}
        updates = [
            SlotUpdate(
                slot=slot,
                generation=generation,
                pages=tuple(numbers[place :: len(known)]),
                limit_tokens=48,
                sampling=SamplingParams(),
            )
            for place, slot in enumerate(known)
        ]
        slots.take_over(slots.changes(updates, Staging()))
        cut = data.draw(st.integers(0, 20))
        for first, end in ((0, cut), (cut, 20)):
            chunks = [
                PrefillChunk(slot=slot, start=first, tokens=tuple(tokens[first:end]), is_last=end == 20)
                for slot, tokens in known.items()
                if tokens[first:end]
            ]
            if chunks:
                drafter.prefill(FlatChunks.of(chunks, Staging()), None)
        for _ in range(3):
            new = {slot: data.draw(st.lists(TOKENS, min_size=1, max_size=num_draft_tokens + 1)) for slot in known}
            for slot, tokens in new.items():
                known[slot] += tokens
            found = drafter.propose(
                torch.tensor(list(known)),
                stash(list(known.values()), list(new.values()), num_draft_tokens),
                num_draft_tokens,
                SamplingMode.NOISE,
            )
            assert found.tolist() == [continued(tokens, num_draft_tokens, *bounds) for tokens in known.values()]
    drafter.close()
    arenas.close()


def stash(known: list[list[int]], new: list[list[int]], num_draft_tokens: int) -> NextStepState:
    """Makes the stash of sequences that have got new tokens, with garbage behind those."""
    last = [(tokens + [7] * num_draft_tokens)[: num_draft_tokens + 1] for tokens in new]
    return NextStepState(
        seq_lens=torch.tensor([len(tokens) - 1 for tokens in known]),
        bonus_tokens=torch.tensor([tokens[-1] for tokens in known]),
        num_new=torch.tensor([len(tokens) for tokens in new]),
        last_tokens=torch.tensor(last),
        hidden_states=None,
    )


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("prompt_lookup_min", {"prompt_lookup_min": 0}),
        ("prompt_lookup_max", {"prompt_lookup_max": 65}),
        ("prompt_lookup_min", {"prompt_lookup_min": 4, "prompt_lookup_max": 3}),
        ("suffix_cache_tokens", {"suffix_cache_tokens": 2**22 + 1}),
        ("suffix_cache_tokens", {"algorithm": "standalone", "model": target_dir(), "suffix_cache_tokens": 1}),
        ("model", {"model": target_dir()}),
        ("target", {"target": None}),
        ("prompt_lookup_min", {"algorithm": "standalone", "model": target_dir(), "prompt_lookup_min": 2}),
        ("prompt_lookup_max", {"algorithm": "eagle3", "model": target_dir(), "prompt_lookup_max": 2}),
        ("model", {"algorithm": "standalone"}),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_is_named(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        WorkerConfig(**{"algorithm": NGRAM, "target": target_dir(), **settings})


@pytest.mark.parametrize(("given", "expected"), [((None, None), (5, 5)), ((2, None), (2, 2)), ((None, 3), (3, 3))])
def test_a_bound_that_is_not_given_follows_the_other(
    given: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    config = WorkerConfig(algorithm=NGRAM, target=target_dir(), prompt_lookup_min=given[0], prompt_lookup_max=given[1])
    assert config.prompt_lookup == expected


def test_it_fits_the_target_and_keeps_four_bytes_of_a_token() -> None:
    device = HostDevice()
    draft = describe_draft(WorkerConfig(algorithm=NGRAM, target=target_dir(), prompt_lookup_min=2), device, 0)
    verify = describe_verify(WorkerConfig(model=target_dir()), device, 0)
    draft.check_fits(verify)
    assert (draft.algorithm, draft.model, draft.kv_bytes_per_token) == (NGRAM, "n-grams of 2 tokens", 4)
    assert draft.has_paged_kv
    assert (draft.max_context_tokens, draft.hidden_width) == (verify.max_context_tokens, 0)


def test_what_it_remembers_is_in_its_name_and_in_the_memory_plan() -> None:
    config = WorkerConfig(algorithm=NGRAM, target=target_dir(), prompt_lookup_min=1, prompt_lookup_max=3)
    plain, other = (
        describe_draft(replace(config, suffix_cache_tokens=size), HostDevice(), 0) for size in (0, 1_000_000)
    )
    assert other.model == "n-grams of 1 to 3 tokens, also in 1000000 of recent outputs"
    assert other.memory.work - plain.memory.work == 1_000_000 * (4 + 3 * 4 + 8)
