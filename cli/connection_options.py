"""The options of commands that connect to a server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import TYPE_CHECKING, cast

from slipstream.common.settings import Settings, setting

if TYPE_CHECKING:
    from slipstream.client.connection import AccessOptions


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(Settings):
    """As in `AccessOptions` of the client."""

    api_key: str | None = setting(
        None, unit="TOKEN", help="Other users of this host see it here.", unset="the variable SLIPSTREAM_API_KEY"
    )
    tls: bool = setting(False, help="Connect with TLS, and trust the authorities that gRPC brings.")
    tls_ca: Path | None = setting(None, unit="FILE", help="Connect with TLS, and trust these authorities, PEM.")
    tls_cert: Path | None = setting(None, unit="FILE", help="Mutual TLS: the client's certificate, PEM.")
    tls_key: Path | None = setting(None, unit="FILE", help="Its private key, PEM.")

    def access(self) -> AccessOptions:
        """For the client."""
        return cast("AccessOptions", {field.name: getattr(self, field.name) for field in fields(self)})
