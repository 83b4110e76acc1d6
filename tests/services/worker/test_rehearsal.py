"""The steps that take in prompts before there are any."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import PrefillChunk
from slipstream.scheduler.sizes import BatchSizes
from slipstream.services.worker import rehearsal
from slipstream.services.worker.graphs import with_padding


@pytest.mark.parametrize("num_slots", [2, 9])
@pytest.mark.parametrize("chunk_tokens", [1, 20, 2048])
def test_the_largest_comes_first_and_leaves_its_memory_to_the_others(
    chunk_tokens: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, ...]] = []

    def take(role: Any, state: Any, chunks: tuple[PrefillChunk, ...]) -> None:
        assert len({chunk.slot for chunk in chunks}) == len(chunks) < num_slots
        steps.append(tuple(len(chunk.tokens) for chunk in chunks))

    monkeypatch.setattr(rehearsal, "rehearse", take)
    shape = SimpleNamespace(chunk_tokens=chunk_tokens, num_slots=num_slots)
    state: Any = SimpleNamespace(attachment=SimpleNamespace(shape=shape))
    rehearsal.rehearse_prompts(None, state)  # type: ignore[arg-type]
    sizes = [sum(step) for step in steps]
    assert sizes == sorted(set(sizes), reverse=True)
    assert (sizes[0], sizes[-1]) == (chunk_tokens, 1)
    assert {len(step) for step in steps} == ({1, 2} if num_slots > 2 and chunk_tokens > 1 else {1})


@pytest.mark.parametrize("num_slots", [2, 3, 9])
@pytest.mark.parametrize("chunk_tokens", [1, 20, 2048])
def test_mixed_steps_have_every_size_and_every_way_to_sample(
    chunk_tokens: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    sizes: list[int] = []
    modes: list[tuple[int, SamplingParams, int | None]] = []

    def take(role: Any, state: Any, chunks: tuple[PrefillChunk, ...], **how: Any) -> None:
        (chunk,) = chunks
        assert chunk.is_last
        assert sorted({*how["slots"], chunk.slot})[-1] == chunk.slot == num_slots - 1
        rows.append(len(how["slots"]))
        sizes.append(len(chunk.tokens))
        modes.append((rows[-1], how["sampling"], how["top_logprobs"]))

    monkeypatch.setattr(rehearsal, "rehearse", take)
    shape = SimpleNamespace(chunk_tokens=chunk_tokens, num_slots=num_slots, num_draft_tokens=4)
    state: Any = SimpleNamespace(attachment=SimpleNamespace(shape=shape))
    rehearsal.rehearse_mixed(None, state)  # type: ignore[arg-type]
    most = num_slots - 2
    if not most:
        assert rows == []
        return
    assert (rows[0], min(sizes), max(sizes)) == (most, 1, max(1, chunk_tokens - 1))
    assert sizes[0] == max(1, chunk_tokens - most)
    assert {1, most} <= set(rows) <= set(range(1, most + 1))
    kinds = {(sampling.adjusts_logits, sampling.is_plain) for _, sampling, _ in modes}
    assert kinds == {(True, False), (False, False), (False, True)}
    assert len({mode for mode in modes if mode[0] == most}) == 6, "with logprobs and without"
    assert modes[-1][1].is_plain, "a slot is left without penalties"


@pytest.mark.parametrize(
    ("num_slots", "num_draft_tokens", "chunk_tokens", "shared_tokens"),
    [
        (17, 3, 8, 8),
        (9, 7, 12, 12),
        (2, 4, 64, 64),
        (17, 0, 100, 100),
        (34, 15, 256, 64),
        (101, 4, 700, 700),
        (257, 4, 512, 32),
    ],
)
def test_no_step_of_the_scheduler_has_a_size_that_was_not_rehearsed(
    num_slots: int, num_draft_tokens: int, chunk_tokens: int, shared_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    def size_of(chunks: Sequence[PrefillChunk], beside: int) -> int:
        padded = with_padding(chunks, chunk_tokens, beside=beside)
        return beside + sum(len(chunk.tokens) for chunk in padded)

    rehearsed: set[int] = set()

    def take(role: Any, state: Any, chunks: tuple[PrefillChunk, ...], **how: Any) -> None:
        assert all(chunk.tokens for chunk in chunks)
        rehearsed.add(size_of(chunks, (how.get("num_draft_tokens", 0) + 1) * len(how.get("slots", ()))))

    monkeypatch.setattr(rehearsal, "rehearse", take)
    shape = SimpleNamespace(chunk_tokens=chunk_tokens, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
    role: Any = None
    state: Any = SimpleNamespace(attachment=SimpleNamespace(shape=shape))
    rehearsal.rehearse_prompts(role, state)
    for most in (num_draft_tokens, 0):
        rehearsal.rehearse_mixed(role, state, most)
    sizes = BatchSizes(
        num_slots=num_slots,
        num_pages=2,
        page_tokens=16,
        chunk_tokens=chunk_tokens,
        num_draft_tokens=num_draft_tokens,
        run_ahead=1,
        shared_chunk_tokens=shared_tokens,
    )
    # One slot at least has a prompt.
    for num_decoded in {width * rows for width in (1, num_draft_tokens + 1) for rows in range(num_slots - 1)}:
        for num_tokens in range(1, sizes.room_for_prompts(num_decoded) + 1):
            chunk = PrefillChunk(slot=1, start=0, tokens=(0,) * num_tokens, is_last=True)
            assert size_of([chunk], num_decoded) in rehearsed, (num_decoded, num_tokens)
