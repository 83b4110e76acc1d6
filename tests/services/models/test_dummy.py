"""Random weights: a model from config.json alone, the same each time, whose numbers keep their size."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.services.models import checkpoint
from slipstream.services.models.checkpoint import LoadFormat, load_decoder, load_head
from slipstream.services.models.head_config import EAGLE3
from tests.harness.checkpoints import FAMILIES, LLAMA, VOCAB_SIZE, write_json
from tests.harness.eagle3_checkpoints import AUTHORS, DRAFT_VOCAB_SIZE, write_head
from tests.harness.paged_model import CPU, PagedModel

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.services.models.decoder import Decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Returns the logits of a prompt of 40 different tokens."""
    model = PagedModel(decoder)
    return model.run(model.batch([(0, list(range(3, 43)))]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_of_config_json_alone(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_json(tmp_path / "config.json", FAMILIES[family] | {"num_hidden_layers": 8})
    caplog.set_level(logging.DEBUG, checkpoint.__name__)
    first, again = (
        load_decoder(tmp_path, device=CPU, dtype=torch.float32, load_format=LoadFormat.DUMMY) for _ in range(2)
    )
    logits = logits_of(first)
    assert torch.equal(logits, logits_of(again))
    assert 0.3 < logits.std().item() < 3
    assert len(set(logits[0].argmax(dim=1).tolist())) > 10
    assert caplog.records[-1].getMessage() == "loading: 100 %"


def test_a_head_of_config_json_alone(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", layout=AUTHORS)
    (path / "model.safetensors").unlink()
    head = load_head(EAGLE3, path, target=None, device=CPU, dtype=torch.float32, load_format=LoadFormat.DUMMY)
    logits = head.logits(torch.randn(3, LLAMA["hidden_size"], generator=torch.Generator().manual_seed(1)))
    ids = head.token_ids
    assert len(set(ids.tolist())) == DRAFT_VOCAB_SIZE
    assert 0 <= int(ids.min()) <= int(ids.max()) < VOCAB_SIZE
    assert logits[:, ids].isfinite().all()
    assert logits.isfinite().sum() == 3 * DRAFT_VOCAB_SIZE
