"""Heads sample from their own ids only where the target has all of these."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from slipstream.services.draft.drafters import HeadDrafter
from slipstream.services.models.checkpoint import load_head
from slipstream.services.worker.epoch import EpochState
from tests.harness.checkpoints import VOCAB_SIZE
from tests.harness.eagle3_checkpoints import ALGORITHMS, write_head

CPU = torch.device("cpu")


@pytest.mark.parametrize(("vocab_size", "has_all"), [(VOCAB_SIZE, True), (VOCAB_SIZE // 2, False)])
def test_ids_that_the_target_lacks(
    vocab_size: int, has_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = "authors"
    head = load_head(
        ALGORITHMS[layout], write_head(tmp_path, layout=layout), target=None, device=CPU, dtype=torch.float32
    )
    monkeypatch.setattr(head, "samples_own_ids", True)  # as on a GPU, where ids ascend
    drafter = HeadDrafter(head, CPU, torch.float32)
    monkeypatch.setattr(drafter._slots, "open", lambda state: None)
    monkeypatch.setattr(drafter._slots, "warm_up", lambda: ())
    state = SimpleNamespace(
        attachment=SimpleNamespace(shape=SimpleNamespace(num_slots=2, num_draft_tokens=2)),
        region=SimpleNamespace(shape=SimpleNamespace(hidden_width=1)),
        slots=SimpleNamespace(vocab_size=vocab_size),
        weights={},
    )
    drafter.open(cast("EpochState", state))
    assert drafter._samples_own_ids == has_all
