"""Tests of claims on addresses: against other claims, against strangers, and against a dead owner's leftovers."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import grpc.aio
import pytest

from slipstream.common.errors import AddressInUseError, ConfigError
from slipstream.common.rpc import listener
from slipstream.common.rpc.listener import Listener, is_claimed
from slipstream.common.rpc.serving import GrpcServer
from tests.harness.grpc_server import FREE_PORT, running_server


@pytest.fixture(params=["tcp", "name", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One of each kind."""
    return {"tcp": FREE_PORT, "name": "localhost:0", "unix": f"unix:{tmp_path}/dir/a.sock"}[request.param]


def open_descriptors() -> list[str]:
    """Lists this process's open file descriptors."""
    return sorted(os.listdir("/proc/self/fd"))


def test_a_claim_keeps_others_out_until_it_ends(address: str) -> None:
    before = open_descriptors()
    with Listener.claim(address) as listener:
        with (
            pytest.raises(AddressInUseError, match="listen") as caught,
            Listener.claim(listener.address, field="listen"),
        ):
            pass
        assert caught.value.field == "listen"
    with Listener.claim(listener.address):
        pass
    assert set(open_descriptors()) <= set(before), "some of earlier tests may end meanwhile"


def test_a_claimed_socket_is_known_before_its_server_listens(address: str) -> None:
    """A port's claim is not: a bound socket that does not listen looks as a free one."""
    is_unix = address.startswith("unix:")
    assert not is_claimed(address)
    with Listener.claim(address) as listener:
        assert is_claimed(listener.address) == is_unix
    assert not is_claimed(listener.address)


def test_a_directory_in_which_no_socket_can_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(listener, "lock", fail)
    with (
        pytest.raises(ConfigError, match=r"^listen: .*can make a socket \(No space left on device\)$"),
        Listener.claim(f"unix:{tmp_path}/dir/a.sock", field="listen"),
    ):
        pass
    # A port needs no file: another server at it is noticed when this one listens.
    with Listener.claim(FREE_PORT):
        pass


async def test_a_server_keeps_others_out_until_it_stops(address: str) -> None:
    async with running_server(address=address) as server:
        with pytest.raises(AddressInUseError), Listener.claim(server.address):
            pass
        async with grpc.aio.insecure_channel(server.address) as channel:
            await channel.channel_ready()
    with Listener.claim(server.address):
        pass


async def test_two_servers_cannot_share_a_port_by_a_wildcard() -> None:
    async with running_server() as server:
        port = server.address.rpartition(":")[2]
        with pytest.raises(AddressInUseError), Listener.claim(f"0.0.0.0:{port}"):
            pass


def test_a_stranger_who_shares_ports_keeps_its_own() -> None:
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with pytest.raises(AddressInUseError), Listener.claim(f"127.0.0.1:{stranger.getsockname()[1]}"):
            pass


async def test_processes_of_a_set_share_a_port_and_others_do_not() -> None:
    with Listener.claim(FREE_PORT, is_shared=True) as claim:
        for is_shared in (True, False):
            with pytest.raises(AddressInUseError), Listener.claim(claim.address, is_shared=is_shared):
                pass
        servers = []
        for _ in range(3):
            with Listener.join(claim.address) as listener:
                assert (listener.address, listener.is_shared) == (claim.address, True)
                servers.append(GrpcServer(listener))
                await servers[-1].start()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", int(claim.address.rpartition(":")[2])))
        for server in servers:
            async with grpc.aio.insecure_channel(claim.address) as channel:
                await channel.channel_ready()
            # Each of the others serves on.
            await server.stop(0)
    with Listener.claim(claim.address):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix:/nowhere/a.sock"])
def test_only_a_known_port_is_shared(address: str) -> None:
    with pytest.raises(ConfigError, match="listen"), Listener.join(address, field="listen"):
        pass


