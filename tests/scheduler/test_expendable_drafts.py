"""Drafts in processes of their own that die, hang, come back and are swapped while sequences run: no token changes."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from slipstream.common.wire.step import Role
from tests.harness.checkpoints import write_checkpoint, write_guesser, write_json
from tests.harness.counted_jobs import Job
from tests.harness.waiting import until
from tests.harness.worker_processes import Client, WorkerProcesses, running_session
from tests.scheduler.test_session import SEED, make_jobs, settings

pytestmark = pytest.mark.timeout(120)
DRAFT = Role.DRAFT


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """A random target, and a draft that guesses right now and then."""
    target = write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=SEED)
    return {Role.VERIFY: target, DRAFT: write_guesser(target.with_name("draft"), target, seed=SEED)}


@pytest.fixture(scope="module")
def processes(models: dict[Role, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """Both workers, started and perhaps not ready yet. A test leaves them as it found them."""
    with WorkerProcesses(tmp_path_factory.mktemp("sockets"), models) as made:
        made.start(Role.DRAFT, Role.VERIFY)
        yield made


def calm(**changes: object) -> dict[str, object]:
    """Settings with a watchdog that a busy machine does not set off."""
    return settings(draft_timeout_ms=3000.0, **changes)


async def undisturbed(client: Client, count: int, max_new_tokens: int = 300) -> list[list[int]]:
    """The tokens of jobs when nothing happens."""
    return await client.run(*make_jobs(count, max_new_tokens=max_new_tokens))


def accept_lengths(jobs: list[Job]) -> float:
    """The mean accept length so far."""
    steps = sum(job.stats.num_verify_steps for job in jobs)
    return 1 + sum(job.stats.total_accepted_tokens for job in jobs) / max(1, steps)


@pytest.mark.parametrize("max_new_tokens", [50, pytest.param(300, marks=pytest.mark.slow)])
async def test_a_killed_draft_costs_no_sequence_and_drafts_again_when_it_is_back(
    processes: WorkerProcesses, max_new_tokens: int
) -> None:
    """When it is back, the short jobs are over."""
    with running_session(processes, **calm()) as client:
        await client.served()
        expected = await undisturbed(client, 5, max_new_tokens)
        jobs = make_jobs(5, max_new_tokens=max_new_tokens)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 20)
        processes.send_signal(DRAFT, signal.SIGKILL)
        await until(lambda: client.draft_state == "missing")
        processes.wait(DRAFT)
        processes.start(DRAFT)
        assert await running == expected
        await client.served()
        assert client.metric("slipstream_draft_losses_total", cause="died") == 1
        assert client.metric("slipstream_draft_attachments_total") == 2
        assert client.metric("slipstream_draft_missing_seconds_total") > 0
        assert client.metric("slipstream_draft_attached") == 1
    assert client.num_epochs == 1
    assert client.errors == client.reasons == []


@pytest.mark.slow
async def test_a_draft_that_comes_late_catches_up_under_load(processes: WorkerProcesses) -> None:
    """The sequences are long enough to outlast the time that the draft takes to come back."""
    with running_session(processes, **calm()) as client:
        await client.served()
        expected = await undisturbed(client, 3, max_new_tokens=400)
        before = client.metric("slipstream_drafts_total", algorithm="standalone")
        processes.send_signal(DRAFT, signal.SIGSTOP)
        jobs = make_jobs(3, max_new_tokens=400)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: client.draft_state == "missing")
        processes.send_signal(DRAFT, signal.SIGCONT)
        await until(lambda: client.draft_state == "attached")
        at_return = [job.stats.num_output_tokens for job in jobs]
        assert min(at_return) < 350, "there is something left to draft"
        assert await running == expected
        assert client.metric("slipstream_drafts_total", algorithm="standalone") > before + 20
    assert client.num_epochs == 1


@pytest.mark.slow
async def test_a_stopped_draft_costs_the_watchdogs_time(processes: WorkerProcesses) -> None:
    with running_session(processes, **settings(draft_timeout_ms=300.0)) as client:
        await client.served()
        jobs = make_jobs(3, max_new_tokens=400)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 20)
        processes.send_signal(DRAFT, signal.SIGSTOP)
        before, stopped_at = jobs[0].stats.num_output_tokens, time.monotonic()
        await until(lambda: jobs[0].stats.num_output_tokens > before + 8)
        assert time.monotonic() - stopped_at < 20.0, "not the time that a step may take"
        await until(lambda: client.draft_state == "missing")
        assert client.metric("slipstream_draft_losses_total", cause="timeout") >= 1
        processes.send_signal(DRAFT, signal.SIGCONT)
        for job in jobs:
            client.jobs.cancel(job)
        await running
        await client.served()
    assert client.num_epochs == 1
    assert client.errors == client.reasons == []


@pytest.mark.slow
@pytest.mark.parametrize(("given", "most"), [(3, 3), (None, 15)], ids=["fixed", "auto"])
async def test_swaps_from_one_draft_to_another_and_to_none_and_back(
    processes: WorkerProcesses, models: dict[Role, Path], tmp_path: Path, given: int | None, most: int
) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    with (
        running_session(processes, **calm(fixed_draft_tokens=given)) as client,
        WorkerProcesses(tmp_path / "other", models) as others,
    ):
        others.start(DRAFT)
        await client.served()
        expected = await undisturbed(client, 3)
        outputs, jobs = [], list[Job]()

        async def load() -> None:
            while not is_over:
                jobs[:] = make_jobs(3, max_new_tokens=300)
                outputs.append(await client.run(*jobs))

        is_over = False
        running = asyncio.create_task(load())
        await until(lambda: bool(jobs) and jobs[0].stats.num_output_tokens > 20)
        await until(lambda: (tmp_path / "other" / "draft.sock").exists())
        swapped = await retried(client, others.address(DRAFT), num_draft_tokens=2, judge_steps=40, rollback_below=0.2)
        assert (swapped.before.num_draft_tokens, swapped.after.num_draft_tokens) == (most, 2)
        assert swapped.after.num_steps == 40, "it drafts until it is judged"
        assert swapped.before.num_steps == 40 or given is None, "it may have rested soon"
        assert swapped.after.accept_length > 1.0
        assert not swapped.rolled_back
        assert 0 < swapped.longest_pause_ms < 5000
        none = await client.swap("", judge_steps=20)
        assert (none.after.algorithm, none.after.num_steps, none.after.accept_length) == ("none", 20, 1.0)
        assert client.draft_state == ""
        back = await client.swap(processes.address(DRAFT), judge_steps=20)
        assert (back.before.algorithm, back.after.algorithm) == ("none", "standalone")
        assert back.after.accept_length > 1.0
        is_over = True
        await running
        assert outputs
        assert all(output == expected for output in outputs)
        assert client.metric("slipstream_draft_swaps_total", result="swapped") == 3
    assert client.num_epochs == 1
    assert client.errors == client.reasons == []


async def retried(client: Client, address: str, **terms: object) -> object:
    """Swaps as soon as the draft at the address answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.swap(address, **terms)
            except UnavailableError:
                await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_worse_draft_gives_way_to_the_one_before(
    processes: WorkerProcesses, models: dict[Role, Path], tmp_path: Path
) -> None:
    bad = write_checkpoint(tmp_path / "bad", seed=SEED + 1)
    (tmp_path / "other").mkdir(mode=0o700)
    with (
        running_session(processes, **calm()) as client,
        WorkerProcesses(tmp_path / "other", models | {DRAFT: bad}) as others,
    ):
        others.start(DRAFT)
        await client.served()
        expected = await undisturbed(client, 3)
        jobs, outputs, is_over = list[Job](), [], False

        async def load() -> None:
            while not is_over:
                jobs[:] = make_jobs(3, max_new_tokens=300)
                outputs.append(await client.run(*jobs))

        running = asyncio.create_task(load())
        await until(lambda: bool(jobs) and jobs[0].stats.num_output_tokens > 60)
        outcome = await retried(client, others.address(DRAFT), judge_steps=20)
        assert outcome.rolled_back, outcome
        assert "fewer than 0.7 times as many" in outcome.reason
        assert outcome.after.accept_length < outcome.before.accept_length
        assert client.draft_state == "attached"
        assert client.drafts.target.address == processes.address(DRAFT)
        is_over = True
        await running
        assert all(output == expected for output in outputs)


