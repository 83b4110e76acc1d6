"""The fingerprint agrees for equal vocabularies, however they are written, and for no others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.common.errors import CheckpointError
from slipstream.services.models.json_files import tokenizer_fingerprint
from tests.harness.checkpoints import write_json, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Document = dict[str, Any]


def pairs_as_text(document: Document) -> None:
    document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]


def another_order(document: Document) -> None:
    document["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))


def another_template(document: Document) -> None:
    document["post_processor"] = {"type": "TemplateProcessing"}


def added_tokens_in_vocabulary(document: Document) -> None:
    document["added_tokens"] = []


def swapped_tokens(document: Document) -> None:
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def swapped_merges(document: Document) -> None:
    document["model"]["merges"].reverse()


def one_more_token(document: Document) -> None:
    document["added_tokens"].append({"id": 263, "content": "<|tool|>", "special": True})


def read(path: Path) -> Document:
    document: Document = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    return document


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("change", [pairs_as_text, another_order, another_template, added_tokens_in_vocabulary])
def test_same(path: Path, change: Callable[[Document], None]) -> None:
    document, expected = read(path), tokenizer_fingerprint(path)
    change(document)
    assert json.dumps(document) != json.dumps(read(path))
    write_json(path / "tokenizer.json", document)
    assert tokenizer_fingerprint(path) == expected
    assert len(bytes.fromhex(expected)) == 32


@pytest.mark.parametrize("change", [swapped_tokens, swapped_merges, one_more_token])
def test_different(path: Path, change: Callable[[Document], None]) -> None:
    document, other = read(path), tokenizer_fingerprint(path)
    change(document)
    write_json(path / "tokenizer.json", document)
    assert tokenizer_fingerprint(path) != other


def test_unigram_vocabulary(path: Path) -> None:
    fingerprints = []
    for vocab in ([["a", -1.0], ["b", -2.0]], [["a", -1.0], ["c", -2.0]]):
        write_json(path / "tokenizer.json", {"model": {"type": "Unigram", "vocab": vocab}})
        fingerprints.append(tokenizer_fingerprint(path))
    assert fingerprints[0] != fingerprints[1]


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer_fingerprint(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: tokenizer.json is missing; supported: tokenizers saved as tokenizer.json"
    )


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"model": None},
        {"model": {"vocab": {"a": "b"}}},
        {"model": {"vocab": 3}},
        {"model": {"vocab": {"a": 0}, "merges": ["a"]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_no_vocabulary(tmp_path: Path, document: Document) -> None:
    write_json(tmp_path / "tokenizer.json", document)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_fingerprint(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: tokenizer.json: cannot read the vocabulary; supported: a tokenizer with "
        "`model.vocab` and, where it has them, `model.merges` and `added_tokens`"
    )
