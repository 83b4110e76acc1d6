"""Fake services to supervise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import pytest

from slipstream.cli.service_command import ServiceCommand

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


class MakeCommand(Protocol):
    """Makes the command of a fake service that serves at a socket named for it."""

    def __call__(self, name: str, *options: str) -> ServiceCommand:
        """Options are those of `fake_service.py`."""


@pytest.fixture
def fake_service(tmp_path: Path) -> MakeCommand:
    """Commands of fake services that live in the test's folder."""

    def make(name: str, *options: str) -> ServiceCommand:
        address = f"unix:{tmp_path}/{name}.sock"
        return ServiceCommand(
            name=name,
            argv=(sys.executable, str(_FAKE_SERVICE), "--listen", address, *options),
            address=address,
            log_path=tmp_path / f"{name}.log",
        )

    return make


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child behind, alive or not reaped."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, f"left behind: {left}"