@pytest.mark.slow
async def test_a_draft_that_does_not_fit_is_refused_and_the_scheduler_serves_on(
    processes: WorkerProcesses, models: dict[Role, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    misfit = write_checkpoint(tmp_path / "misfit", seed=SEED)
    tokenizer = json.loads((misfit / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"].pop()
    write_json(misfit / "tokenizer.json", tokenizer)
    (tmp_path / "other").mkdir(mode=0o700)
    with WorkerProcesses(tmp_path / "other", models | {DRAFT: misfit}) as others:
        others.start(Role.DRAFT, Role.VERIFY)
        with running_session(others, **calm()) as client:
            await client.served(with_draft=False)
            await until(lambda: "tokenizer" in client.drafts.status.problem)
            assert len(await client.run(*make_jobs(2))) == 2
            with pytest.raises(FailedPreconditionError, match="tokenizer"):
                await client.swap(others.address(DRAFT))
            with pytest.raises(InvalidArgumentError, match="num_draft_tokens: got 9, accepted: 1 to 3"):
                await client.swap(others.address(DRAFT), num_draft_tokens=9)
            with pytest.raises(UnavailableError):
                await client.swap(f"unix:{tmp_path}/none.sock")
            await asyncio.sleep(1.0)
        assert sum("tokenizer" in record.message for record in caplog.records) <= 2
        assert client.errors == client.reasons == []
