"""The layout of the arena: the place and the writer of each buffer.

The scheduler makes it and sends it as plain data; every process checks it before it maps anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import ManifestError
from slipstream.common.wire.messages import decode, encode
from slipstream.common.wire.step import FenceName
from slipstream.protos import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

ALIGNMENT_BYTES = 256
FENCE_BYTES = 64
MAX_DIMENSIONS = 8
HANDLE_BYTES = 64
"""Size of CUDA's IPC handles, of memory and of events."""
EVENTS = 24
"""Events of an "event" fence: at least as many as a ring has rows, so that none is recorded again before its wait."""
FEWEST_EVENTS, MOST_EVENTS = 2, 256
"""Numbers of events that another process's fence may have."""

HOST, TIMELINE, EVENT = "host", "timeline", "event"
"""The kinds of fences."""

DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A buffer to be placed in the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    writer: str
    """The only process that writes it: "draft", "verify" or "scheduler"."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Placed:
    """A buffer and its place."""

    spec: BufferSpec
    offset: int
    """Bytes from the beginning of the arena."""

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.spec.size

    def to_pb(self) -> worker_pb2.Buffer:
        return encode(worker_pb2.Buffer, self.spec, offset=self.offset, dtype=DTYPE_NAMES[self.spec.dtype])

    @classmethod
    def from_pb(cls, message: worker_pb2.Buffer) -> Placed:
        """Raises ManifestError for a dtype that there is not."""
        if message.dtype not in DTYPES:
            raise ManifestError(f"buffer {message.name}: dtype {message.dtype!r}, accepted: {', '.join(DTYPES)}")
        return cls(decode(BufferSpec, message, dtype=DTYPES[message.dtype]), message.offset)


@dataclass(frozen=True, slots=True)
class FenceWord:
    """A fence and the place of its counter."""

    fence: FenceName
    kind: str
    """"host" on a CPU and for results, else "timeline" or "event" on a GPU."""
    offset: int
    events: tuple[bytes, ...] = ()
    """IPC handles of an "event" fence's ring."""

    @classmethod
    def from_pb(cls, message: worker_pb2.FenceWord) -> FenceWord:
        """Raises ManifestError for a fence that there is not."""
        try:
            return decode(cls, message, {"fence": FenceName})
        except ValueError:
            raise ManifestError(f"fence {message.fence}: there is no such fence") from None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of an arena that another process needs to map it."""

    kind: str
    """"file" on a CPU and for results, else "cuda_ipc" on a GPU."""
    path: str
    """Path of the file."""
    size: int
    buffers: tuple[Placed, ...]
    fences: tuple[FenceWord, ...]
    handle: bytes = b""
    """The IPC handle of a GPU's memory."""

    def to_pb(self) -> worker_pb2.Manifest:
        return encode(worker_pb2.Manifest, self)

    @classmethod
    def from_pb(cls, message: worker_pb2.Manifest) -> Manifest:
        """Decodes and checks a manifest. Raises ManifestError."""
        manifest = decode(cls, message, {"buffers": Placed.from_pb, "fences": FenceWord.from_pb})
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raises ManifestError unless every buffer and fence lies within the arena, aligned and apart.

        Checks the length of handles only: opening them shows whether they are valid.
        """
        if self.size < 1:
            raise ManifestError(f"an arena of {self.size} bytes")
        ranges: list[tuple[int, int, str]] = []
        for placed in self.buffers:
            spec = placed.spec
            if not 0 < len(spec.shape) <= MAX_DIMENSIONS or any(side < 1 for side in spec.shape):
                accepted = f"one to {MAX_DIMENSIONS} sizes above 0"
                raise ManifestError(f"buffer {spec.name}: shape {spec.shape} is not {accepted}")
            ranges.append(self._range(f"buffer {spec.name}", placed.offset, placed.end, ALIGNMENT_BYTES))
        for word in self.fences:
            end = word.offset + FENCE_BYTES
            ranges.append(self._range(f"fence {word.fence.name}", word.offset, end, FENCE_BYTES))
        for (_, end, name), (start, _, other) in pairwise(sorted(ranges)):
            if start < end:
                raise ManifestError(f"{name} and {other} overlap")
        self._check_names()
        self._check_handles()

    def check_holds(self, specs: list[BufferSpec]) -> None:
        """Raises ManifestError unless its buffers are exactly these, in this order."""
        if [placed.spec for placed in self.buffers] != specs:
            raise ManifestError("the buffers of the manifest are not those that the sizes ask for")

    def _range(self, name: str, start: int, end: int, alignment: int) -> tuple[int, int, str]:
        if start < 0 or start % alignment or end > self.size:
            raise ManifestError(f"{name}: bytes {start} to {end} are not an aligned part of {self.size} bytes")
        return start, end, name

    def _check_names(self) -> None:
        for kind, names in (
            ("buffer", [placed.spec.name for placed in self.buffers]),
            ("fence", [word.fence.name for word in self.fences]),
        ):
            if len(set(names)) < len(names):
                raise ManifestError(f"a {kind} is there twice: {', '.join(sorted(names))}")

    def _check_handles(self) -> None:
        if len(self.handle) not in (0, HANDLE_BYTES):
            raise ManifestError(f"a memory handle of {len(self.handle)} bytes instead of {HANDLE_BYTES}")
        for word in self.fences:
            if len(word.events) > MOST_EVENTS:
                raise ManifestError(f"fence {word.fence.name}: {len(word.events)} events, at most {MOST_EVENTS}")
            for handle in word.events:
                if len(handle) != HANDLE_BYTES:
                    raise ManifestError(f"fence {word.fence.name}: an event handle of {len(handle)} bytes")


def lay_out(
    specs: Iterable[BufferSpec], fences: Iterable[FenceName], fence_kind: str
) -> tuple[tuple[Placed, ...], tuple[FenceWord, ...], int]:
    """Places fences and buffers one after the other; returns them and the size of the arena in bytes."""
    words = tuple(FenceWord(fence, fence_kind, index * FENCE_BYTES) for index, fence in enumerate(fences))
    offset = _aligned(len(words) * FENCE_BYTES)
    places = []
    for spec in specs:
        places.append(Placed(spec, offset))
        offset = _aligned(offset + spec.size)
    return tuple(places), words, offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
