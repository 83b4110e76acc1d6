"""Claims the address of a server, before anything that takes long.

A second server must not come between a first one and its clients: gRPC on its own binds a TCP port twice without an
error, and takes over a live Unix socket, which it then removes when it exits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from slipstream.common.errors import AddressInUseError, ConfigError
from slipstream.common.rpc.address import TcpAddress, UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# The errors of a host without IPv6 when `localhost` also stands for ::1.
_NOT_ON_THIS_HOST = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class Listener:
    """An address that this process, and no other, may serve at."""

    def __init__(
        self, address: TcpAddress | UnixAddress, targets: tuple[str, ...], release: ExitStack, *, field: str
    ) -> None:
        """Made by `claim`. `targets`: the addresses that gRPC binds; `release`: closes the claims until then."""
        self.address = str(address)
        """The address that clients dial, with the port that was picked for a port of 0."""
        self._targets = targets
        self._is_unix = isinstance(address, UnixAddress)
        self._release = release
        self._field = field

    @classmethod
    @contextmanager
    def claim(cls, address: str, *, field: str = "address") -> Iterator[Listener]:
        """Holds `address` until the context ends.

        Raises AddressInUseError if another process serves there, ConfigError if none could; both name `field`.
        """
        parsed = parse_address(address, field=field)
        with ExitStack() as held:
            if isinstance(parsed, UnixAddress):
                held.enter_context(_claim_path(parsed.path, field))
                yield cls(parsed, (str(parsed),), ExitStack(), field=field)
            else:
                claims = held.enter_context(ExitStack())
                sockets = _claim_port(parsed, field, claims)
                port = sockets[0].getsockname()[1]
                targets = tuple(str(TcpAddress(s.getsockname()[0], port)) for s in sockets)
                yield cls(TcpAddress(parsed.host, port), targets, claims, field=field)

    def bind(self, add_port: Callable[[str], int]) -> None:
        """Lets a gRPC server, made with `grpc.so_reuseport` 0, listen here; `add_port` is its `add_insecure_port`."""
        # A socket's permissions come from the process's umask: no other thread may create files meanwhile.
        umask = os.umask(0o177) if self._is_unix else None
        try:
            for target in self._targets:
                add_port(target)
        except RuntimeError as error:
            raise AddressInUseError(self._field, self.address) from error
        finally:
            if umask is not None:
                os.umask(umask)
        self._release.close()


def _claim_port(address: TcpAddress, field: str, held: ExitStack) -> list[socket.socket]:
    """Binds, without listening, a socket for each of the host's addresses; fails if another process listens there."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(field, str(address), f"a host that can be resolved ({error})") from error
    port = address.port
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, sockaddr in infos:
        try:
            claim = held.enter_context(socket.socket(family, kind, protocol))
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                claim.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            claim.bind((sockaddr[0], port, *sockaddr[2:]))
            _claim_name(claim, held)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(field, str(address)) from error
            if error.errno in _NOT_ON_THIS_HOST and len(infos) > 1:
                continue
            raise ConfigError(field, str(address), f"an address that this user may listen at ({error})") from error
        sockets.append(claim)
        port = claim.getsockname()[1]
    if not sockets:
        raise ConfigError(field, str(address), "an address of this host")
    return sockets


def _claim_name(claim: socket.socket, held: ExitStack) -> None:
    """Keeps out other claims, which a bound socket does not, by a socket's name in the network namespace."""
    host, port = claim.getsockname()[:2]
    name = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    name.bind(f"\0slipstream/{host}/{port}")


@contextmanager
def _claim_path(path: Path, field: str) -> Iterator[None]:
    _make_private_directory(path.parent, field)
    lock_path = path.with_name(path.name + ".lock")
    lock = _lock(lock_path, path, field)
    try:
        _remove_stale(path, field)
        try:
            yield
        finally:
            # The process that holds the lock is the only one whose socket this can be.
            path.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _make_private_directory(directory: Path, field: str) -> None:
    """Makes a directory that no other user can write to: they could put a socket of their own in our place."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(field, f"unix:{directory}/", f"a directory that this user can create ({error})") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        given = f"{directory} (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})"
        raise ConfigError(field, given, f"a directory of this user (id {os.geteuid()}) with mode 0700")


def _lock(lock_path: Path, path: Path, field: str) -> int:
    """Opens and locks the file beside the socket; the kernel releases the lock however the process ends."""
    while True:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file between our opening and our locking it.
            if _is_file_at(lock, lock_path):
                return lock
        except BlockingIOError as error:
            os.close(lock)
            raise AddressInUseError(field, f"unix:{path}") from error
        os.close(lock)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_stale(path: Path, field: str) -> None:
    """Removes the socket of a process that is gone; one that answers belongs to a server that does not lock."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(field, f"unix:{path}", "a path where there is nothing yet but a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise AddressInUseError(field, f"unix:{path}") from error
        else:
            raise AddressInUseError(field, f"unix:{path}")
