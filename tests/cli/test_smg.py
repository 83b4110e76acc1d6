"""SMG, as `up` starts it, in front of two gateways of which one goes away."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import openai
import pytest

from slipstream.cli.supervisor import Supervisor
from slipstream.cli.up_config import LOOPBACK, free_address, smg_command
from slipstream.common.rpc.address import TcpAddress, parse_address
from tests.harness.checkpoints import write_tokenizer
from tests.harness.example_states import STATE
from tests.harness.generation_server import generation_server
from tests.harness.smg import until_healthy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


def free_port() -> TcpAddress:
    """An address on loopback at which no server is."""
    address = parse_address(free_address(f"{LOOPBACK}:0", field="port"))
    assert isinstance(address, TcpAddress)
    return address


async def complete(client: openai.AsyncOpenAI) -> str:
    """The text of a request: its prompt, again and again."""
    found = await client.completions.create(model=STATE.model, prompt="Hello", max_tokens=7)
    return found.choices[0].text


async def test_no_request_fails_after_smg_has_noticed_that_a_gateway_is_gone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with AsyncExitStack() as held:
        stays = await held.enter_async_context(generation_server(tokenizer_path=str(tmp_path)))
        leaving = await held.enter_async_context(AsyncExitStack())
        leaves = await leaving.enter_async_context(generation_server(tokenizer_path=str(tmp_path)))
        engines, listen = [stays.address, leaves.address], free_port()
        command = smg_command(listen, engines, metrics_port=free_port().port, log_path=tmp_path / "smg.log")
        supervisor = await held.enter_async_context(Supervisor(ready_timeout_s=30, drain_timeout_s=5))
        supervisor.start(command)
        await supervisor.wait_ready()
        await until_healthy(2, listen.port)
        url = f"{command.address}/v1"
        client = await held.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        while not (stays.loop.submitted and leaves.loop.submitted):  # each has its share
            assert await complete(client) == "HelloHe"
        await leaving.aclose()
        await until_healthy(1, listen.port)
        before = len(stays.loop.submitted)
        for _ in range(20):
            assert await complete(client) == "HelloHe"
        assert len(stays.loop.submitted) == before + 20
