"""Loading: progress, random weights, and one clear line for each way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.services.models import checkpoint
from slipstream.services.models.checkpoint import LoadFormat, load_decoder, load_head
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.head_config import EAGLE3
from tests.harness.checkpoints import (
    FAMILIES,
    LLAMA,
    VOCAB_SIZE,
    refusal,
    write_checkpoint,
    write_json,
    write_weights,
)
from tests.harness.eagle3_checkpoints import AUTHORS, DRAFT_VOCAB_SIZE, write_head
from tests.harness.paged_model import CPU, PagedModel

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "it", has_tokenizer=False)


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    write_weights(path, weights)


@pytest.mark.parametrize("load_format", LoadFormat)
def test_a_long_load_says_how_far_it_is(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, load_format: LoadFormat
) -> None:
    caplog.set_level(logging.INFO, checkpoint.__name__)

    def lines() -> list[tuple[float, float]]:
        caplog.clear()
        load_decoder(path, device=CPU, dtype=torch.float32, load_format=load_format)
        return [record.args for record in caplog.records if record.msg == checkpoint.PROGRESS]  # type: ignore[misc]

    assert lines() == []
    monkeypatch.setattr(checkpoint, "PROGRESS_S", 0.0)
    percents, rates = zip(*lines(), strict=True)
    assert len(percents) > 10
    assert percents == tuple(sorted(percents))
    assert percents[-1] == 100.0
    assert min(rates) > 0


def test_tied_head_may_be_saved_as_well(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "it", tie_word_embeddings=True)
    change_weights(path, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 0}))
    decoder = load_decoder(path, device=CPU, dtype=torch.float32)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(decoder.logits(hidden), hidden @ decoder.embedding.T)
    change_weights(path, lambda weights: weights["lm_head.weight"].add_(1))
    assert refusal(path) == (
        "config.json: tie_word_embeddings: got true, but lm_head.weight differs from model.embed_tokens.weight"
    )


def test_frequencies_of_older_checkpoints_are_ignored(path: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_weights(path, lambda weights: weights.update(frequencies))
    load_decoder(path, device=CPU, dtype=torch.float32)


def test_missing_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    message = "no weights; supported: model.safetensors or model.safetensors.index.json with its files"
    assert refusal(path) == message
    (path / "pytorch_model.bin").write_bytes(b"")
    assert refusal(path) == message.replace("no weights", "no weights (found pytorch_model.bin)")


@pytest.mark.parametrize("kept", [0, 7, 500, -1])
def test_truncated_file(path: Path, kept: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert refusal(path).startswith("model.safetensors is truncated or no safetensors file: ")


def test_missing_tensors(path: Path) -> None:
    change_weights(path, lambda weights: weights.pop(Q_PROJ))
    assert refusal(path) == f"missing tensors: {Q_PROJ}; config.json asks for them"
    write_json(path / "config.json", LLAMA | {"num_hidden_layers": 3})
    assert refusal(path) == (
        f"missing tensors: {Q_PROJ}, model.layers.2.input_layernorm.weight, "
        "model.layers.2.post_attention_layernorm.weight and 7 more; config.json asks for them"
    )


def test_unknown_tensors(path: Path) -> None:
    write_json(path / "config.json", LLAMA | {"num_hidden_layers": 1})
    message = refusal(path)
    assert message.startswith("unknown tensors: model.layers.1.")
    assert message.endswith(" and 6 more; supported: the tensors of LlamaForCausalLM by config.json")


def test_tensor_of_another_shape(path: Path) -> None:
    change_weights(path, lambda weights: weights.update({Q_PROJ: weights[Q_PROJ][:60].clone()}))
    assert refusal(path) == (f"model.safetensors: tensor {Q_PROJ}: got shape [60, 64], config.json asks for [64, 64]")


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantised_tensor(path: Path, dtype: torch.dtype, name: str) -> None:
    change_weights(path, lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].to(dtype)}))
    assert refusal(path) == (
        f"model.safetensors: tensor {Q_PROJ}: got dtype {name}, supported: F32, F16, BF16 (no quantised weights)"
    )


class TestIndex:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path / "it", num_files=2, has_tokenizer=False)

    def change_index(self, path: Path, **changes: str) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] |= changes
        write_json(path / INDEX, index)

    def test_file_is_missing(self, path: Path) -> None:
        (path / "model-00002-of-00002.safetensors").unlink()
        assert refusal(path) == f"model-00002-of-00002.safetensors, which {INDEX} names, is missing"

    def test_file_is_truncated(self, path: Path) -> None:
        file = path / "model-00001-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        assert refusal(path).startswith(f"{file.name} is truncated or no safetensors file: ")

    def test_tensor_is_elsewhere(self, path: Path) -> None:
        first = "model-00001-of-00002.safetensors"
        self.change_index(path, extra=first)
        assert refusal(path) == f"{INDEX}: tensor extra is not in {first}, where it should be"

    def test_tensor_is_there_twice(self, path: Path) -> None:
        first, second = (path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
        second.write_bytes(first.read_bytes())
        assert refusal(path) == f"tensor lm_head.weight is in {first.name} and in {second.name}"

    @pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "weights.bin"])
    def test_file_is_not_beside_the_index(self, path: Path, file: str) -> None:
        self.change_index(path, extra=file)
        assert refusal(path) == (
            f"{INDEX}: weight_map: extra: got '{file}', supported: the name of a safetensors file beside the index"
        )

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
    def test_map_is_missing(self, path: Path, text: str) -> None:
        (path / INDEX).write_text(text)
        assert refusal(path) == f"{INDEX}: weight_map is missing; supported: a file name for each tensor"

    def test_index_is_no_json(self, path: Path) -> None:
        (path / INDEX).write_text("{")
        assert refusal(path).startswith(f"cannot read {INDEX}: Expecting property name")
        (path / INDEX).write_text("[]")
        assert refusal(path) == f"{INDEX}: got a list, supported: a JSON object"


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Returns the logits of a prompt of 40 different tokens."""
    model = PagedModel(decoder)
    return model.run(model.batch([(0, list(range(3, 43)))]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_of_config_json_alone(family: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", FAMILIES[family] | {"num_hidden_layers": 8})
    first, again = (
        load_decoder(tmp_path, device=CPU, dtype=torch.float32, load_format=LoadFormat.DUMMY) for _ in range(2)
    )
    logits = logits_of(first)
    assert torch.equal(logits, logits_of(again))
    assert 0.3 < logits.std().item() < 3
    assert len(set(logits[0].argmax(dim=1).tolist())) > 10


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
