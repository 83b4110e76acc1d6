"""Graphs of rank 0, which the other ranks capture and replay with it; recorded here in place of captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.ranks import Ranks
from slipstream.services.worker import crew, follower
from slipstream.services.worker.graphs import NoRoomForGraphError, RankedCapture
from tests.harness.checkpoints import write_checkpoint
from tests.harness.paged_model import PAGE_SIZE, PagedModel, random_tokens
from tests.harness.threaded_ranks import ranked_model


class RecordingRanks(Ranks):
    """As on a GPU: while rank 0 captures, nothing is told and no number leaves it."""

    is_capturing = is_replaying = False

    def tell(self, do: str, **arguments: Any) -> None:
        if self.is_capturing:
            self.captured.append({"do": do, **arguments})
        elif not self.is_replaying:
            super().tell(do, **arguments)

    def broadcast(self, values: torch.Tensor) -> None:
        if not self.is_capturing:
            super().broadcast(values)

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part] * self.rank.size if self.is_capturing else super()._all(part)


class Recorder:
    """Implements `Capture` for rank 0, and what others record by."""

    def __init__(self, ranks: RecordingRanks | None = None) -> None:
        self._ranks = ranks

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        ranks = self._ranks
        assert ranks is not None, "of rank 0"
        work()
        ranks.is_capturing = True
        work()
        ranks.is_capturing = False

        def replay() -> None:
            ranks.is_replaying = True
            work()
            ranks.is_replaying = False

        return replay

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class FullRecorder(Recorder):
    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory: no graph")


class Step:
    """Work over a batch that changes from replay to replay, in place."""

    def __init__(self, model: PagedModel, batch: ForwardBatch) -> None:
        self._model, self._batch = model, batch
        self.logits = torch.zeros(0)

    def fill(self, tokens: list[int], start: int) -> None:
        self._batch.tokens.copy_(torch.tensor([tokens]))
        self._batch.positions.copy_(start + torch.arange(len(tokens))[None])

    def work(self) -> None:
        self.logits = self._model.run(self._batch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "it", seed=6, has_tokenizer=False)


def test_a_replay_runs_on_all_ranks_with_what_is_there_by_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "Ranks", RecordingRanks)
    monkeypatch.setattr(follower, "CudaCapture", Recorder)
    whole, prompt = PagedModel(path), random_tokens(24, seed=8)
    expected = whole.prefill(prompt, chunk=4)
    with ranked_model(path, 2) as model:
        ranks = model.decoder.ranks
        assert isinstance(ranks, RecordingRanks)
        for _ in range(2):  # the second time in another epoch
            step = Step(model, model.batch([(0, [0] * 4)], first_row=0))
            capture = RankedCapture(Recorder(ranks), ranks)
            replay = capture.capture(step.work)
            assert capture.capture(lambda: None)() is None, "what is rank 0's alone is no graph of the others"
            for start in range(0, len(prompt), 4):
                step.fill(prompt[start : start + 4], start)
                replay()
                torch.testing.assert_close(step.logits[0], expected[start : start + 4], atol=1e-4, rtol=0)
            ranks.ask("close")
            ranks.ask("open", num_pages=model.cache.num_pages, page_tokens=PAGE_SIZE)


def test_a_rank_without_room_for_a_graph_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "Ranks", RecordingRanks)
    monkeypatch.setattr(follower, "CudaCapture", FullRecorder)
    with ranked_model(path, 2) as model:
        ranks = model.decoder.ranks
        assert isinstance(ranks, RecordingRanks)
        step = Step(model, model.batch([(0, [0] * 4)]))
        with pytest.raises(NoRoomForGraphError, match="no graph"):
            RankedCapture(Recorder(ranks), ranks).capture(step.work)
        step.work()
