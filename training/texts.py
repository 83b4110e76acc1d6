"""Texts as a stream of a target's tokens: from token ids, plain text, or JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from slipstream.common.errors import ConfigError
from slipstream.services.models.config import ModelConfig

ACCEPTED = ".npy with token ids, .txt, or .jsonl whose lines have text or messages"


def read_texts(files: list[Path], target: Path) -> Tensor:
    """Token ids of all files, one after another: int32 [n]. Texts end with the target's end-of-text token.

    Raises ``ConfigError`` that names the file, and the line, for what is no such text.
    """
    config = ModelConfig.from_directory(target)
    return torch.cat([torch.from_numpy(_ids(file, target, config)) for file in files])


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The dtype of a file of token ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _ids(file: Path, target: Path, config: ModelConfig) -> NDArray[np.int32]:
    if not file.is_file() or file.suffix not in (".npy", ".txt", ".jsonl"):
        raise ConfigError("data", str(file), ACCEPTED)
    try:
        return _checked(file, _read(file, target, config), config.vocab_size)
    except (ValueError, EOFError) as error:  # of NumPy, of UTF-8
        raise ConfigError("data", f"{file}: {error}", ACCEPTED) from None


def _read(file: Path, target: Path, config: ModelConfig) -> NDArray[Any]:
    if file.suffix == ".npy":
        found: NDArray[Any] = np.load(file)
        return found
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    end = sorted(config.eos_token_ids)[:1]
    pieces = []
    for text in [file.read_text(encoding="utf-8")] if file.suffix == ".txt" else _lines(file):
        if isinstance(text, str):
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.apply_chat_template(text, tokenize=True, return_dict=False)
        pieces.append(np.array([*ids, *end], dtype=np.int32))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def _checked(file: Path, ids: NDArray[Any], vocab_size: int) -> NDArray[np.int32]:
    if ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0 or ids.max() >= vocab_size:
        given = f"{ids.dtype} from {ids.min()} to {ids.max()}" if ids.size else "no tokens"
        raise ConfigError("data", f"{file}: {given}", f"token ids below {vocab_size}, the target's vocabulary")
    return ids.astype(np.int32).reshape(-1)


def _lines(file: Path) -> Iterator[str | list[dict[str, Any]]]:
    """The text of each line, or its messages."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                given = json.loads(line)
            except (ValueError, RecursionError):
                given = None
            if isinstance(given, dict) and isinstance(given.get("text"), str):
                yield given["text"]
            elif isinstance(given, dict) and isinstance(given.get("messages"), list):
                yield given["messages"]
            else:
                raise ConfigError("data", f"{file}: line {number}", ACCEPTED)
