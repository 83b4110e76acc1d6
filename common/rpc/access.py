"""Who may reach a server that clients call: its addresses, its TLS, and the bounds on connections and calls."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import Any

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.address import TcpAddress, parse_address
from slipstream.common.settings import Settings, setting

ACCEPTED_ADDRESSES = (
    "a loopback address or unix:PATH; any other address needs --tls-cert and --tls-key "
    "(mutual TLS with --tls-client-ca), or --insecure-public"
)

MAX_CALLS = 2**16


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a directory on its way that this user may not enter
        return False


_FILE: dict[str, Any] = {"unit": "FILE", "accepts": _is_file, "accepted": "a file that this user can read"}


@dataclass(frozen=True, kw_only=True)
class AccessSettings(Settings, heading="Access of clients"):
    """The settings of a server for clients. Internal services have none: they listen on Unix sockets only."""

    tls_cert: Path | None = setting(None, help="The server's certificate and its chain, PEM; needs --tls-key.", **_FILE)
    tls_key: Path | None = setting(None, help="The certificate's private key, PEM.", **_FILE)
    tls_client_ca: Path | None = setting(
        None, help="Mutual TLS: clients must show a certificate that one of these authorities signed, PEM.", **_FILE
    )
    insecure_public: bool = setting(False, help="Listen at an address other than loopback without TLS.")
    reflection: bool = setting(False, help="Serve reflection at an address other than loopback, too.")
    max_connections: int = setting(
        1024, help="Connections of clients; further ones are closed.", unit="N", low=1, high=2**16
    )
    max_calls: int = setting(
        4096,
        help="Calls at a time; further ones are refused, health checks are not counted.",
        unit="N",
        low=1,
        high=MAX_CALLS,
    )
    api_keys: Path | None = setting(
        None,
        help="A line NAME:TOKEN for each client, who must send the token; read again when it changes.",
        unset="no token is asked for",
        **_FILE,
    )
    key_streams: int | None = setting(
        None, help="Streams that a key may have open.", unit="N", low=1, high=2**20, unset="no limit"
    )
    key_tokens: int | None = setting(
        None,
        help="Tokens that a key may have in flight: prompt and max_new_tokens of each unfinished sample.",
        unit="N",
        low=1,
        high=2**40,
        unset="no limit",
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field."""
        super().__post_init__()
        for given, needed in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ConfigError(needed, None, f"a file, because --{given.replace('_', '-')} is given")
        for name in ("key_streams", "key_tokens"):
            if getattr(self, name) is not None and self.api_keys is None:
                raise ConfigError("api_keys", None, f"a file, because --{name.replace('_', '-')} is given")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_certificate(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def shares_port(self) -> bool:
        """True if several processes serve at the address, which another one holds for them."""
        return False

    @property
    def has_tls(self) -> bool:
        """True if connections are encrypted."""
        return self.tls_cert is not None

    def check_address(self, address: str, *, field: str = "listen") -> None:
        """Raises ConfigError for an address that other hosts can reach, unless that is secured or asked for."""
        if not (self.has_tls or self.insecure_public) and is_public(address):
            raise ConfigError(field, address, ACCEPTED_ADDRESSES)

    def credentials(self) -> Any:
        """Returns the `grpc.ServerCredentials` of the server; None without TLS. Raises ConfigError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        import grpc

        pair = (_content(self.tls_key, "tls_key"), _content(self.tls_cert, "tls_cert"))
        client_ca = None if self.tls_client_ca is None else _content(self.tls_client_ca, "tls_client_ca")
        return grpc.ssl_server_credentials(
            [pair], root_certificates=client_ca, require_client_auth=client_ca is not None
        )


def check_internal(address: str, *, field: str = "listen") -> None:
    """Raises ConfigError unless `address` is a Unix socket: only this user may reach an internal service."""
    if not address.startswith("unix:"):
        raise ConfigError(field, address, "unix:PATH, in a directory that only this user opens")
    parse_address(address, field=field)


def is_public(address: str) -> bool:
    """True if other hosts may reach a server at `address`: it is neither a Unix socket nor only on loopback.

    A name that cannot be resolved counts as public. Raises ConfigError for what is no address.
    """
    parsed = parse_address(address, field="listen")
    if not isinstance(parsed, TcpAddress):
        return False
    try:
        infos = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    hosts = [str(sockaddr[0]).partition("%")[0] for *_, sockaddr in infos]
    return not all(ipaddress.ip_address(host).is_loopback for host in hosts)


def _check_certificate(cert: Path, key: Path, client_ca: Path | None) -> None:
    import ssl

    for field, path in (("tls_cert", cert), ("tls_key", key), ("tls_client_ca", client_ca)):
        if path is not None:
            _content(path, field)  # an error of `ssl` does not say which file cannot be read
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # An empty password: a key that has one must not ask for it at a terminal.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        accepted = f"a certificate in PEM, and its key without a password in --tls-key ({error})"
        raise ConfigError("tls_cert", str(cert), accepted) from error
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except OSError as error:
        raise ConfigError("tls_client_ca", str(client_ca), f"certificates in PEM ({error})") from error


def _content(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(field, str(path), f"a file that this user can read ({error})") from error
