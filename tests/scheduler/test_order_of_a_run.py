"""The order of real runs, from their logs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.common.wire.step import FenceName
from slipstream.services.draft.engine import DraftEngine
from slipstream.services.worker.epoch import EpochState
from slipstream.services.worker.future_map import NextStepState
from slipstream.services.worker.slots import FlatChunks, SamplingMode
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.random_choice import RandomChoice
from tests.harness.seeded_jobs import make_jobs
from tests.ordering.replay import Replay, Report


class HiddenDrafter:
    """Implements `Drafter` by a guess that depends on the target's hidden states and on nothing else."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.states: list[torch.Tensor] = []

    def open(self, state: EpochState) -> None:
        """See `Drafter.open`."""

    def close(self) -> None:
        """See `Drafter.close`."""

    def prefill(self, chunks: FlatChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`."""
        assert hidden is not None
        assert len(hidden) == len(chunks.tokens)

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """See `Drafter.propose`."""
        assert stash.hidden_states is not None
        last = stash.hidden_states[torch.arange(len(rows)), stash.num_new - 1]
        self.states.append(last.clone())
        guess = (last.abs().sum(dim=1) * 1000).to(torch.int64) % self._vocab_size
        return guess[:, None].repeat(1, num_tokens)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_draft_that_reads_hidden_states(
    models: Models, reference: list[list[int]], tmp_path: Path, run_ahead: int
) -> None:
    verify = models.verify.description
    drafter = HiddenDrafter(verify.vocab_size)
    head = DraftEngine(drafter, replace(models.draft.description, hidden_width=verify.hidden_width))
    served = Served(
        Models(models.verify, head, head), Way(num_draft_tokens=2, run_ahead=run_ahead, slots=2), log_dir=tmp_path
    )
    assert served.run(make_jobs()) == reference
    states = torch.cat(drafter.states)
    assert states.shape[1] == verify.hidden_width
    assert states.unique(dim=0).shape[0] > 20, "each step's own"
    report = Replay(tmp_path).report()
    assert not report.races
    assert not report.stuck


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reads_hidden", [False, True], ids=["language model", "head"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_drafts_that_rest_and_come_back(
    models: Models, reference: list[list[int]], tmp_path: Path, run_ahead: int, reads_hidden: bool
) -> None:
    """No token changes, and what a draft reads and writes is in order with the steps before and after its rest."""
    if reads_hidden:
        verify = models.verify.description
        description = replace(models.draft.description, hidden_width=verify.hidden_width)
        head = DraftEngine(HiddenDrafter(verify.vocab_size), description)
        models = Models(models.verify, head, head)
    served = Served(models, Way(num_draft_tokens=2, run_ahead=run_ahead, slots=2), log_dir=tmp_path)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choice, epoch = RandomChoice(random.Random(seed), changes=0.3), served.epoch.epoch
    epoch.choice = epoch.speculation._choice = choice
    assert served.run(make_jobs()) == reference
    assert choice.num_rests > 0
    report = Replay(tmp_path).report()
    assert not report.races
    assert not report.stuck


class TestReplay:
    """The order of a real run, from its logs."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("run_ahead", [0, 1, 2])
    def test_nothing_collides(self, models: Models, tmp_path: Path, run_ahead: int) -> None:
        report = self._report(models, tmp_path, Way(num_draft_tokens=2, run_ahead=run_ahead, slots=2))
        assert not report.races
        assert not report.stuck
        assert report.num_logs == 3
        assert report.num_ordered > 100

    def test_without_the_wait_for_the_draft_its_tokens_collide(self, models: Models, tmp_path: Path) -> None:
        report = self._report(models, tmp_path, Way(num_draft_tokens=2), strip=FenceName.DRAFT_PROPOSED)
        texts = list(map(str, report.races))
        assert any(
            "draft's write of draft_tokens" in text and "verify's read of draft_tokens" in text for text in texts
        )

    def test_without_the_wait_for_the_stash_its_rows_collide(self, models: Models, tmp_path: Path) -> None:
        way = Way(num_draft_tokens=2, debug=False)
        report = self._report(models, tmp_path, way, strip=FenceName.VERIFY_STASH)
        for name in ("seq_lens", "bonus_tokens", "num_new", "last_tokens"):
            assert _names(report, f"verify's write of {name}", f"draft's read of {name}")

    def _report(self, models: Models, folder: Path, way: Way, strip: FenceName | None = None) -> Report:
        Served(models, way, log_dir=folder, strip=strip).run(make_jobs(4))
        return Replay(folder).report()


def _names(report: Report, *accesses: str) -> bool:
    """Returns whether one of the races is between these."""
    return any(all(access in str(race) for access in accesses) for race in report.races)
