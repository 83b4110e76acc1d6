"""A piece of shared memory that tells what another process has changed in it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slipstream.common.device.manifest import BufferSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slipstream.common.device.interface import Device, Fence
    from slipstream.common.worker.layout import BufferName
    from slipstream.common.worker.step import FenceName

GUARD_WORDS, GUARD_VALUE = 32, 0x5AFE


class GuardedMemory:
    """An arena with words between its buffers that belong to nobody and are in no manifest."""

    def __init__(self, device: Device, specs: Sequence[BufferSpec], fences: Iterable[FenceName]) -> None:
        """Takes the memory: all zero but for the guards. Raises OutOfMemoryError, ConfigError."""
        guards = [BufferSpec(f"guard {number}", (GUARD_WORDS,), torch.int64, "") for number in range(len(specs) + 1)]
        placed = [guards[0]]
        for spec, guard in zip(specs, guards[1:], strict=True):
            placed += [spec, guard]
        self._arena = device.create_arena(placed, fences)
        manifest = self._arena.manifest
        self.manifest = replace(manifest, buffers=tuple(each for each in manifest.buffers if each.spec in specs))
        """The layout as the drafter sees it."""
        self._device = device
        self._buffers = {spec.name: self._arena.tensor(spec.name) for spec in placed}
        for guard in guards:
            self._buffers[guard.name].fill_(GUARD_VALUE)
        self._expected = {name: buffer.clone() for name, buffer in self._buffers.items()}

    def fence(self, name: FenceName) -> Fence:
        """Returns a fence."""
        return self._arena.fence(name)

    def write(self, name: BufferName, row: int, values: torch.Tensor | Sequence[int] | int) -> None:
        """Writes a row, as the buffer's writer does."""
        target = self._buffers[name]
        row_values = torch.as_tensor(values, dtype=target.dtype, device=target.device)
        for tensor in (target, self._expected[name]):
            tensor[row] = row_values

    def fill(self, name: BufferName, value: int) -> None:
        """Writes one value everywhere."""
        for tensor in (self._buffers[name], self._expected[name]):
            tensor.fill_(value)

    def row(self, name: BufferName, row: int) -> list[int]:
        """Returns a row of integers as it is now."""
        return self._device.to_host([self._buffers[name][row]])[0].tolist()

    def rows(self, name: BufferName, row: int) -> list[list[int]]:
        """Returns the integers of a row that has rows itself."""
        return self._device.to_host([self._buffers[name][row]])[0].tolist()

    def number(self, name: BufferName, row: int) -> int:
        """Returns the integer of a row."""
        return self._device.to_host([self._buffers[name][row]])[0].item()  # type: ignore[return-value]

    def allow(self, name: BufferName, row: int) -> None:
        """Takes a row as it is now for right."""
        self._expected[name][row] = self._buffers[name][row]

    def allow_all(self) -> None:
        """Takes all buffers, but not what lies between them, as they are now for right."""
        for spec in (placed.spec for placed in self.manifest.buffers):
            self._expected[spec.name].copy_(self._buffers[spec.name])

    def changed(self) -> list[str]:
        """Says what has changed that may not: each buffer, with the first row of it."""
        found = []
        for name, expected in self._expected.items():
            if torch.equal(self._buffers[name], expected):
                continue
            if name.startswith("guard"):
                found.append("memory between the buffers")
            else:
                row = (
                    int((self._buffers[name] != expected).flatten(1).any(1).nonzero()[0, 0]) if expected.ndim > 1 else 0
                )
                found.append(f"{name}, row {row}")
        return found

    def flush(self) -> None:
        """Returns when all that was written here is in the memory."""
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def seal(self) -> None:
        """The drafter has mapped it."""
        self._arena.seal()

    def close(self) -> None:
        """Gives it back."""
        self._buffers.clear()
        self._arena.close()
