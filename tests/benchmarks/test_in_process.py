"""One process in place of three: the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.benchmarks.in_process import InProcessSettings, in_process_command
from slipstream.benchmarks.models import STANDALONE
from slipstream.benchmarks.stack import Stack, free_ports
from slipstream.bundled import eagle3_dir, standalone_dir, target_dir
from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions
from slipstream.common.rpc.metrics import scrape
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import WorkerConfig
from tests.harness.running import slipstream
from tests.harness.trace_format import check, slices_by_thread

pytestmark = pytest.mark.timeout(90)

NUM_TOKENS = 24
REQUESTS: tuple[tuple[str, RequestOptions], ...] = (
    ("def add(a, b):\n", {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}),
    ("class Queue:\n", {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 7}),
    ("import os\n", {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1, "seed": 8, "top_p": 0.9}),
)


@asynccontextmanager
async def served(algorithm: str) -> AsyncIterator[tuple[str, int]]:
    """One process with a gateway in front of it: the clients' address, and the metrics port of the process."""
    (metrics_port,) = free_ports(1)
    head = WorkerConfig(model=eagle3_dir(), algorithm=EAGLE3, target=target_dir(), device="cpu")
    drafts = {"none": None, "standalone": WorkerConfig(model=standalone_dir(), device="cpu"), "eagle3": head}
    async with Stack(None) as stack:
        address = stack.socket("one")
        settings = InProcessSettings(
            verify=WorkerConfig(model=target_dir(), device="cpu"),
            draft=drafts[algorithm],
            # A number: by itself, the draft may rest whenever this machine is slow.
            scheduler=SchedulerConfig(
                verify=address, draft=drafts[algorithm] and address, fixed_draft_tokens=4, device="cpu"
            ),
        )
        await stack.process("one", *in_process_command(settings, address, metrics_port))
        async with stack.gateway(address, metrics_port) as front:
            yield front.address, metrics_port


async def outputs(client: AsyncClient) -> list[list[int]]:
    """The tokens of each request."""
    found = []
    for prompt, options in REQUESTS:
        stream = client.generate(prompt, **options)
        found.append([token async for chunk in stream for token in chunk.token_ids])
    return found


async def of_processes() -> list[list[int]]:
    """Returns each request's token IDs from services in processes of their own."""
    async with Stack(None) as stack:
        await stack.models(STANDALONE)
        async with stack.scheduler(STANDALONE) as served, AsyncClient(served.address) as client:
            found = await outputs(client)
    assert all(len(tokens) == NUM_TOKENS for tokens in found)
    return found


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """The token IDs of each request from services in processes of their own."""
    return asyncio.run(of_processes())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["none", "standalone", "eagle3"])
async def test_tokens_are_those_of_processes_of_their_own(algorithm: str, reference: list[list[int]]) -> None:
    async with served(algorithm) as (address, metrics_port), AsyncClient(address) as client:
        assert await outputs(client) == reference
        state = await client.server_info()
        assert state.algorithm == algorithm
        assert len({service.pid for service in state.services if service.name != "gateway"}) == 1
        timed = (await scrape(metrics_port)).total("slipstream_step_seconds_count", phase="decode")
        assert timed > 10, "steps are timed as they are in processes of their own"


@pytest.mark.slow
async def test_its_steps_are_traced(tmp_path: Path) -> None:
    """As if they were processes of their own."""
    out = tmp_path / "out.json"
    async with served("standalone") as (address, _), AsyncClient(address) as client:
        trace = ("trace", "--server", address, "--steps", "10", "--wait-s", "30", str(out))
        traced = asyncio.create_task(asyncio.to_thread(slipstream, *trace))
        while not traced.done():
            async for _chunk in client.generate("class Queue:", max_new_tokens=100, ignore_eos=True):
                pass
        assert (await traced).returncode == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    check(content)
    draft, verify = (slices_by_thread(content)[lane] for lane in ((2, 21), (3, 31)))
    # Draft has no part in a plain step, and two in one that takes in prompts.
    assert draft
    assert len(verify) == 10, "what each step was enqueued by"
