"""Fields of a checkpoint's `config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.common.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


class ConfigFields:
    """Reads fields of a JSON object or of a configuration of transformers; errors name the one at fault."""

    def __init__(self, path: Path, values: object, prefix: str = "") -> None:
        """`path` is the checkpoint's directory, `prefix` what errors put before a field's name."""
        self.path = path
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> Any:
        """The field as it is, None where it is absent."""
        if isinstance(self._values, dict):
            return self._values.get(name)
        return getattr(self._values, name, None)

    def sub(self, name: str) -> ConfigFields:
        """The fields of the object in a field; none where it is absent."""
        return ConfigFields(self.path, self.get(name) or {}, f"{self._prefix}{name}.")

    def count(self, name: str) -> int:
        """A positive integer; raises `CheckpointError` when it is none."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer")
        return value

    def number(self, name: str) -> float:
        """A positive number; raises `CheckpointError` when it is none."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str | bool) -> bool:
        """Whether the field is true; a bool in place of a name is the answer."""
        return name if isinstance(name, bool) else bool(self.get(name))

    def error(self, name: str, accepted: str) -> CheckpointError:
        """What to raise for a field that says something else than `accepted`."""
        given = self.get(name)
        return CheckpointError(f"{self.path}: config.json: {self._prefix}{name}: got {given!r}, supported: {accepted}")
