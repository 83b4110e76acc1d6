"""Tests of the addresses that a server may listen at, and of TLS with real certificates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipstream.client.connection import AccessOptions, open_async_channel, open_channel
from slipstream.common.errors import ConfigError
from slipstream.common.rpc.access import AccessSettings, check_internal, is_public
from slipstream.common.rpc.service_options import ServiceOptions
from slipstream.common.rpc.serving import GrpcServer
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.keys import KeyFile
from slipstream.scheduler.config import SchedulerConfig
from tests.harness.certificates import Certificates
from tests.harness.grpc_server import running_server

SENTENCE = (
    "a loopback address or unix:PATH; any other address needs --tls-cert and --tls-key "
    "(mutual TLS with --tls-client-ca), or --insecure-public"
)


@pytest.fixture
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """New ones."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


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


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_client_ca", "api_keys"])
def test_a_file_that_cannot_be_read_is_named(certificates: Certificates, field: str) -> None:
    """One that even the superuser cannot read, and one whose path the operating system does not even look at."""
    files = {"tls_cert": certificates.cert, "tls_key": certificates.key, "tls_client_ca": certificates.ca}
    with pytest.raises(ConfigError, match=f"^{field}: .*a file that this user can read"):
        AccessSettings(**{**files, field: Path("/", "x" * 300)})
    with pytest.raises(ConfigError, match=f"^{field}: .*a file that this user can read"):
        KeyFile(AccessSettings(**{**files, field: Path("/proc/self/mem")}).api_keys or Path())


async def health(address: str, **access: Unpack[AccessOptions]) -> int:
    """The whole server's health, by a client with this access."""
    async with open_async_channel(address, (), access) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        status: int = answer.status
        return status


async def refused(address: str, **access: Unpack[AccessOptions]) -> None:
    """Checks that no connection comes about."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(address, **access)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tls(certificates: Certificates, tmp_path: Path) -> None:
    access = AccessSettings(tls_cert=certificates.cert, tls_key=certificates.key)
    async with running_server(access=access) as server:
        assert await health(server.address, tls_ca=certificates.ca) == 1
        await refused(server.address)
        await refused(server.address, tls=True)
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        await refused(server.address, tls_ca=tmp_path / "other.pem")


async def test_mutual_tls(certificates: Certificates, tmp_path: Path) -> None:
    own, stranger = certificates, Certificates(tmp_path)
    access = AccessSettings(tls_cert=own.cert, tls_key=own.key, tls_client_ca=own.ca)
    async with running_server(access=access) as server:
        assert await health(server.address, tls_ca=own.ca, tls_cert=own.client_cert, tls_key=own.client_key) == 1
        await refused(server.address, tls_ca=own.ca)
        await refused(server.address, tls_ca=own.ca, tls_cert=stranger.client_cert, tls_key=stranger.client_key)


def test_a_client_says_which_file_is_wrong(certificates: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tls_ca: "):
        open_channel("127.0.0.1:1", (), {"tls_ca": tmp_path / "none"})
    with pytest.raises(ConfigError, match=r"^tls_cert: .*tls_key"):
        open_channel("127.0.0.1:1", (), {"tls_cert": certificates.client_cert})


async def has_reflection(server: GrpcServer) -> bool:
    """True if reflection is served; it must be unknown otherwise."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.address.rpartition(':')[2]}") as channel:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
        with suppress(grpc.aio.AioRpcError):
            await call.read()
            await call.read()
        code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED)
        return code is grpc.StatusCode.OK


async def test_reflection_is_off_at_a_public_address_unless_it_is_asked_for() -> None:
    async with running_server() as server:
        assert await has_reflection(server)
    async with running_server(address="0.0.0.0:0", access=AccessSettings(insecure_public=True)) as server:
        assert not await has_reflection(server)
    asked = AccessSettings(insecure_public=True, reflection=True)
    async with running_server(address="0.0.0.0:0", access=asked) as server:
        assert await has_reflection(server)


@pytest.mark.parametrize(
    ("service", "options", "message"),
    [
        ("gateway.main", "--scheduler unix:s.sock --listen 0.0.0.0:0", f"accepted: {SENTENCE}"),
        ("scheduler.main", "--verify unix:v.sock --listen 127.0.0.1:0", "accepted: unix:PATH, in a directory"),
        ("services.verify_main", "--model . --listen 127.0.0.1:0", "accepted: unix:PATH, in a directory"),
        ("scheduler.main", "--verify v --listen unix:s.sock", "verify: got 'v'"),
    ],
)
def test_a_service_checks_its_addresses_before_it_starts(service: str, options: str, message: str) -> None:
    command = [sys.executable, "-m", f"slipstream.{service}", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SchedulerConfig(verify="here"), "verify"),
        (lambda: SchedulerConfig(verify="unix:/v", draft="host"), "draft"),
        (lambda: GatewayConfig(scheduler="127.0.0.1:1"), "scheduler"),
        (lambda: GatewayConfig(scheduler="unix:/s", private_listen="here"), "private_listen"),
        (lambda: GatewayConfig(scheduler="unix:"), "scheduler"),
        (lambda: ServiceOptions(listen="unix:/s", metrics_port=65536), "metrics_port"),
    ],
)
def test_what_is_no_address_is_refused_by_the_option_s_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: got "):
        make()
