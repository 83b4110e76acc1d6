"""One supervisor in a state directory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.up.run import hold_state_dir, server_of
from slipstream.common.errors import AddressInUseError, ConfigError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path


def test_only_one_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with hold_state_dir(path) as announce:
        announce("127.0.0.1:1")
        with pytest.raises(AddressInUseError, match=r"^state_dir: "), hold_state_dir(path):
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


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ConfigError, match=r"^state_dir: "), hold_state_dir(tmp_path / "state"):
        pass
