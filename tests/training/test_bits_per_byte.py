"""Bits per byte: each token of a file is scored once, with enough before it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from slipstream.training.bits_per_byte import measure, windows
from tests.harness.checkpoints import write_checkpoint


@pytest.mark.parametrize(("context", "stride"), [(8, 4), (8, 8), (8, 1), (5, 3), (64, 32)])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 10, 12, 13, 14, 40])
def test_each_token_is_scored_once(context: int, stride: int, num_tokens: int) -> None:
    file = list(range(num_tokens))
    cut = list(windows(file, context, stride))
    scored = [token for window in cut for token in window.tokens[-window.scored :]]
    assert scored == file[1:], "all but end-of-text"
    for window in cut:
        assert window.tokens == file[window.tokens[0] : window.tokens[-1] + 1], "a piece of the file"
        assert len(window.tokens) <= context + 1, "the last token is not fed"
        num_before = len(window.tokens) - window.scored
        assert window.tokens[0] == 0 or num_before >= context - stride


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("models") / "it")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_measure_is_the_mean_over_bytes(model: Any) -> None:
    files = [[256, *b"def f():"], [256, *b"x"], [256, *b"class Queue:\n    pass\n"]]
    num_bytes = sum(len(file) - 1 for file in files)
    nats = 0.0
    for file in files:
        row = torch.tensor([file])
        with torch.no_grad():
            nats += F.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum").item()
    result = measure(model, files, num_bytes, context=64, stride=32, batch=2)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert (result["tokens"], result["files"], result["bytes"]) == (num_bytes, 3, num_bytes)
    cut = measure(model, files, num_bytes, context=8, stride=4)
    assert cut["tokens"] == num_bytes
    assert cut["bits_per_byte"] != result["bits_per_byte"], "less context before some"
