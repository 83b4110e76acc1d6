"""The state directory of `slipstream up`: held by one process, with the address of the server that is ready."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError, UnavailableError
from slipstream.common.private_files import lock, make_private_directory, open_new

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOCK = "up.lock"
_SERVER = "server"
_ROOM_BYTES = 32 * 2**20
"""Free bytes that a start needs: the journal and its log take 24 MiB, the services' logs the rest."""


def default_state_dir() -> Path:
    """The user's own state directory, as in the XDG base directory specification; in /tmp for a user without a home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "slipstream"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"slipstream-{os.geteuid()}"


@contextmanager
def hold_state_dir(path: Path) -> Iterator[Callable[[str], None]]:
    """Makes the directory if need be, and holds it until the context ends or the process does.

    The context's value leaves the server's address for `server_of` to find. Raises ConfigError when another process
    holds the directory, when it cannot be made, is open to other users or has no room.
    """
    server = path / _SERVER
    make_private_directory(path, field="state_dir", given=str(path))
    try:
        descriptor = lock(path / _LOCK)
    except BlockingIOError as error:
        raise ConfigError("state_dir", str(path), "a directory that no other `slipstream up` uses") from error
    except OSError as error:
        raise ConfigError("state_dir", str(path), f"a directory that this user can write to ({error})") from error

    def announce(address: str) -> None:
        new = server.with_suffix(".new")
        try:
            with os.fdopen(open_new(new), "w", encoding="utf-8") as file:
                file.write(address)
            new.replace(server)
        except OSError as error:
            raise _no_room(path, error) from error

    try:
        server.unlink(missing_ok=True)  # of an owner that was killed
        _check_room(path)
        yield announce
    finally:
        server.unlink(missing_ok=True)
        os.close(descriptor)


def _check_room(path: Path) -> None:
    """Raises ConfigError unless there is room: without it, no log says why a service ends."""
    room = path / "room"
    try:
        with os.fdopen(open_new(room), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
    except OSError as error:
        raise _no_room(path, error) from error
    finally:
        with suppress(OSError):
            room.unlink()


def _no_room(path: Path, error: OSError) -> ConfigError:
    accepted = f"a directory on a disk with {_ROOM_BYTES // 2**20} MiB free for logs and the journal ({error.strerror})"
    return ConfigError("state_dir", str(path), accepted)


def server_of(path: Path) -> str:
    """Address of the server that was started in this state directory. Raises UnavailableError when none is ready."""
    try:
        return (path / _SERVER).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise UnavailableError(f"no `slipstream up` is ready in {path}") from None
