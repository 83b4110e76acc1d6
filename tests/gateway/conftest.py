"""A server of jobs, with a fake loop behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from slipstream.client import AsyncClient
from tests.harness.generation_server import GenerationServer, generation_server


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
