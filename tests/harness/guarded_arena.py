"""An arena with gaps between its parts and noise in all of it, that tells which bytes a worker has changed."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.common.device.cpu.device import FENCE_KIND, KIND
from slipstream.common.device.cpu.shared_file import DIRECTORY, PREFIX
from slipstream.common.wire.manifest import FENCE_BYTES, BufferSpec, FenceWord, Manifest, Placed
from slipstream.common.wire.step import FenceName

GAP_BYTES = 256
_WORD_BYTES = 8


class GuardedArena:
    """An arena as a scheduler would share it, full of noise, in a file that `close` removes."""

    def __init__(self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, seed: int) -> None:
        """Fills the arena with noise from `seed`, and the fence words with 0."""
        words, buffers, offset = [], [], GAP_BYTES
        for fence in fences:
            words.append(FenceWord(fence, FENCE_KIND, offset))
            offset += FENCE_BYTES + GAP_BYTES - FENCE_BYTES % GAP_BYTES
        for spec in specs:
            offset += GAP_BYTES
            buffers.append(Placed(spec, offset))
            offset += -(-spec.size // GAP_BYTES) * GAP_BYTES
        path = DIRECTORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.manifest = Manifest(KIND, str(path), offset + GAP_BYTES, tuple(buffers), tuple(words))
        self.manifest.check()
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # As of every arena: a file that nobody has locked is taken for a leftover.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.posix_fallocate(descriptor, 0, self.manifest.size)
        self._memory = mmap.mmap(descriptor, self.manifest.size)
        os.close(descriptor)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._bytes[:] = np.random.default_rng(seed).integers(0, 256, self.manifest.size, np.uint8)
        for word in words:
            self._bytes[word.offset : word.offset + _WORD_BYTES] = 0
        self._before = self._bytes.copy()
        self._may_change = np.zeros(self.manifest.size, bool)

    def allow_fences(self) -> None:
        """Fences may be signalled and released."""
        for word in self.manifest.fences:
            self._may_change[word.offset : word.offset + _WORD_BYTES] = True

    def relay(self, manifest: Manifest) -> None:
        """From here on the parts are taken to be where this says."""
        self.manifest = manifest
        self._may_change[:] = False
        self.allow_fences()

    def allow(self, name: str, *index: Any) -> None:
        """These elements of a buffer may be written: as one would index an array of its shape."""
        placed = self._placed(name)
        mask = self._may_change[placed.offset : placed.end].reshape(*placed.spec.shape, placed.spec.dtype.itemsize)
        mask[index] = True

    def array(self, name: str) -> npt.NDArray[np.int64]:
        """An int64 buffer as it is now."""
        placed = self._placed(name)
        return self._bytes[placed.offset : placed.end].view(np.int64).reshape(placed.spec.shape)

    def changed(self) -> list[str]:
        """Lists the first five bytes that changed without permission."""
        places = np.flatnonzero((self._bytes != self._before) & ~self._may_change)
        return [f"byte {place}, {self._part_at(int(place))}" for place in places[:5]]

    def close(self) -> None:
        """Takes the file away."""
        self.path.unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        """Says whether there is such a buffer."""
        return any(placed.spec.name == name for placed in self.manifest.buffers)

    def _placed(self, name: str) -> Placed:
        return next(placed for placed in self.manifest.buffers if placed.spec.name == name)

    def _part_at(self, place: int) -> str:
        for placed in self.manifest.buffers:
            if placed.offset <= place < placed.end:
                return f"byte {place - placed.offset} of {placed.spec.name} {placed.spec.shape}"
        return "between the parts"
