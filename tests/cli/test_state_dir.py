"""One supervisor in a state directory."""

from __future__ import annotations

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


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ConfigError, match=r"^state_dir: "), hold_state_dir(tmp_path / "state"):
        pass
