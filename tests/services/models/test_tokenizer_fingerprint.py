"""The fingerprint agrees for equal vocabularies, however they are written, and for no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.services.models.json_files import tokenizer_fingerprint
from tests.harness.checkpoints import refusal, write_json, write_tokenizer

Document = dict[str, Any]


SAME: dict[str, Callable[[Document], object]] = {
    "pairs as text": lambda document: document["model"].update(
        merges=[" ".join(merge) for merge in document["model"]["merges"]]
    ),
    "another order": lambda document: document["model"].update(
        vocab=dict(reversed(document["model"]["vocab"].items()))
    ),
    "another template": lambda document: document.update(post_processor={"type": "TemplateProcessing"}),
    "added tokens in vocabulary": lambda document: document.update(added_tokens=[]),
}
DIFFERENT: dict[str, Callable[[Document], object]] = {
    "swapped tokens": lambda document: document["model"]["vocab"].update(
        a=document["model"]["vocab"]["b"], b=document["model"]["vocab"]["a"]
    ),
    "swapped merges": lambda document: document["model"]["merges"].reverse(),
    "one more token": lambda document: document["added_tokens"].append({"id": 263, "content": "<|tool|>"}),
}


def read(path: Path) -> Document:
    document: Document = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    return document


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*SAME, *DIFFERENT])
def test_changes(path: Path, name: str) -> None:
    document, before = read(path), tokenizer_fingerprint(path)
    (SAME | DIFFERENT)[name](document)
    assert json.dumps(document) != json.dumps(read(path))
    write_json(path / "tokenizer.json", document)
    assert (tokenizer_fingerprint(path) == before) is (name in SAME)
    assert len(bytes.fromhex(before)) == 32


def test_unigram_vocabulary(path: Path) -> None:
    fingerprints = []
    for vocab in ([["a", -1.0], ["b", -2.0]], [["a", -1.0], ["c", -2.0]]):
        write_json(path / "tokenizer.json", {"model": {"type": "Unigram", "vocab": vocab}})
        fingerprints.append(tokenizer_fingerprint(path))
    assert fingerprints[0] != fingerprints[1]


def test_missing(tmp_path: Path) -> None:
    message = "tokenizer.json is missing; supported: tokenizers saved as tokenizer.json"
    assert refusal(tmp_path, tokenizer_fingerprint) == message


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
    assert refusal(tmp_path, tokenizer_fingerprint) == (
        "tokenizer.json: cannot read the vocabulary; supported: a tokenizer with "
        "`model.vocab` and, where it has them, `model.merges` and `added_tokens`"
    )
