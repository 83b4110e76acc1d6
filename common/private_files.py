"""Directories and files that only this user can reach, so that no other user can plant a link or a socket in them."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def make_private_directory(directory: Path, *, field: str, given: str) -> None:
    """Makes the directory unless it is there. Raises ConfigError unless only this user has it, and not a link."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(field, given, f"a directory that this user can create ({error})") from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        kind = "" if stat.S_ISDIR(found.st_mode) else "a link, "
        description = f"{given} ({kind}owner {found.st_uid}, mode {mode:04o})"
        raise ConfigError(field, description, f"a directory of this user (id {os.geteuid()}) with mode 0700, no link")


def open_new(path: Path) -> int:
    """Opens an empty file for appending, in place of what is at the path; a link there is replaced, not followed."""
    path.unlink(missing_ok=True)
    return os.open(path, _FLAGS | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)


def lock(path: Path) -> int:
    """Makes and locks a file; returns its descriptor. The kernel releases the lock however the process ends.

    Raises BlockingIOError if another process has it, OSError if it cannot be opened or is a link.
    """
    while True:
        descriptor = os.open(path, _FLAGS | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file between our opening and our locking it.
            if _is_file_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
