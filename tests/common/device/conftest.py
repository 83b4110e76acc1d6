"""Arenas and streams, and that nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
import torch

from slipstream.common.device.cpu.device import HostArena, HostStream
from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.step import FenceName
from tests.harness.leaks import nothing_left

SPECS = (
    BufferSpec("lengths", (3, 4), torch.int64, "verify"),
    BufferSpec("states", (5, 7, 2), torch.bfloat16, "verify"),
    BufferSpec("tokens", (4,), torch.int32, "draft"),
)


class MakeStream(Protocol):
    """Makes streams that are closed when the test ends; their failures are collected."""

    failures: list[BaseException]

    def __call__(self, name: str = "test") -> HostStream:
        """A stream of that name."""


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here gives back what it took."""
    with nothing_left():
        yield
        # pytest would keep the arguments a little longer.
        request.node.funcargs.clear()


@pytest.fixture
def arena() -> Iterator[HostArena]:
    """An arena that this process owns."""
    made = HostArena.create(SPECS, list(FenceName))
    yield made
    made.close()


@pytest.fixture
def make_stream() -> Iterator[MakeStream]:
    """Streams for the test; it must not leave one waiting."""
    streams: list[HostStream] = []

    class Make:
        def __init__(self) -> None:
            self.failures: list[BaseException] = []

        def __call__(self, name: str = "test") -> HostStream:
            streams.append(HostStream(name, self.failures.append))
            return streams[-1]

    yield Make()
    for stream in streams:
        stream.close()
