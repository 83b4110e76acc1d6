"""The steps that take in prompts before there are any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.services.worker import rehearsal

if TYPE_CHECKING:
    from slipstream.common.worker.step import PrefillChunk, StepKind


@pytest.mark.parametrize("num_slots", [2, 9])
@pytest.mark.parametrize("chunk_tokens", [1, 20, 2048])
def test_the_largest_comes_first_and_leaves_its_memory_to_the_others(
    chunk_tokens: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, ...]] = []

    def take(role: Any, state: Any, kind: StepKind, chunks: tuple[PrefillChunk, ...]) -> None:
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
