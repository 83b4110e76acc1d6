"""Addresses, as users write them."""

from __future__ import annotations

import pytest

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES, check_target, parse_address, proxy_options


@pytest.mark.parametrize(
    ("text", "dialled"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("localhost:0", "localhost:0"),
        ("[::1]:65535", "[::1]:65535"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
        ("unix:///run/a.sock", "unix:/run/a.sock"),
    ],
)
def test_an_address_is_what_is_dialled(text: str, dialled: str) -> None:
    assert str(parse_address(text)) == dialled


def test_a_relative_path_becomes_absolute(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert str(parse_address("unix:a/b.sock")) == f"unix:{tmp_path}/a/b.sock"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "50051",
        ":50051",
        "host:",
        "host:-1",
        "host:65536",
        "host:" + "9" * 5000,
        "host:1a",
        "host:١",
        "::1:50051",
        "[::1]",
        "[host]:1",
        "http://host:1",
        "unix:",
        "unix:/run/",
        "unix:a\x00b",
    ],
)
def test_an_invalid_address_is_refused_by_the_field_s_name(text: str) -> None:
    with pytest.raises(ConfigError, match="listen: got ") as caught:
        parse_address(text, field="listen")
    assert caught.value.field == "listen"


def test_the_longest_path_of_a_socket() -> None:
    longest = "/" + "é" * ((MAX_UNIX_PATH_BYTES - 1) // 2)
    assert len(longest.encode()) == MAX_UNIX_PATH_BYTES
    parse_address(f"unix:{longest}")
    with pytest.raises(ConfigError, match="this one has 108"):
        parse_address(f"unix:{longest}x")


@pytest.mark.parametrize("address", ["unix:/run/a.sock", "127.0.0.1:1", "127.0.0.53:1", "[::1]:1", "localhost:1"])
def test_no_proxy_is_asked_for_an_address_on_this_host(address: str) -> None:
    assert proxy_options(address) == [("grpc.enable_http_proxy", 0)]


@pytest.mark.parametrize("address", ["10.0.0.1:1", "gpu.example:1", "dns:///gpu.example:1"])
def test_the_environment_s_proxy_is_asked_for_other_hosts(address: str) -> None:
    assert proxy_options(address) == []


@pytest.mark.parametrize(
    "text",
    [
        *("gpu:1", "dns:gpu:1", "dns:///gpu:1", "dns://10.0.0.53/gpu:1", "dns:1"),
        *("ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1", "unix:/run/a.sock", "unix:///run/a.sock"),
    ],
)
def test_a_client_dials_all_that_grpc_does(text: str) -> None:
    check_target(text)


@pytest.mark.parametrize("text", ["gpu", "dns:///gpu", "dns:gpu", "dns:", "ipv4:10.0.0.1", "http://gpu:1", "unix:"])
def test_what_no_client_can_dial_is_refused_by_the_field_s_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^server: got "):
        check_target(text, field="server")
