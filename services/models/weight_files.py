"""The safetensors of a checkpoint: headers first, tensors when they are read."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from slipstream.common.errors import CheckpointError
from slipstream.services.models.json_files import MAX_TABLE_BYTES, read_json, shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[\w.+-][\w .+-]{0,200}\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a file's header describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the dtype, such as `BF16`."""
    name: str
    """In the file."""


class WeightFiles:
    """The files of a checkpoint, mapped into memory while this context is open; only headers are read at first."""

    def __init__(
        self, path: Path, *, framework: str = "pt", name_of: Callable[[str], str | None] = lambda name: name
    ) -> None:
        """`framework`: see `safe_open`; any will do for who reads no tensor.

        `name_of`: gives the name by which a tensor of the files is known here, or None for one that does not count.

        Raises `CheckpointError` when a file is missing or broken or contradicts the index.
        """
        self.path = path
        self._framework, self._name_of = framework, name_of
        self.tensors: dict[str, TensorInfo] = {}
        """Tensors by name, in the order in which reading them is fastest."""
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            locations = _locations(path)
            for name in sorted(set(locations.values())) if locations is not None else [SINGLE_FILE]:
                self._open(name)
            for tensor, file in (locations or {}).items():
                ours = name_of(tensor)
                if ours is not None and (ours not in self.tensors or self.tensors[ours].file != file):
                    raise CheckpointError(f"{path}: {INDEX_FILE}: tensor {tensor} is not in {file}, where it should be")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, *part: slice) -> torch.Tensor:
        """The tensor in host memory, or only a part of its rows, or of these and its columns."""
        info = self.tensors[name]
        try:
            file = self._files[info.file]
            tensor: torch.Tensor = file.get_slice(info.name)[part] if part else file.get_tensor(info.name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {info.file}: cannot read tensor {info.name}: {error}") from error
        return tensor

    def error(self, name: str, message: str) -> CheckpointError:
        """The error for a tensor that cannot be used."""
        info = self.tensors[name]
        return CheckpointError(f"{self.path}: {info.file}: tensor {info.name}: {message}")

    def _open(self, name: str) -> None:
        if not (self.path / name).is_file():
            raise CheckpointError(f"{self.path}: {name}, which {INDEX_FILE} names, is missing")
        try:
            file = self._stack.enter_context(safe_open(self.path / name, framework=self._framework, device="cpu"))
        except (SafetensorError, OSError) as error:
            message = f"{self.path}: {name} is truncated or no safetensors file: {error}"
            raise CheckpointError(message) from error
        self._files[name] = file
        for theirs in file.offset_keys():
            ours = self._name_of(theirs)
            if ours is None:
                continue
            if ours in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {theirs} is in {self.tensors[ours].file} and in {name}")
            info = file.get_slice(theirs)
            self.tensors[ours] = TensorInfo(name, tuple(info.get_shape()), info.get_dtype(), theirs)


def has_weights(path: Path) -> bool:
    """Returns whether a directory has safetensors, whole or not."""
    return (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()


def _locations(path: Path) -> dict[str, str] | None:
    """The file of each tensor by the index; None when there is a single file."""
    if (path / SINGLE_FILE).is_file():
        return None
    if not (path / INDEX_FILE).is_file():
        others = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f" (found {others[0]})" if others else ""
        raise CheckpointError(f"{path}: no weights{found}; supported: {SINGLE_FILE} or {INDEX_FILE} with its files")
    locations = read_json(path / INDEX_FILE, MAX_TABLE_BYTES).get("weight_map")
    if not isinstance(locations, dict) or not locations:
        raise CheckpointError(f"{path}: {INDEX_FILE}: weight_map is missing; supported: a file name for each tensor")
    for tensor, file in locations.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            accepted = "the name of a safetensors file beside the index"
            message = f"weight_map: {tensor}: got {shown(file)}, supported: {accepted}"
            raise CheckpointError(f"{path}: {INDEX_FILE}: {message}")
    return locations
