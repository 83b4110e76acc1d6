"""The file in /dev/shm that the processes of an arena map.

The process that made a file locks it for as long as it maps it: a file without a lock was left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
from pathlib import Path

from slipstream.common.errors import DeviceError, FailedPreconditionError, ManifestError, OutOfMemoryError

DIRECTORY = Path("/dev/shm")
PREFIX = "slipstream-"
MIB = 2**20
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})


def new_path() -> Path:
    """A path that no other process uses."""
    return DIRECTORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def create_mapped(path: Path, size: int) -> mmap.mmap:
    """Makes and maps a file, all zero, that only this user can open. The process locks it for as long as it maps it.

    Removes files of processes that were killed before they could remove them. Raises OutOfMemoryError if there is no
    room for it, DeviceError if it cannot be made for another reason.
    """
    _remove_leftovers()
    try:
        return _create_mapped(path, size)
    except OSError as error:
        raise _explained(error, size) from error


def open_mapped(path: Path, size: int, *, read_only: bool) -> mmap.mmap:
    """Maps another process's file. Raises ManifestError if it is not one of this user with this size."""
    if path.parent != DIRECTORY or not path.name.startswith(PREFIX):
        raise ManifestError(f"arena path {str(path)!r} is not {DIRECTORY}/{PREFIX}…")
    try:
        access, protection = (os.O_RDONLY, 0) if read_only else (os.O_RDWR, mmap.PROT_WRITE)
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ManifestError(f"arena {str(path)!r}: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != size:
            raise ManifestError(f"arena {path}: not a file of this user with {size} bytes")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ | protection)
    finally:
        os.close(descriptor)


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
        "smaller slots, num_draft_tokens or max_batched_tokens"
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
