"""A checkpoint with a longer context than it was trained for: the work is the same, whatever the words are worth.

RoPE has an angle for every position, so a larger `max_position_embeddings` needs no other weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def with_context(model: Path, context_tokens: int, into: Path) -> Path:
    """The model if its context suffices, else a copy of it in `into` whose context does: its files are links."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= context_tokens:
        return model
    copy = into / model.name
    copy.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config["max_position_embeddings"] = context_tokens
    (copy / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return copy
