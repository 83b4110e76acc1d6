"""The whole of a step between three processes: the right tokens, in the right order, and lost workers come back."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.device.cpu.device import HostArena, HostDevice
from slipstream.common.errors import ConfigError, UnavailableError
from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import FenceName, Role
from tests.harness.checkpoints import write_checkpoint, write_guesser
from tests.harness.counted_jobs import Job
from tests.harness.leaks import nothing_left
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session
from tests.ordering.replay import Replay

SEED = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """A random target, and a draft that guesses right now and then."""
    target = write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=SEED)
    return {Role.VERIFY: target, Role.DRAFT: write_guesser(target.with_name("draft"), target, seed=SEED)}


@pytest.fixture(scope="module")
def processes(models: dict[Role, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """Both workers, started and perhaps not ready yet."""
    with WorkerProcesses(tmp_path_factory.mktemp("sockets"), models) as made:
        made.start(Role.DRAFT, Role.VERIFY)
        yield made


def make_jobs(count: int, *, max_new_tokens: int = 40) -> list[Job]:
    """Greedy and sampled."""
    rng = random.Random(SEED)
    jobs = []
    for number in range(count):
        sampling = SamplingParams(temperature=0.8 * (number % 2), top_p=0.95, seed=number)
        prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 50)))
        spec = SequenceSpec(
            job_id=str(number),
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(),
        )
        jobs.append(Job(spec))
    return jobs


def settings(log_dir: Path | None = None, **changes: object) -> dict[str, Any]:
    """Settings of a small scheduler with all checks on."""
    return {
        "fixed_draft_tokens": 3,
        "slots": 3,
        "context_tokens": 480,
        "max_batched_tokens": 16,
        "page_tokens": 8,
        "kv_memory_mib": 8,
        "debug": True,
        "access_log_dir": log_dir,
        **changes,
    }


async def serve(
    processes: WorkerProcesses, jobs: list[Job], *, has_draft: bool = True, **changes: object
) -> list[list[int]]:
    """The tokens of jobs, by a session of their own that gives everything back."""
    with running_session(processes, has_draft=has_draft, **settings(**changes)) as client:
        await client.served(with_draft=has_draft)
        outputs = await client.run(*jobs)
        assert client.epoch is not None
        batch = client.epoch.batch
        assert (batch.num_running, batch.slots.num_free) == (0, batch.slots.num_slots)
        assert batch.pages.num_free == batch.pages.num_pages
    assert client.errors == client.reasons == []
    return outputs


async def test_the_same_tokens_in_the_right_order(models: dict[Role, Path], tmp_path: Path) -> None:
    """With and without a draft, by two ways to send, one after the other on the same workers; logged, and replayed."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with WorkerProcesses(tmp_path, models, "--access-log-dir", str(logs)) as processes:
        processes.start(Role.DRAFT, Role.VERIFY)
        with_draft, jobs, more_jobs = (make_jobs(4) for _ in range(3))
        outputs = await serve(processes, with_draft, log_dir=logs)
        assert all(len(set(output)) > 10 for output in outputs)
        assert sum(job.stats.total_accepted_tokens for job in with_draft) > 20
        with nothing_left(with_descriptors=False):
            assert await serve(processes, jobs, has_draft=False, run_ahead=2, log_dir=logs) == outputs
            blocking = serve(processes, more_jobs, run_ahead=0, dispatch="acknowledged", log_dir=logs)
            assert await blocking == outputs
        assert processes.end() == [0, 0]
    report = Replay(logs).report()
    assert report.num_logs == 5
    assert report.num_ordered > 500
    assert not report.races
    assert not report.stuck


async def test_cancelled_jobs_end_and_the_others_go_on(processes: WorkerProcesses) -> None:
    expected, doomed = await serve(processes, make_jobs(5)), (0, 1, 4)
    with running_session(processes, **settings(run_ahead=2)) as client:
        await client.attached.wait()
        jobs = make_jobs(5)
        for number in doomed:
            # Long enough to run when the cancel arrives.
            jobs[number].spec = replace(jobs[number].spec, max_new_tokens=400)
        running = asyncio.gather(*(client.run(job) for job in jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 4)
        for number in doomed:
            client.jobs.cancel(jobs[number])
        outputs = [output for (output,) in await running]
        for number in doomed:
            assert outputs[number][:40] == expected[number][: len(outputs[number])]
            assert len(outputs[number]) < 400
        assert [outputs[2], outputs[3]] == [expected[2], expected[3]]


async def test_a_killed_verify_ends_running_jobs_and_is_taken_back(processes: WorkerProcesses) -> None:
    role = Role.VERIFY
    with running_session(processes, **settings(run_ahead=1)) as client:
        await client.attached.wait()
        jobs = make_jobs(5, max_new_tokens=400)
        running = [asyncio.create_task(client.run(job)) for job in jobs]
        await until(lambda: jobs[0].stats.num_output_tokens > 10)
        processes.send_signal(role, signal.SIGKILL)
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(end, UnavailableError) for end in ends), ends
        assert role.value in str(ends[0])
        await until(lambda: bool(client.reasons))
        assert not client.queue.add(make_jobs(1)[0])
        assert processes.wait(role) == -signal.SIGKILL
        processes.start(role)
        await client.served()
        assert len(await client.run(*make_jobs(2))) == 2
    assert client.errors == []


class CountingDevice(HostDevice):
    """Counts arenas."""

    def __init__(self) -> None:
        super().__init__()
        self.num_arenas = 0

    def create_arena(
        self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False
    ) -> HostArena:
        """See `Device.create_arena`."""
        self.num_arenas += 1
        return super().create_arena(specs, fences)


async def test_workers_that_have_a_scheduler_cost_another_one_no_memory(processes: WorkerProcesses) -> None:
    device = CountingDevice()
    with running_session(processes, **settings()) as first:
        await first.attached.wait()
        await first.run(*make_jobs(1))
        with running_session(processes, device=device, **settings()) as second:
            await until(lambda: len(second.reasons) > 2)
            assert "the verify service has another scheduler" in second.reasons[-1]
            assert device.num_arenas == 0
            first.queue.stop()
            await second.served()
            assert device.num_arenas == 3, "the results, and the two pieces of the draft's region"


async def test_settings_that_no_worker_fits_end_it_with_the_reason(processes: WorkerProcesses) -> None:
    with running_session(processes, **settings(context_tokens=513)) as client:
        with pytest.raises(ConfigError, match="context_tokens: got 513, accepted: at most 512"):
            await client.attached.wait()
        assert not client.queue.add(make_jobs(1)[0])


async def test_a_stopped_worker_is_noticed_and_taken_back_when_it_goes_on(processes: WorkerProcesses) -> None:
    with running_session(processes, **settings(run_ahead=1)) as client:
        await client.attached.wait()
        (job,) = make_jobs(1, max_new_tokens=400)
        running = asyncio.create_task(client.run(job))
        await until(lambda: job.stats.num_output_tokens > 10)
        processes.send_signal(Role.VERIFY, signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(UnavailableError, match="verify"):
            await running
        assert time.monotonic() - stopped_at < 30.0, "heartbeats, not the time that a step may take"
        processes.send_signal(Role.VERIFY, signal.SIGCONT)
        await client.attached.wait()
        assert len(await client.run(*make_jobs(2))) == 2
    assert client.errors == []
