"""The directory of one `slipstream up`: who holds it, and where its server is."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.common.errors import AddressInUseError, ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_LOCK = "up.lock"
_SERVER = "server"


@contextmanager
def hold_state_dir(path: Path) -> Iterator[Callable[[str], None]]:
    """Makes the directory if need be, and holds it until the context ends or the process does.

    The context's value leaves the server's address for `server_of` to find. Raises AddressInUseError when another
    process holds the directory, ConfigError when it cannot be made.
    """
    server = path / _SERVER
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

    def announce(address: str) -> None:
        new = server.with_suffix(".new")
        new.write_text(address, encoding="utf-8")
        new.replace(server)

    try:
        server.unlink(missing_ok=True)  # of an owner that was killed
        yield announce
    finally:
        server.unlink(missing_ok=True)
        os.close(lock)


def server_of(path: Path) -> str:
    """Address of the server that was started in this state directory. Raises UnavailableError when none is ready."""
    try:
        return (path / _SERVER).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnavailableError(f"no `slipstream up` is ready in {path}") from None
