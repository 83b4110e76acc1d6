"""Checkpoints that no training wrote: each is refused by one line that names the file, and nothing else is raised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.services.models.checkpoint import load_decoder, load_head
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.head_config import EAGLE3, Eagle3Config
from slipstream.services.models.json_files import MAX_CONFIG_BYTES, tokenizer_fingerprint
from tests.harness import checkpoints
from tests.harness.checkpoints import LLAMA, write_checkpoint, write_json, write_weights
from tests.harness.eagle3_checkpoints import AUTHORS, SPECULATORS, write_head
from tests.harness.mutations import INFINITY, NAN, is_refused
from tests.harness.paged_model import CPU
from tests.harness.sampling import examples


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def refusal(path: Path, read: Callable[[Path], object] | None = None) -> str:
    """The message of an error that is raised soon."""
    begun = time.thread_time()
    message = checkpoints.refusal(path, read)
    assert time.thread_time() - begun < 0.5
    return message


ACCEPTED = "a token id below vocab_size = 272, or a list of them"


def test_end_token_of_the_generation_settings(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    for value in (["</s>"], [2, 2**40]):
        write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
        message = refusal(tmp_path, ModelConfig.from_directory)
        assert message == f"generation_config.json: eos_token_id: got {value}, supported: {ACCEPTED}"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_that_are_nested_thousands_deep(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    (tmp_path / name).write_text('{"architectures": ' + nested(100_000) + "}")
    message = refusal(tmp_path, ModelConfig.from_directory)
    assert message == f"cannot read {name}: its values are nested too deeply"


@pytest.mark.parametrize("depth", [10, 300, 900])
def test_value_that_is_nested_less_deep_is_shown_in_short(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ' + nested(depth) + "}")
    message = refusal(tmp_path, ModelConfig.from_directory)
    assert message.startswith(("config.json: architectures: got [[[[...]]]], supported: ", "cannot read config.json"))


def test_settings_of_terabytes(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    message = refusal(tmp_path, ModelConfig.from_directory)
    assert message == f"config.json: got 1048576 MiB, supported: at most {MAX_CONFIG_BYTES // 2**20} MiB"


@pytest.mark.parametrize("layout", [AUTHORS, SPECULATORS])
@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("draft_vocab_size", 273, "an integer from 1 to 272"),
        ("target_hidden_size", 2**31, "an integer from 1 to 131072"),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 2**32], "3 numbers of layers"),
    ],
)
def test_head_with_absurd_sizes(tmp_path: Path, layout: str, name: str, value: object, accepted: str) -> None:
    write_head(tmp_path, layout=layout)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {name: value})
    message = refusal(tmp_path, Eagle3Config.from_directory)
    assert message == f"config.json: {name}: got {value}, supported: {accepted}"


NOT_FINITE = [
    (torch.float32, NAN, "values from nan to nan in float32"),
    (torch.float32, -INFINITY, "values from -inf to "),
    (torch.float16, 1e30, " to inf in float16"),
]


@pytest.mark.parametrize(("dtype", "value", "shown"), NOT_FINITE)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers(tmp_path: Path, dtype: torch.dtype, value: float, shown: str, name: str) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False)
    weights = load_file(path / "model.safetensors")
    weights[name].view(-1)[-1] = value
    write_weights(path, weights)
    message = refusal(path, partial(load_decoder, device=CPU, dtype=dtype))
    assert message.startswith(f"model.safetensors: tensor {name}: got values from ")
    assert shown in message
    assert message.endswith(", supported: finite weights")


@pytest.mark.parametrize("name", ["fc.weight", "model.embed_tokens.weight"])
def test_weights_of_a_head_that_are_no_numbers(tmp_path: Path, name: str) -> None:
    target = write_checkpoint(tmp_path / "target")
    head = write_head(tmp_path / "head", has_embedding=False)
    path = head if name == "fc.weight" else target
    weights = load_file(path / "model.safetensors")
    weights[name][0, 0] = NAN
    write_weights(path, weights)
    message = refusal(path, lambda _: load_head(EAGLE3, head, target=target, device=CPU, dtype=torch.float32))
    assert message.startswith(f"model.safetensors: tensor {name}: got values from nan")


def test_names_of_files_and_tensors_do_not_break_the_line(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "it", num_files=2, has_tokenizer=False)
    index = path / "model.safetensors.index.json"
    for name in ("a\nb.safetensors", "a\0.safetensors", "\ud800.safetensors", "a" * 400 + ".safetensors"):
        index.write_text(json.dumps({"weight_map": {"x\n\x1b[2J": name}}))
        assert refusal(path).startswith(f"{index.name}: weight_map: x\\n\\x1b[2J: got '")


def readings(path: Path, head: Path) -> list[tuple[Path, Callable[[], object]]]:
    """The files that are changed, and the function that reads each."""

    def load() -> object:
        return load_decoder(path, device=CPU, dtype=torch.float32)

    def load_the_head() -> object:
        return load_head(EAGLE3, head, target=path, device=CPU, dtype=torch.float32)

    return [
        (path / "config.json", load),
        (path / "generation_config.json", load),
        (path / "model.safetensors.index.json", load),
        (path / "model-00001-of-00002.safetensors", load),
        (path / "tokenizer.json", lambda: tokenizer_fingerprint(path)),
        (head / "config.json", load_the_head),
        (head / "model.safetensors", load_the_head),
    ]


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    """Only `CheckpointError` comes out, whatever a file holds; a failure names the seed of its change."""
    path = write_checkpoint(tmp_path / "it", num_files=2)
    head = write_head(tmp_path / "head", has_embedding=False)
    num_refused = 0
    for file, read in readings(path, head):
        for seed in range(examples(60)):
            num_refused += is_refused(file, read, seed)
        read()
    assert num_refused > 3 * examples(60)
