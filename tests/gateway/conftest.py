"""A server of jobs, with a fake loop behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from slipstream.client import AsyncClient
from tests.harness.generation_server import generation_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness.generation_server import GenerationServer


@pytest.fixture
async def server() -> AsyncIterator[GenerationServer]:
    """The clients' side, with a fake loop behind it."""
    async with generation_server() as running:
        yield running


@pytest.fixture
async def client(server: GenerationServer) -> AsyncIterator[AsyncClient]:
    """Connected to `server`."""
    async with AsyncClient(server.address) as connected:
        yield connected
