"""Identifies the tokenizer of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config_fields import MAX_TABLE_BYTES, read_json


def tokenizer_fingerprint(path: str | Path) -> str:
    """SHA-256 (hex) of the vocabulary in a directory's `tokenizer.json`.

    Covers tokens, merges and added tokens in one canonical form, so that files which merely write them differently
    agree. Raises `CheckpointError` when there is no such file or it has no vocabulary.
    """
    path = Path(path)
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path}: tokenizer.json is missing; supported: tokenizers saved as tokenizer.json")
    document = read_json(path / "tokenizer.json", MAX_TABLE_BYTES)
    try:
        model = document["model"]
        vocabulary = _vocabulary(model["vocab"])
        vocabulary |= {(int(token["id"]), str(token["content"])) for token in document.get("added_tokens") or ()}
        merges = [_merge(merge) for merge in model.get("merges") or ()]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        message = "supported: a tokenizer with `model.vocab` and, where it has them, `model.merges` and `added_tokens`"
        raise CheckpointError(f"{path}: tokenizer.json: cannot read the vocabulary; {message}") from error
    canonical = json.dumps([sorted(vocabulary), merges], separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _vocabulary(vocab: Any) -> set[tuple[int, str]]:
    if isinstance(vocab, dict):
        return {(int(index), str(token)) for token, index in vocab.items()}
    return {(index, str(entry[0])) for index, entry in enumerate(vocab)}  # unigram models: (token, score)


def _merge(merge: Any) -> list[str]:
    # Files written before tokenizers 0.20 have "left right", later ones ["left", "right"].
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [str(left), str(right)]
