"""Steps that draft none while prompts wait: the draft takes in what comes of them, and guesses behind them as ever."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.records import Step
from slipstream.services.draft.engine import Drafter
from slipstream.services.worker.epoch import EpochState
from slipstream.services.worker.future_map import NextStepState
from slipstream.services.worker.slots import SamplingMode
from tests.harness.inline_device import InlineDevice
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import local_workers
from tests.ordering.replay import Replay
from tests.scheduler.test_graphed_steps import DRAFTS, Checkpoints, checkpoints, make_config, make_jobs, roles
from tests.scheduler.test_loop import metric

pytestmark = pytest.mark.sampled_module(2)

__all__ = ["checkpoints"]

Guesses = dict[tuple[int, int, int], set[tuple[int, ...]]]
"""By length of the prompt, and position and id of the token that they follow. Of two requests these differ."""


class _Recording:
    """A drafter whose guesses are kept."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.guesses: Guesses = defaultdict(set)
        self.num_without = 0
        """Slots that it was to draft none for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def open(self, state: EpochState) -> None:
        self._slots = state.slots
        self._drafter.open(state)

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        found = self._drafter.propose(rows, stash, num_tokens, mode)
        prompts = self._slots.prompt_tokens[rows]
        columns = [values.tolist() for values in (rows, prompts, stash.seq_lens, stash.bonus_tokens, found)]
        for row, prompt, seq_len, bonus, guess in zip(*columns, strict=True):
            if row != PADDING_SLOT and num_tokens == 1:
                self.num_without += 1
            elif row != PADDING_SLOT:
                self.guesses[prompt, seq_len, bonus].add(tuple(guess))
        return found


def _serve(
    checkpoints: Checkpoints, draft: str, device: Device, log_dir: Path | None = None, **settings: Any
) -> tuple[list[list[int]], _Recording]:
    verify, drafting = cast("list[Any]", roles(checkpoints, draft, device, None))
    recording = drafting._drafter = _Recording(drafting._drafter)
    jobs = make_jobs()
    with local_workers(verify, drafting, log_dir=log_dir, device=device) as workers:
        outputs = LocalEpoch(1, make_config(access_log_dir=log_dir, **settings), workers).run(jobs)
    return [outputs[job] for job in jobs], recording


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("tiny_small_steps")
@pytest.mark.parametrize("device", [HostDevice, InlineDevice], ids=["host", "graphs"])
@pytest.mark.parametrize("draft", DRAFTS[1:])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_guesses_behind_steps_that_draft_none_are_those_of_a_request_alone(
    checkpoints: Checkpoints, tmp_path: Path, draft: str, device: type[Any], run_ahead: int
) -> None:
    expected, apart = _serve(checkpoints, draft, HostDevice(), slots=1)
    outputs, together = _serve(
        checkpoints, draft, device(), tmp_path, run_ahead=run_ahead, slots=6, max_batched_tokens=9
    )
    assert outputs == expected
    assert apart.num_without == 0
    assert together.num_without > 5
    both = together.guesses.keys() & apart.guesses.keys()
    assert len(both) > 20
    # A suffix cache guesses from what others have said by then.
    assert draft == "ngram" or all(together.guesses[key] <= apart.guesses[key] for key in both)
    report = Replay(tmp_path).report()
    assert not report.races
    assert not report.stuck


@pytest.mark.usefixtures("tiny_small_steps")
def test_metrics_and_what_chooses_draft_tokens_tell_such_steps_apart(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Step] = []
    monkeypatch.setattr(DraftChoice, "took", lambda _, step, *__, **___: told.append(step))
    device = HostDevice()
    with local_workers(*roles(checkpoints, "standalone", device, None), device=device) as workers:
        epoch = LocalEpoch(1, make_config(fixed_draft_tokens=None, slots=6, max_batched_tokens=9), workers)
        epoch.run(make_jobs())
    assert told
    assert not any(step.chunks for step in told), "their time is that of prompts"
    num_without = metric(epoch, 'slipstream_decode_steps_total{mode="drafted_none"}')
    assert num_without == epoch.epoch.decodes.num_drafting_none > 0
    num_others = sum(len(epoch.epoch.decodes.last(number, 1000)) for number in (0, epoch.attachments[0].number))
    assert epoch.epoch.decodes.position == num_others
