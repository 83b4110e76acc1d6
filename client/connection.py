"""Connections of clients: plain or with TLS, and with the API key that each call sends."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import grpc
import grpc.aio

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.address import check_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.rpc.address import ChannelOption

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
"""Environment variable with the API key of clients that are given none."""


class AccessOptions(TypedDict, total=False):
    """Credentials of a client; files are in PEM. Any of the last four makes it connect with TLS."""

    api_key: str | None
    """The token of a key, without its name; by default the variable SLIPSTREAM_API_KEY."""
    tls: bool
    """TLS with the authorities that gRPC has."""
    tls_ca: str | Path | None
    """TLS with these authorities instead."""
    tls_cert: str | Path | None
    """Mutual TLS: the client's certificate."""
    tls_key: str | Path | None
    """Its key."""


def open_async_channel(address: str, options: Sequence[ChannelOption], access: AccessOptions) -> Any:
    """Returns a `grpc.aio.Channel`. Raises ConfigError for no address, and for files that cannot be used."""
    return _open(address, options, access, grpc.aio.insecure_channel, grpc.aio.secure_channel)


def open_channel(address: str, options: Sequence[ChannelOption], access: AccessOptions) -> Any:
    """Returns a `grpc.Channel`. Raises ConfigError for files that cannot be used."""
    return _open(address, options, access, grpc.insecure_channel, grpc.secure_channel)


def _open(
    address: str,
    options: Sequence[ChannelOption],
    access: AccessOptions,
    insecure: Callable[..., Any],
    secure: Callable[..., Any],
) -> Any:
    check_target(address)
    credentials = _credentials(access)
    if credentials is None:
        channel = insecure(address, options=options)
    else:
        channel = secure(address, credentials, options=options)
    api_key = access.get("api_key") or os.environ.get(API_KEY_VARIABLE)
    return with_key(channel, api_key) if api_key else channel


def with_key(channel: Any, api_key: str) -> Any:
    """Returns the channel with a key that its calls send, in place of any other. Raises ConfigError."""
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ConfigError("api_key", f"{len(api_key)} characters", "printable ASCII without spaces")
    return _KeyedChannel(channel.plain if isinstance(channel, _KeyedChannel) else channel, api_key)


def _credentials(access: AccessOptions) -> Any:
    names = ("tls_ca", "tls_key", "tls_cert")
    ca, key, cert = files = [_content(name, access.get(name)) for name in names]
    if not access.get("tls") and files == [None, None, None]:
        return None
    if ca is not None:
        _check_authorities(ca, access.get("tls_ca"))
    if (key is None) != (cert is None):
        raise ConfigError("tls_cert", access.get("tls_cert"), "a file if and only if there is a tls_key")
    return grpc.ssl_channel_credentials(ca, key, cert)


def _check_authorities(content: bytes, path: object) -> None:
    """Raises ConfigError: gRPC itself would only say that no connection can be made."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls_ca", str(path), f"a file with certificates in PEM ({error})") from error


def _content(name: str, path: object) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(str(path)).read_bytes()
    except OSError as error:
        raise ConfigError(name, str(path), f"a file that this user can read ({error})") from error


class _KeyedChannel:
    """A channel whose calls send an API key, also without TLS, where gRPC's own call credentials refuse to."""

    def __init__(self, channel: Any, api_key: str) -> None:
        self.plain = channel
        """Returns a client on the same channel, without a key."""
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.plain, name)
        return partial(self._method, found) if name in ("unary_unary", "unary_stream", "stream_stream") else found

    async def __aenter__(self) -> _KeyedChannel:
        await self.plain.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.plain.__aexit__(*error)

    def _method(self, make: Callable[..., Any], *arguments: Any, **more: Any) -> Callable[..., Any]:
        return partial(make(*arguments, **more), metadata=self._metadata)
