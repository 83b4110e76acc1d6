"""A real service that is stopped under a stream: `up` finds and replaces it, and the client gets every token."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from slipstream.client import AsyncClient
from tests.harness.running import running_up, status

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 400


async def generate(server: str, at_token: int = -1, stop: int = 0) -> list[int]:
    """The tokens of a stream; the process `stop` is stopped once there are `at_token` of them."""
    tokens: list[int] = []
    async with AsyncClient(server) as client:
        stream = client.generate("def add(a, b):\n", max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        async for chunk in stream:
            tokens += chunk.token_ids
            if stop and len(tokens) >= at_token:
                os.kill(stop, signal.SIGSTOP)
                stop = 0
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gateway", "scheduler", "verify", "draft"])
async def test_a_stopped_service_is_replaced_while_a_client_streams_on(tmp_path: Path, name: str) -> None:
    with running_up(tmp_path, "--hang-timeout-s", "3") as up:
        server = (tmp_path / "server").read_text()
        expected = await generate(server)
        before = {service["name"]: service["pid"] for service in status(tmp_path)["services"]}
        assert await generate(server, at_token=50, stop=before[name]) == expected
        assert len(expected) == NUM_TOKENS
        # A stream may have ended before that, without the draft.
        line = f"{name} did not answer for 3 s and was killed and is started again"
        while line not in up.errors():
            assert not up.has_ended
            await generate(server)
        found = status(tmp_path)
        assert before[name] not in {service["pid"] for service in found["services"]}
        restarts = {service["name"]: service["num_restarts"] for service in found["supervised"]}
        assert restarts == {other: int(other == name) for other in before}
