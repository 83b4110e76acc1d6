"""Claims the address of a server, before anything that takes long.

A second server must not come between a first one and its clients: gRPC on its own binds a TCP port twice without an
error, and takes over a live Unix socket, which it then removes when it exits.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.errors import AddressInUseError, ConfigError
from slipstream.common.private_files import lock, make_private_directory
from slipstream.common.rpc.address import TcpAddress, UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The errors of a host without IPv6 when `localhost` also stands for ::1.
_NOT_ON_THIS_HOST = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class Listener:
    """An address that this process may serve at: no other, or a set of processes that share its port."""

    def __init__(
        self,
        address: TcpAddress | UnixAddress,
        targets: tuple[str, ...],
        release: ExitStack,
        *,
        field: str,
        is_shared: bool = False,
    ) -> None:
        """Made by `claim` and `join`. `targets`: what gRPC binds; `release`: closes the claims until then."""
        self.address = str(address)
        """The address that clients dial, with the port that was picked for a port of 0."""
        self.is_shared = is_shared
        """True if other processes of a set serve there, too."""
        self._targets = targets
        self._is_unix = isinstance(address, UnixAddress)
        self._release = release
        self._field = field

    @classmethod
    @contextmanager
    def claim(cls, address: str, *, field: str = "address", is_shared: bool = False) -> Iterator[Listener]:
        """Holds `address` until the context ends. With `is_shared`, for processes of this user that `join` it.

        Raises AddressInUseError if another process serves there, ConfigError if none could; both name `field`.
        """
        parsed = parse_address(address, field=field)
        with ExitStack() as held:
            if isinstance(parsed, UnixAddress):
                if is_shared:
                    raise ConfigError(field, address, "HOST:PORT for several processes")
                held.enter_context(_claim_path(parsed.path, field))
                yield cls(parsed, (str(parsed),), ExitStack(), field=field)
            else:
                claims = held.enter_context(ExitStack())
                sockets = _claim_port(parsed, field, claims)
                if is_shared:
                    # Found free without sharing it, because a stranger may share ports, too.
                    parsed = TcpAddress(parsed.host, sockets[0].getsockname()[1])
                    for claim in sockets:
                        claim.close()
                    sockets = _bind_port(parsed, field, claims, is_shared=True)
                yield cls._of_sockets(parsed, sockets, claims, field=field, is_shared=is_shared)

    @classmethod
    @contextmanager
    def join(cls, address: str, *, field: str = "address") -> Iterator[Listener]:
        """An address that another process holds, with `is_shared`, for this one and others. Raises as `claim` does."""
        parsed = parse_address(address, field=field)
        if not isinstance(parsed, TcpAddress) or not parsed.port:
            raise ConfigError(field, address, "HOST:PORT for several processes, the port not 0")
        with ExitStack() as claims:
            sockets = _bind_port(parsed, field, claims, is_shared=True)
            yield cls._of_sockets(parsed, sockets, claims, field=field, is_shared=True)

    @classmethod
    def _of_sockets(
        cls, address: TcpAddress, sockets: list[socket.socket], claims: ExitStack, *, field: str, is_shared: bool
    ) -> Listener:
        port = sockets[0].getsockname()[1]
        targets = tuple(str(TcpAddress(s.getsockname()[0], port)) for s in sockets)
        return cls(TcpAddress(address.host, port), targets, claims, field=field, is_shared=is_shared)

    def bind(self, add_port: Callable[[str], int]) -> None:
        """Lets a gRPC server listen here; `add_port` is its `add_insecure_port`.

        Its option `grpc.so_reuseport` is 1 if `is_shared`, and else 0.
        """
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


def is_claimed(address: str) -> bool:
    """Returns whether a process has claimed a Unix socket, whether it serves there yet or still loads.

    True as well after one that was killed, until the next claim; False for any other kind of address.
    """
    parsed = parse_address(address)
    return isinstance(parsed, UnixAddress) and _lock_of(parsed.path).exists()


def _claim_port(address: TcpAddress, field: str, held: ExitStack) -> list[socket.socket]:
    """Binds a port as `_bind_port` does, and keeps out other claims of this user."""
    sockets = _bind_port(address, field, held)
    for claim in sockets:
        _claim_name(claim, str(address), field, held)
    return sockets


def _bind_port(address: TcpAddress, field: str, held: ExitStack, *, is_shared: bool = False) -> list[socket.socket]:
    """Binds, without listening, a socket for each of the host's addresses; fails if another process listens there.

    With `is_shared`, processes of this user that share the port may listen there.
    """
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
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
            if family == socket.AF_INET6:
                claim.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            claim.bind((sockaddr[0], port, *sockaddr[2:]))
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


def _claim_name(claim: socket.socket, address: str, field: str, held: ExitStack) -> None:
    """Keeps out other claims of this user, which a bound socket does not, by a lock in a directory of this user.

    Without such a directory the second server fails later: when it listens.
    """
    directory = _lock_directory()
    if directory is None:
        return
    host, port = claim.getsockname()[:2]
    path = directory / f"{os.stat('/proc/self/ns/net').st_ino}-{host}-{port}.lock"
    try:
        descriptor = lock(path)
    except BlockingIOError as error:
        raise AddressInUseError(field, address) from error
    except OSError:
        return
    held.callback(os.close, descriptor)
    held.callback(path.unlink, missing_ok=True)


def _lock_directory() -> Path | None:
    """A directory for locks of ports that no other user can write to; None if there is none."""
    with suppress(ConfigError, RuntimeError):  # a user without a home
        directory = Path.home() / ".local" / "state" / "slipstream-ports"
        make_private_directory(directory, field="", given=str(directory))
        return directory
    with suppress(ConfigError):
        directory = Path(tempfile.gettempdir()) / f"slipstream-ports-{os.geteuid()}"
        make_private_directory(directory, field="", given=str(directory))
        return directory
    return None


@contextmanager
def _claim_path(path: Path, field: str) -> Iterator[None]:
    make_private_directory(path.parent, field=field, given=f"unix:{path.parent}/")
    lock_path = _lock_of(path)
    try:
        descriptor = lock(lock_path)
    except BlockingIOError as error:
        raise AddressInUseError(field, f"unix:{path}") from error
    except OSError as error:
        accepted = f"a directory in which this user can make a socket ({error.strerror})"
        raise ConfigError(field, f"unix:{path}", accepted) from error
    try:
        _remove_stale(path, field)
        try:
            yield
        finally:
            # The process that holds the lock is the only one whose socket this can be.
            path.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


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
