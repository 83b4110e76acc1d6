"""Tests of the addresses that a server may listen at, and of TLS with real certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.access import AccessSettings, check_internal, is_public
from tests.harness.grpc_server import running_server

if TYPE_CHECKING:
    from pathlib import Path

SENTENCE = (
    "a loopback address or unix:PATH; any other address needs --tls-cert and --tls-key "
    "(mutual TLS with --tls-client-ca), or --insecure-public"
)


class Certificates:
    """Files of an authority, a server's certificate for loopback, and a client's."""

    def __init__(self, folder: Path) -> None:
        """Writes all of them."""
        authority = trustme.CA()
        server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("client@example.org")
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        authority.cert_pem.write_to_path(self.ca)
        for blob in server.cert_chain_pems:
            blob.write_to_path(self.cert, append=True)
        server.private_key_pem.write_to_path(self.key)
        self.client_cert, self.client_key = client.cert_chain_pems[0].bytes(), client.private_key_pem.bytes()

    def channel(self, address: str, *, has_client_cert: bool) -> grpc.aio.Channel:
        """A client's connection."""
        pair = (self.client_key, self.client_cert) if has_client_cert else (None, None)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.ca.read_bytes(), *pair))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """New ones."""
    return Certificates(tmp_path)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.9.8.7:1", "localhost:1", "[::1]:1", "unix:/tmp/x.sock"], ids=str
)
def test_an_address_of_this_host_alone_needs_nothing(address: str) -> None:
    assert not is_public(address)
    AccessSettings().check_address(address)


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "192.0.2.1:1", "no-such-host.invalid:1"])
def test_a_public_address_is_refused_with_the_ways_out(address: str, certificates: Certificates) -> None:
    with pytest.raises(ConfigError) as caught:
        AccessSettings().check_address(address)
    assert str(caught.value) == f"listen: got {address!r}, accepted: {SENTENCE}"
    AccessSettings(insecure_public=True).check_address(address)
    AccessSettings(tls_cert=certificates.cert, tls_key=certificates.key).check_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "0.0.0.0:0", "localhost:1"])
def test_an_internal_service_has_a_unix_socket(address: str) -> None:
    check_internal("unix:/run/a.sock")
    with pytest.raises(ConfigError, match=r"^listen: .*unix:PATH"):
        check_internal(address)


def test_settings_that_need_each_other(certificates: Certificates, tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tls_key", {"tls_cert": certificates.cert}),
        ("tls_cert", {"tls_key": certificates.key}),
        ("tls_cert", {"tls_client_ca": certificates.ca}),
        ("tls_cert", {"tls_cert": tmp_path / "none", "tls_key": certificates.key}),
        ("tls_cert", {"tls_cert": certificates.key, "tls_key": certificates.cert}),
        ("tls_client_ca", {"tls_cert": certificates.cert, "tls_key": certificates.key, "tls_client_ca": __file__}),
        ("api_keys", {"key_streams": 3}),
        ("api_keys", {"key_tokens": 3}),
        ("max_calls", {"max_calls": 0}),
    ]
    for field, settings in wrong:
        paths = {name: type(tmp_path)(value) if name.startswith("tls") else value for name, value in settings.items()}
        with pytest.raises(ConfigError, match=f"^{field}: "):
            AccessSettings(**paths)


async def check(channel: grpc.aio.Channel) -> int:
    """The whole server's health."""
    async with channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        status: int = answer.status
        return status


async def test_tls(certificates: Certificates) -> None:
    access = AccessSettings(tls_cert=certificates.cert, tls_key=certificates.key)
    async with running_server(address="127.0.0.1:0", access=access) as server:
        assert await check(certificates.channel(server.address, has_client_cert=False)) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(grpc.aio.insecure_channel(server.address))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        strangers = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)certificate"):
            await check(grpc.aio.secure_channel(server.address, strangers))


async def test_mutual_tls(certificates: Certificates) -> None:
    access = AccessSettings(tls_cert=certificates.cert, tls_key=certificates.key, tls_client_ca=certificates.ca)
    async with running_server(address="127.0.0.1:0", access=access) as server:
        assert await check(certificates.channel(server.address, has_client_cert=True)) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(certificates.channel(server.address, has_client_cert=False))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
