"""The demo as `make demo` runs it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from slipstream.cli import demo
from slipstream.common.device.choose import cuda_obstacle
from tests.harness.running import running, slipstream, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: sockets are in a folder in it, and their paths have 107 bytes at most."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def services_in(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]


def test_the_demo_compares_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 64)
    found = slipstream("demo", timeout_s=80)
    assert found.returncode == 0, found.stdout + found.stderr
    for words in (
        "«",
        "tokens per second",
        "mean accept length",
        "bubble",
        "overlap efficiency",
        "no drafting (host fences)",
        "Token ids with and without drafting: the same, all 256 tokens of 4 prompts.",
    ):
        assert words in found.stdout
    assert not services_in(tmp_path)
    assert not list(tmp_path.glob("slipstream-*"))


def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    with running("demo") as command:
        until(lambda: len(list(tmp_path.glob("*/sockets/*.lock"))) == 2, command)
        command.signal(signal.SIGINT)
        assert command.end() == 130
    assert not services_in(tmp_path)
    assert not list(tmp_path.glob("slipstream-*"))


@pytest.mark.skipif(cuda_obstacle() is None, reason="there is a GPU that can be used")
@pytest.mark.slow
def test_a_gpu_that_cannot_be_used_is_said_with_the_reason(tmp_path: Path) -> None:
    found = slipstream("demo", "--device", "cuda")
    assert found.returncode == 1
    assert f"device: got 'cuda', accepted: cpu here: {cuda_obstacle()}" in found.stderr
    assert not services_in(tmp_path)


def test_another_device_is_refused_by_name() -> None:
    found = slipstream("demo", "--device", "abacus")
    assert (found.returncode, found.stderr) == (
        2,
        "slipstream: error: --device: got 'abacus', accepted: auto, cpu, cuda\n",
    )
