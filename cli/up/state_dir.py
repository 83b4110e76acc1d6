"""The directory of one `slipstream up`: who holds it, and where its server is."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.common.errors import AddressInUseError, ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOCK = "up.lock"
_SERVER = "server"


class StateDir:
    """A state directory that this process holds."""

    def __init__(self, path: Path) -> None:
        """Made by `hold`."""
        self.path = path

    @classmethod
    @contextmanager
    def hold(cls, path: Path) -> Iterator[StateDir]:
        """Makes the directory if need be, and holds it until the context ends or the process does.

        Raises AddressInUseError when another process holds it, ConfigError when it cannot be made.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("state_dir", str(path), f"a directory that this user can write to ({error})") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise AddressInUseError("state_dir", str(path)) from error
        try:
            (path / _SERVER).unlink(missing_ok=True)  # of an owner that was killed
            yield cls(path)
        finally:
            (path / _SERVER).unlink(missing_ok=True)
            os.close(lock)

    def announce(self, server: str) -> None:
        """Leaves the server's address for `server_of` to find."""
        new = self.path / f"{_SERVER}.new"
        new.write_text(server, encoding="utf-8")
        new.replace(self.path / _SERVER)


def server_of(path: Path) -> str:
    """Address of the server that was started in this state directory. Raises UnavailableError when none is ready."""
    try:
        return (path / _SERVER).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnavailableError(f"no `slipstream up` is ready in {path}") from None
