"""Connections from the scheduler to the workers' processes that break, are slow or stand still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.common.errors import UnavailableError
from slipstream.common.wire.step import Role
from tests.harness.breaking_proxy import BreakingProxy, breaking_proxy
from tests.harness.checkpoints import write_checkpoint, write_guesser
from tests.harness.waiting import until
from tests.harness.worker_processes import Client, WorkerProcesses, running_session
from tests.scheduler.test_session import SEED, make_jobs, settings

pytestmark = pytest.mark.timeout(120)
NUM_JOBS = 4
MAX_NEW_TOKENS = 300


class ProcessesBehindProxies(WorkerProcesses):
    """Workers that a session reaches by other addresses than their own."""

    ways: dict[Role, str] | None = None

    def address(self, role: Role) -> str:
        """See `WorkerProcesses.address`."""
        return super().address(role) if self.ways is None else self.ways[role]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Client, dict[Role, BreakingProxy], list[list[int]]]]:
    """A session, its ways to both workers, and the tokens of jobs that nothing disturbs."""
    target = write_checkpoint(folder / "target", seed=SEED)
    models = {Role.VERIFY: target, Role.DRAFT: write_guesser(folder / "draft", target, seed=SEED)}
    with ProcessesBehindProxies(folder, models) as processes:
        processes.start(Role.DRAFT, Role.VERIFY)
        async with (
            breaking_proxy(processes.address(Role.VERIFY), folder / "verify-way.sock") as (to_verify, verify),
            breaking_proxy(processes.address(Role.DRAFT), folder / "draft-way.sock") as (to_draft, draft),
        ):
            processes.ways = {Role.VERIFY: to_verify, Role.DRAFT: to_draft}
            with running_session(processes, **settings(draft_timeout_ms=3000.0)) as client:
                await client.served()
                expected = await client.run(*make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS))
                yield client, {Role.VERIFY: verify, Role.DRAFT: draft}, expected
                assert client.errors == []
            processes.ways = None


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["reset", "silent"])
async def test_a_way_to_draft_that_breaks_costs_no_sequence(tmp_path: Path, *, is_silent: bool) -> None:
    async with served(tmp_path) as (client, proxies, expected):
        way, jobs = proxies[Role.DRAFT], make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 20)
        if is_silent:
            way.loses_everything = True
            await until(lambda: client.draft_state != "attached")
            way.loses_everything = False
        way.cut()
        assert await running == expected
        await until(lambda: client.draft_state == "attached")
        assert client.metric("slipstream_draft_attachments_total") == 2
        assert client.num_epochs == 1
        assert client.reasons == []


@pytest.mark.slow
async def test_slow_ways_to_both_workers_change_no_token(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, proxies, expected):
        for way, delay_s in ((proxies[Role.VERIFY], 0.002), (proxies[Role.DRAFT], 0.01)):
            way.delay_s = delay_s
        assert await client.run(*make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS)) == expected
        assert client.num_epochs == 1


@pytest.mark.slow
async def test_a_way_to_verify_that_breaks_is_made_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, proxies, expected):
        jobs = make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 20)
        proxies[Role.VERIFY].cut()
        with pytest.raises(UnavailableError, match="verify"):
            await running
        await until(lambda: client.num_epochs == 2)
        await client.served()
        assert await client.run(*make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS)) == expected
