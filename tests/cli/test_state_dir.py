"""One supervisor in a state directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.state_dir import hold_state_dir, server_of
from slipstream.common.errors import ConfigError, UnavailableError


def test_only_one_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with hold_state_dir(path) as announce:
        announce("127.0.0.1:1")
        with pytest.raises(ConfigError, match=r"^state_dir: .*no other `slipstream up` uses"), hold_state_dir(path):
            pass
        assert server_of(path) == "127.0.0.1:1"
    with pytest.raises(UnavailableError):
        server_of(path)
    with hold_state_dir(path):
        pass


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_directory_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"^state_dir: .*mode 0700"), hold_state_dir(path):
        pass


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"^state_dir: .*a directory of this user"), hold_state_dir(path):
        pass


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"^state_dir: .*a link"), hold_state_dir(tmp_path / "state"):
        pass


def test_a_planted_link_overwrites_no_file(tmp_path: Path) -> None:
    path, precious = tmp_path / "state", tmp_path / "precious"
    path.mkdir(mode=0o700)
    precious.write_text("precious")
    for name in ("server", "server.new"):
        (path / name).symlink_to(precious)
    with hold_state_dir(path) as announce:
        announce("127.0.0.1:1")
        assert server_of(path) == "127.0.0.1:1"
    (path / "up.lock").unlink()
    (path / "up.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match=r"^state_dir: "), hold_state_dir(path):
        pass
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("num_bytes", [0, 2**20])
def test_a_full_disk_is_said_before_anything_starts(tmp_path: Path, num_bytes: int) -> None:
    """In a process that may write no larger file, as on a disk that is full."""
    path = tmp_path / "state"
    command = (sys.executable, "-m", "slipstream.cli.main", "up", "--state-dir", str(path), "--listen", "127.0.0.1:0")
    limit = f"import resource, os; resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))"
    run = (sys.executable, "-c", f"{limit}; os.execv({sys.executable!r}, {list(command)!r})")
    found = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    accepted = "a directory on a disk with 32 MiB free for logs and the journal (File too large)"
    assert found.stderr == f"slipstream: error: --state-dir: got '{path}', accepted: {accepted}\n"
    assert found.returncode == 2
    assert [file.name for file in path.iterdir()] == ["up.lock"]


def test_the_address_that_finds_no_room_is_an_error_of_the_directory(tmp_path: Path) -> None:
    with hold_state_dir(tmp_path / "state") as announce:
        (tmp_path / "state" / "server.new").mkdir()
        with pytest.raises(ConfigError, match=r"^state_dir: .*32 MiB free"):
            announce("127.0.0.1:1")


def test_a_directory_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = (sys.executable, "-m", "slipstream.cli.main", "status", "--state-dir", str(tmp_path / "file"))
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    path = tmp_path / "file" / "server"
    assert (found.returncode, found.stderr) == (1, f"slipstream: error: [Errno 20] Not a directory: '{path}'\n")


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ConfigError, match=r"^state_dir: "), hold_state_dir(tmp_path / "state"):
        pass
