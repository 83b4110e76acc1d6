"""A gateway that dies, hangs or stops at its points: its clients get every token once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from slipstream.client import AsyncClient
from slipstream.common.wire.job import OutputChunk
from tests.harness.gateway_processes import GatewayProcesses, gateway_processes
from tests.harness.generation_server import collect, tokens_of
from tests.harness.planted_faults import EXIT_STATUS, PlantedFaults
from tests.harness.waiting import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.sampled_module(3)]

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 90
POINTS = (
    "gateway.before_submit:{}@1",
    "gateway.before_delivery:{}@2",
    "gateway.before_commit:{}@2",
    "gateway.after_commit:{}@2",
    "gateway.before_output:{}@2",
    "gateway.before_write:{}@1",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("action", ["kill", "exit", "hang", "stop"])
@pytest.mark.parametrize("point", POINTS)
def test_a_client_gets_every_token_once(tmp_path: Path, point: str, action: str) -> None:
    faults = PlantedFaults(tmp_path / "record", point.format(action))
    journal = ("--state-dir", str(tmp_path))
    with gateway_processes(tmp_path, 1, *journal, environment=faults.environment) as gateways:
        for chunks in asyncio.run(outputs_despite(faults, action, gateways)):
            assert tokens_of(chunks) == (PROMPT * NUM_TOKENS)[:NUM_TOKENS]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        assert gateways.stop() == [0]


@pytest.mark.parametrize("point", POINTS[:-1])
def test_a_failure_without_a_caller_ends_the_process(tmp_path: Path, point: str) -> None:
    """In a callback of the event loop, in a task, and in a thread: the next process has the jobs."""
    test_a_client_gets_every_token_once(tmp_path, point, "raise")


async def outputs_despite(faults: PlantedFaults, action: str, gateways: GatewayProcesses) -> list[list[OutputChunk]]:
    """Runs two jobs, and starts the gateway again when it has failed."""
    async with AsyncClient(gateways.addresses[0], connect_timeout_s=60.0) as client:
        outputs = [
            asyncio.create_task(collect(client.generate(PROMPT, job_id=name, max_new_tokens=NUM_TOKENS)))
            for name in ("first", "second")
        ]
        await until(lambda: faults.have_failed)
        if action == "stop":
            await asyncio.to_thread(os.waitid, os.P_PID, gateways.pid(0), os.WSTOPPED | os.WNOWAIT)
            gateways.send_signal(0, signal.SIGCONT)
        else:
            if action == "hang":
                gateways.send_signal(0, signal.SIGKILL)
            status = await asyncio.to_thread(gateways.wait, 0)
            assert status == {"exit": EXIT_STATUS, "raise": 1}.get(action, -signal.SIGKILL)
            gateways.start(0)
        return await asyncio.gather(*outputs)
