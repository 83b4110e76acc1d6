"""Tokenizer files that no library wrote: each is loaded or refused by one line, and no model is served by halves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from slipstream.common.errors import CheckpointError
from slipstream.gateway.model import load_model
from slipstream.gateway.tokenizer import load_tokenizer
from tests.harness.checkpoints import write_json, write_tokenizer
from tests.harness.mutations import is_refused
from tests.harness.sampling import examples
from tests.harness.scripted_scheduler import DESCRIPTION

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")


def test_changed_files_are_loaded_or_refused(tmp_path: Path) -> None:
    """Only `CheckpointError` comes out, whatever a file holds; a failure names the seed of its change."""
    write_tokenizer(tmp_path)
    description = replace(DESCRIPTION, tokenizer_path=str(tmp_path))
    for name in FILES:
        if not (tmp_path / name).is_file():
            write_json(tmp_path / name, {"model_type": "llama", "eos_token": "<|end|>", "tokenizer_class": None})

    def read() -> None:
        model = load_model(description, None, max_samples=1)
        model.vocabulary.new_detokenizer().push_all(model.tokenizer.encode("The cat"))

    num_refused = 0
    for name in FILES:
        for seed in range(examples(40)):
            num_refused += is_refused(tmp_path / name, read, seed)
    read()
    assert num_refused > examples(40)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "vocab.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"cannot read vocab\.json: Input/output error"):
        load_model(replace(DESCRIPTION, tokenizer_path=str(tmp_path)), None, max_samples=1)


def test_panic_of_the_library_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["model"]["continuing_subword_prefix"] = "longer than any token"
    write_json(tmp_path / "tokenizer.json", document)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)
