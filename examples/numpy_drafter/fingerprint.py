"""The fingerprint of a tokenizer, equal for draft and verify; defined in `docs/write-a-drafter.md`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def tokenizer_fingerprint(directory: Path) -> str:
    """Returns the SHA-256, in hex, of vocabulary, added tokens and merges in the directory's `tokenizer.json`."""
    document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    pairs = _vocabulary(model["vocab"])
    pairs |= {(int(token["id"]), str(token["content"])) for token in document.get("added_tokens") or ()}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    canonical = json.dumps([sorted(pairs), merges], separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _vocabulary(vocab: Any) -> set[tuple[int, str]]:
    if isinstance(vocab, dict):
        return {(index, token) for token, index in vocab.items()}
    return {(index, entry[0]) for index, entry in enumerate(vocab)}
