"""Reads the JSON files of a checkpoint: its settings, and the vocabulary that identifies its tokenizer.

Errors name file, field, value and what is accepted.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from pathlib import Path
from typing import Any, TypeGuard

from slipstream.common.errors import CheckpointError

MAX_CONFIG_BYTES = 16 * 2**20
"""Size of a file with settings."""
MAX_TABLE_BYTES = 256 * 2**20
"""Size of a file with an entry for each token or tensor; reading takes about ten times as much memory."""

_MAX_FACTOR = 2**15
_MAX_SHOWN = 120
_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxlong = 3, 40
_shortened.maxdict = _shortened.maxlist = 8
_shortened.maxstring = _shortened.maxother = _MAX_SHOWN


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; raises `CheckpointError` when it holds none, or is too large."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            accepted = f"at most {max_bytes // 2**20} MiB"
            raise CheckpointError(f"{path.parent}: {path.name}: got {size / 2**20:.0f} MiB, supported: {accepted}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path.parent}: cannot read {path.name}: {reason}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path.parent}: cannot read {path.name}: its values are nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.parent}: {path.name}: got a {type(value).__name__}, supported: a JSON object")
    return value


class ConfigFields:
    """Reads fields of a JSON object of a checkpoint's file; errors name the one at fault."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "", *, file_name: str = "config.json") -> None:
        """`path` is the checkpoint's directory, `prefix` what errors put before a field's name."""
        self.path = path
        self._values = values
        self._prefix = prefix
        self._file_name = file_name

    @classmethod
    def of_file(cls, path: Path) -> ConfigFields:
        """The fields of a file with settings. Raises `CheckpointError` when it cannot be read."""
        return cls(path.parent, read_json(path), file_name=path.name)

    def get(self, name: str) -> Any:
        """The field as it is, None where it is absent."""
        return self._values.get(name)

    def over(self, defaults: dict[str, Any]) -> ConfigFields:
        """The same fields, with values for those that are absent."""
        return ConfigFields(self.path, defaults | self._values, self._prefix, file_name=self._file_name)

    def with_values(self, values: dict[str, Any]) -> ConfigFields:
        """The same fields, with these values in place of their own."""
        return ConfigFields(self.path, self._values | values, self._prefix, file_name=self._file_name)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that there are."""
        return tuple(self._values)

    def sub(self, name: str) -> ConfigFields:
        """The fields of the object in a field; none where it is absent."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return ConfigFields(self.path, value, f"{self._prefix}{name}.", file_name=self._file_name)

    def count(self, name: str, default: int | None = None, *, high: int) -> int:
        """An integer from 1 to `high`, `default` where the field is absent or null; else raises `CheckpointError`."""
        value = default if self.get(name) is None else self.get(name)
        if not is_integer(value) or not 1 <= value <= high:
            raise self.error(name, f"an integer from 1 to {high}")
        return value

    def number(self, name: str) -> float:
        """A positive, finite number; raises `CheckpointError` when it is none."""
        number = _positive(self.get(name))
        if number is None:
            raise self.error(name, "a positive number")
        return number

    def factor(self, name: str) -> float:
        """A factor of numbers within a model, such that they stay finite in every dtype; else `CheckpointError`."""
        number = self.number(name)
        if not 1 / _MAX_FACTOR <= number <= _MAX_FACTOR:
            raise self.error(name, f"a number from 1/{_MAX_FACTOR} to {_MAX_FACTOR}")
        return number

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive, finite numbers; raises `CheckpointError` when it is none."""
        given = self.get(name)
        numbers = [_positive(value) for value in given] if isinstance(given, list) else []
        positive = tuple(number for number in numbers if number is not None)
        if not len(positive) == len(numbers) == length:
            raise self.error(name, f"{length} positive numbers")
        return positive

    def flag(self, name: str | bool) -> bool:
        """True or false; raises `CheckpointError` when it is neither. A bool in place of a name is the answer."""
        value = name if isinstance(name, bool) else self.get(name)
        if not isinstance(value, bool):
            raise self.error(str(name), "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> frozenset[int]:
        """A token id or a list of them, none where it is absent; raises `CheckpointError` for other values."""
        given = self.get(name)
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(is_integer(token) and 0 <= token < vocab_size for token in ids):
            raise self.error(name, f"a token id below vocab_size = {vocab_size}, or a list of them")
        return frozenset(ids)

    def error(self, name: str, accepted: str) -> CheckpointError:
        """The error for a field that says something else than `accepted`."""
        field = f"{self._file_name}: {self._prefix}{name}"
        return CheckpointError(f"{self.path}: {field}: got {shown(self.get(name))}, supported: {accepted}")


def shown(value: object) -> str:
    """A value of a file as an error shows it: long and deep ones are cut."""
    text = _shortened.repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _positive(value: object) -> float | None:
    try:
        number = float(value) if is_integer(value) else value
    except OverflowError:
        return None
    return number if isinstance(number, float) and 0 < number < math.inf else None


def is_integer(value: object) -> TypeGuard[int]:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


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
