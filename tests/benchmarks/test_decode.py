"""Decode steps are measured with each drafter, and their bytes counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.benchmarks.decode import DecodeBenchmark, StepBytes, measure
from slipstream.benchmarks.decode_report import ONE, THREE, Measurement
from slipstream.benchmarks.model_shapes import SHAPES
from slipstream.benchmarks.models import EAGLE, EAGLE3, MTP, NGRAM, STANDALONE, Setup

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {
    "vocab_size": 4096,
    "eos_token_id": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}
"""Sizes of a small pair of models, in place of those of Llama-3.1-8B and its drafts."""
LAYER, OUTPUT = 218_112_000, 128_256 * 4096
"""Parameters of a layer of Llama-3.1-8B, with two norms, and of its output."""
FUSING = 2 * 4096 * 4096
LLAMA_1B = 1_235_814_400
"""Parameters of Llama-3.2-1B, whose embedding is its output, too."""
KV_BYTES = 2 * 2 * 8 * 128
"""Bytes of the keys and values of a token in one layer of Llama-3.1-8B, in bfloat16."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "algorithm", "draft", "parameters", "kv_bytes"),
    [
        ("llama-3.1-8b-standalone", STANDALONE, "standalone-llama-3.1-8b", 4 * LLAMA_1B, 4 * 16 * 2 * 2 * 8 * 64),
        ("llama-3.1-8b-eagle", EAGLE, "eagle-llama-3.1-8b", 4 * (LAYER + FUSING + OUTPUT), 4 * KV_BYTES),
        ("llama-3.1-8b-mtp", MTP, "mtp-llama-3.1-8b", 4 * (LAYER + FUSING + OUTPUT), 4 * KV_BYTES),
        ("llama-3.1-8b-ngram", NGRAM, None, 0, 4),
    ],
)
def test_bytes_that_a_draft_reads(name: str, algorithm: str, draft: str | None, parameters: int, kv_bytes: int) -> None:
    setup = Setup.named(name)
    assert (setup.algorithm, setup.target.name, setup.draft and setup.draft.name) == (algorithm, "llama-3.1-8b", draft)
    found = StepBytes.of(setup, num_draft_tokens=4, dtype=torch.bfloat16)
    assert found.draft_weights == pytest.approx(2 * parameters, rel=1e-4)  # norms are small
    assert (found.draft_kv_per_token, found.verify_kv_per_token) == (kv_bytes, 32 * KV_BYTES)


def test_a_shape_without_a_drafts_name_has_an_eagle3_head() -> None:
    setup = Setup.named("llama-3.1-8b")
    assert (setup.algorithm, setup.draft and setup.draft.name) == (EAGLE3, "eagle3-llama-3.1-8b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "modes"),
    [(("small-standalone", "small-eagle", "small-ngram"), (THREE,)), (("small-ngram",), (THREE, ONE))],
)
async def test_steps_with_each_drafter(
    shapes: tuple[str, ...], modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama-3.1-8b", "standalone-llama-3.1-8b", "eagle-llama-3.1-8b"):
        layers = {"num_hidden_layers": min(4, SHAPES[name]["num_hidden_layers"])}
        monkeypatch.setitem(SHAPES, name.replace("llama-3.1-8b", "small"), SHAPES[name] | SMALL | layers)
    group = [(DecodeBenchmark(Setup.named(shape), "cpu", (2,), None), mode) for shape in shapes for mode in modes]
    found: list[Measurement] = []
    await measure(group, (2,), 1, found.extend)
    assert [(m.shape, m.mode, m.batch, m.repeat) for m in found] == [(s, m, 2, 0) for s in shapes for m in modes]
    for m in found:
        assert m.draft_ms > 0
        assert m.mean_accept_length == pytest.approx(3.5, abs=0.4)
        assert ("draft" in m.cpu_ms) == (m.mode == THREE)