def test_a_shared_claim_needs_a_port_that_a_stranger_does_not_share() -> None:
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        with pytest.raises(AddressInUseError), Listener.claim(address, is_shared=True):
            pass
    with pytest.raises(ConfigError), Listener.claim("unix:/nowhere/a.sock", is_shared=True):
        pass


async def test_the_port_is_taken_between_the_claim_and_the_server() -> None:
    with Listener.claim(FREE_PORT, field="listen") as listener, socket.socket() as stranger:
        host, _, port = listener.address.rpartition(":")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((host, int(port)))
        stranger.listen()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        with pytest.raises(AddressInUseError) as caught:
            listener.bind(server.add_insecure_port)
        assert caught.value.field == "listen"


def test_a_socket_name_that_any_user_can_take_blocks_no_port() -> None:
    with Listener.claim(FREE_PORT) as listener:
        port = listener.address.rpartition(":")[2]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0slipstream/127.0.0.1/{port}")
        with Listener.claim(listener.address):
            pass


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_port_is_locked_in_a_directory_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    taken = home / ".local" / "state" / "slipstream-ports"
    taken.mkdir(parents=True)
    taken.chmod(mode)
    shared.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))
    with Listener.claim(FREE_PORT) as listener:
        # A directory that others could write to is left alone.
        where = taken if mode == 0o700 else shared / f"slipstream-ports-{os.getuid()}"
        (lock,) = where.iterdir()
        assert lock.name.endswith(f"-127.0.0.1-{listener.address.rpartition(':')[2]}.lock")
        with pytest.raises(AddressInUseError), Listener.claim(listener.address):
            pass
    assert list(where.iterdir()) == []


def test_a_port_is_claimed_where_nothing_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with Listener.claim(FREE_PORT) as listener:
        assert listener.address


@pytest.mark.parametrize("address", ["192.0.2.1:50051", "no-such-host.invalid:50051"])
def test_an_address_that_is_not_this_host_s_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="listen") as caught, Listener.claim(address, field="listen"):
        pass
    assert not isinstance(caught.value, AddressInUseError)


async def test_only_this_user_can_reach_the_socket(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        async with running_server(address=f"unix:{tmp_path}/new/dir/a.sock"):
            assert stat.S_IMODE((tmp_path / "new/dir").stat().st_mode) == 0o700
            assert stat.S_IMODE((tmp_path / "new/dir/a.sock").stat().st_mode) == 0o600
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    assert list((tmp_path / "new/dir").iterdir()) == []


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="a link"), Listener.claim(f"unix:{tmp_path}/link/a.sock"):
        pass


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_directory_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"), Listener.claim(f"unix:{tmp_path}/a.sock"):
        pass


def test_a_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("precious")
    with pytest.raises(ConfigError), Listener.claim(f"unix:{tmp_path}/a.sock"):
        pass
    assert (tmp_path / "a.sock").read_text() == "precious"


def test_a_socket_of_a_stranger_without_our_lock_stays(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "a.sock"))
        stranger.listen()
        with pytest.raises(AddressInUseError), Listener.claim(f"unix:{tmp_path}/a.sock"):
            pass
        assert (tmp_path / "a.sock").exists()


def test_the_socket_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    owner = _run(
        f"""
        import os, signal, socket
        from slipstream.common.rpc.listener import Listener
        with Listener.claim("unix:{tmp_path}/a.sock"):
            server = socket.socket(socket.AF_UNIX)
            server.bind("{tmp_path}/a.sock")
            server.listen()
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert owner.returncode == -9
    assert (tmp_path / "a.sock").exists()
    with Listener.claim(f"unix:{tmp_path}/a.sock"):
        assert not (tmp_path / "a.sock").exists()


def test_a_claim_loads_nothing_heavy() -> None:
    done = _run(
        """
        import sys
        from slipstream.common.rpc import listener
        from slipstream.common.rpc import logs
        heavy = {"torch", "transformers", "grpc", "google", "numpy", "prometheus_client"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert done.returncode == 0, done.stderr


def _run(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
