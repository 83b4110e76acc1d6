"""Addresses of services, `HOST:PORT` or `unix:PATH`, and the settings of connections to them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from slipstream.common.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107
"""The kernel's limit, without the closing zero."""

COMMANDS_ENDING = ".commands"
"""A worker's socket for commands has the path of its own socket, with this after it."""

_SCHEMES = ("dns", "ipv4", "ipv6")
"""Schemes of gRPC that the address that a client dials may begin with, before HOST:PORT."""

ACCEPTED = "HOST:PORT with a port of 0 to 65535, [IPV6]:PORT, or unix:PATH"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, by name or number, and a port; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket, by its absolute path."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


def parse_address(text: str, *, field: str = "address") -> TcpAddress | UnixAddress:
    """Reads an address; `str` of the result is what gRPC dials. Raises ConfigError naming `field`."""
    if text.startswith("unix:"):
        return _parse_unix(text, field)
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if not colon or not host or is_bracketed != (":" in host) or "/" in host:
        raise ConfigError(field, text, ACCEPTED)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16):
        raise ConfigError(field, text, ACCEPTED)
    return TcpAddress(host, int(port))


def path_beside(address: str, ending: str) -> Path | None:
    """The path of the socket at this address with an ending after it; None where there can be none."""
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        return None
    path = parsed.path.with_name(parsed.path.name + ending)
    return path if len(bytes(path)) <= MAX_UNIX_PATH_BYTES else None


def check_target(text: str, *, field: str = "address") -> None:
    """Raises ConfigError naming `field` unless a client can dial `text`: an address, or a name with a scheme of gRPC's.

    https://github.com/grpc/grpc/blob/master/doc/naming.md
    """
    scheme, _, rest = text.partition(":")
    if scheme not in _SCHEMES or rest.isdigit():  # a host may be called as a scheme
        parse_address(text, field=field)
        return
    try:
        for endpoint in rest.rpartition("/")[2].split(","):
            parse_address(endpoint)
    except ConfigError:
        raise ConfigError(field, text, f"{scheme}:HOST:PORT, or {scheme}:///HOST:PORT") from None


def _parse_unix(text: str, field: str) -> UnixAddress:
    path = text.removeprefix("unix:")
    if path.startswith("///"):
        path = path[2:]
    if not path or path.endswith("/") or "\0" in path:
        raise ConfigError(field, text, ACCEPTED)
    absolute = Path(path).absolute()
    size = len(bytes(absolute))
    if size > MAX_UNIX_PATH_BYTES:
        raise ConfigError(field, text, f"a path of at most {MAX_UNIX_PATH_BYTES} bytes; this one has {size}")
    return UnixAddress(absolute)


def proxy_options(address: str) -> list[tuple[str, int]]:
    """Arguments of a channel to `address`: on this host the proxy of the environment (`http_proxy`) is not asked."""
    return [("grpc.enable_http_proxy", 0)] if _is_on_this_host(address) else []


def _is_on_this_host(address: str) -> bool:
    try:
        parsed = parse_address(address)
        return (
            isinstance(parsed, UnixAddress)
            or parsed.host == "localhost"
            or ipaddress.ip_address(parsed.host).is_loopback
        )
    except (ConfigError, ValueError):  # a name, or another kind of gRPC's targets
        return False


ChannelOption = tuple[str, str | int]

CONNECT_TIMEOUT_S = 5.0
"""Time for which a client tries a server that has never answered; also the limit of one attempt to connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Pings on an idle connection, which find a peer that hangs; one that was killed is noticed at once."""

    interval_ms: int = 10_000
    """Silence after which a ping is sent."""
    timeout_ms: int = 5_000
    """Time for the answer; then the connection is given up, and its calls end with UNAVAILABLE."""

    def options(self) -> list[ChannelOption]:
        """Returns the arguments of a gRPC channel or server."""
        return [
            ("grpc.keepalive_time_ms", self.interval_ms),
            ("grpc.keepalive_timeout_ms", self.timeout_ms),
            # Without it the two above do not end a connection whose peer is stopped but not dead.
            ("grpc.http2.ping_timeout_ms", self.timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


SAME_HOST = Keepalive(interval_ms=2_000, timeout_ms=1_000)
"""Between our own processes."""
