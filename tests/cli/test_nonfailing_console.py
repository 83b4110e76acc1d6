"""A console that is written to when nobody reads it any more."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.display import nonfailing_console

if TYPE_CHECKING:
    from collections.abc import Callable


def pipe() -> tuple[int, int]:
    """Whose writes fail with EPIPE once the first is closed."""
    return os.pipe()


def terminal() -> tuple[int, int]:
    """Whose writes fail with EIO once the first is closed."""
    return os.openpty()


@pytest.mark.parametrize("make", [pipe, terminal])
def test_it_writes_while_somebody_reads_and_raises_nothing_then(
    make: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = make()
    with os.fdopen(writer, "w", buffering=1) as file:
        monkeypatch.setattr(sys, "stderr", file)
        console = nonfailing_console()
        assert console.is_terminal == file.isatty()
        console.print("one")
        assert os.read(reader, 100).split() == [b"one"]
        os.close(reader)
        console.print("two")
        console.print("three")
        file.write("four\n")  # as a logger does, past the console


def test_a_full_disk_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        nonfailing_console().print("lost")
        with pytest.raises(OSError, match="No space"):
            full.flush()
        reader, writer = pipe()
        os.dup2(writer, full.fileno())  # has room again
        os.close(writer)
    assert os.read(reader, 100) == b"lost\n"
    os.close(reader)
