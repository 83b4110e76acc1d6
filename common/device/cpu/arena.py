"""The arena of the CPU: a file in /dev/shm that each process maps."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from slipstream.common.device.cpu.fence import HostFence, ReadOnlyFence
from slipstream.common.device.manifest import HOST, Manifest, lay_out
from slipstream.common.errors import DeviceError, FailedPreconditionError, ManifestError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.common.device.manifest import BufferSpec
    from slipstream.common.worker.step import FenceName

KIND = "file"
FENCE_KIND = HOST
DIRECTORY = Path("/dev/shm")
MIB = 2**20
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})
PREFIX = "slipstream-"


class HostArena:
    """Implements `Arena` on a mapped file.

    The process that made the file locks it for as long as it maps it: a file without a lock was left behind.
    """

    def __init__(
        self, manifest: Manifest, memory: mmap.mmap, *, is_owner: bool = False, read_only: bool = False
    ) -> None:
        """Use `create` or `open`."""
        self.manifest = manifest
        self._memory = _without_its_flag(memory) if read_only else memory
        self._is_owner = is_owner
        self._places = {placed.spec.name: placed for placed in manifest.buffers}
        view, fence = memoryview(self._memory), ReadOnlyFence if read_only else HostFence
        self._fences = {word.fence: fence(view, word.offset) for word in manifest.fences}

    @classmethod
    def create(cls, specs: Iterable[BufferSpec], fences: Iterable[FenceName]) -> HostArena:
        """Makes a file, all zero, that only this user can open.

        Removes files of processes that were killed before they could seal them. Raises OutOfMemoryError if there is no
        room for it, DeviceError if it cannot be made for another reason.
        """
        buffers, words, size = lay_out(specs, fences, FENCE_KIND)
        path = DIRECTORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        manifest = Manifest(KIND, str(path), size, buffers, words)
        manifest.check()
        _remove_leftovers()
        try:
            return cls(manifest, _create_mapped(path, size), is_owner=True)
        except OSError as error:
            raise _explained(error, size) from error

    @classmethod
    def open(cls, manifest: Manifest, *, read_only: bool = False) -> HostArena:
        """Maps another process's file. Raises ManifestError if it is not what the manifest says.

        `read_only`: the kernel lets this process write nothing through the mapping; what does is killed by SIGSEGV.
        """
        if manifest.kind != KIND:
            raise ManifestError(f"arena kind {manifest.kind!r}: this worker opens {KIND!r}")
        for word in manifest.fences:
            if word.kind != FENCE_KIND:
                raise ManifestError(f"fence {word.fence.name} of kind {word.kind!r}: this worker opens {FENCE_KIND!r}")
        manifest.check()
        path = Path(manifest.path)
        if path.parent != DIRECTORY or not path.name.startswith(PREFIX):
            raise ManifestError(f"arena path {manifest.path!r} is not {DIRECTORY}/{PREFIX}…")
        try:
            access, protection = (os.O_RDONLY, 0) if read_only else (os.O_RDWR, mmap.PROT_WRITE)
            descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise ManifestError(f"arena {manifest.path!r}: {error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != manifest.size:
                raise ManifestError(f"arena {manifest.path}: not a file of this user with {manifest.size} bytes")
            memory = mmap.mmap(descriptor, manifest.size, prot=mmap.PROT_READ | protection)
            return cls(manifest, memory, read_only=read_only)
        finally:
            os.close(descriptor)

    def tensor(self, name: str) -> torch.Tensor:
        placed = self._places.get(name)
        if placed is None:
            raise ManifestError(f"the arena has no buffer {name}")
        spec = placed.spec
        flat = torch.frombuffer(self._memory, dtype=spec.dtype, count=math.prod(spec.shape), offset=placed.offset)
        return flat.view(spec.shape)

    def fence(self, name: FenceName) -> HostFence:
        if name not in self._fences:
            raise ManifestError(f"the arena has no fence {name.name}")
        return self._fences[name]

    def seal(self) -> None:
        """Removes the file's name: the memory lives as long as it is mapped, and a crash leaves nothing behind."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.manifest.path)

    def close(self) -> None:
        """The mapping goes with its last view."""
        if self._is_owner:
            self.seal()
        self._fences.clear()


def _without_its_flag(memory: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    """Returns a buffer of the same memory that does not say that it cannot be written.

    PyTorch and ctypes know no tensors and words that are only read: PyTorch warns of them, ctypes refuses.
    """
    view = np.frombuffer(memory, np.uint8)
    array = (ctypes.c_char * len(view)).from_address(view.ctypes.data)
    array.mapped = view  # type: ignore[attr-defined]  # keeps the memory mapped for as long as the array lives
    return array


def _create_mapped(path: Path, size: int) -> mmap.mmap:
    descriptor = _create_locked(path)
    try:
        os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm shows here, not as SIGBUS later
        # The mapping keeps a duplicate of the descriptor, and with it the lock.
        return mmap.mmap(descriptor, size)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _explained(error: OSError, size: int) -> FailedPreconditionError:
    if error.errno not in _NO_ROOM:
        return DeviceError(f"shared memory cannot be made in {DIRECTORY}: {error.strerror}")
    total, _, free = shutil.disk_usage(DIRECTORY)
    return OutOfMemoryError(
        f"{DIRECTORY} has no room for {-(-size // MIB)} MiB of shared memory ({error.strerror}): {free // MIB} of "
        f"{total // MIB} MiB are free. Remove what else lies there, make it larger (containers: shm_size), or take a "
        "smaller slots, num_draft_tokens or chunk_tokens"
    )


def _create_locked(path: Path) -> int:
    """Makes a new, empty, locked file and returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Another process may have removed it as a leftover before it was locked.
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_leftovers() -> None:
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        # Files of other users, locked files and those that are gone by now stay.
        with contextlib.suppress(OSError):
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)
