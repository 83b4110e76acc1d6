"""The whole of a step between three processes on a GPU, with dummy kernels."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.benchmarks.dummy_model import token_at
from slipstream.bundled import standalone_dir, target_dir
from slipstream.common.errors import UnavailableError
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from tests.harness.counted_jobs import Job
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.cuda.device import CudaDevice

MODELS = {Role.VERIFY: target_dir(), Role.DRAFT: standalone_dir()}
DUMMY_MS = 0.4


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """Both workers, started and perhaps not ready yet."""
    with WorkerProcesses(tmp_path_factory.mktemp("sockets"), MODELS, "--device", "cuda", dummy_ms=DUMMY_MS) as made:
        made.start(Role.DRAFT, Role.VERIFY)
        yield made


def make_job(prompt_tokens: int, max_new_tokens: int = 60) -> Job:
    """A greedy job."""
    spec = SequenceSpec(
        job_id=str(prompt_tokens),
        prompt=tuple(range(prompt_tokens)),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )
    return Job(spec)


def expected(job: Job) -> list[int]:
    """The output of the dummies."""
    first = len(job.spec.prompt)
    tokens: list[int] = token_at(torch.arange(first, first + job.spec.max_new_tokens)).tolist()
    return tokens


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_the_right_tokens(processes: WorkerProcesses, device_of_kind: CudaDevice, run_ahead: int) -> None:
    """Prompts of one and of several chunks, more jobs than slots; half of the draft is right."""
    sizes = {"slots": 3, "max_batched_tokens": 16, "fixed_draft_tokens": 4, "context_tokens": 4096}
    settings: dict[str, Any] = {"device": device_of_kind, "run_ahead": run_ahead, **sizes}
    with running_session(processes, **settings) as client:
        await client.served()
        jobs = [make_job(length) for length in (1, 5, 16, 17, 40, 100)]
        assert await client.run(*jobs) == [expected(job) for job in jobs]
        assert all(job.stats.mean_accept_length > 2.5 for job in jobs)
        assert client.epoch is not None
        assert client.epoch.fence_kind == device_of_kind.fence_kind
    assert not client.errors
    assert not client.reasons


async def test_without_a_draft(processes: WorkerProcesses, device: CudaDevice) -> None:
    with running_session(processes, device=device, has_draft=False, run_ahead=2, context_tokens=4096) as client:
        await client.attached.wait()
        jobs = [make_job(length) for length in (3, 30)]
        assert await client.run(*jobs) == [expected(job) for job in jobs]


async def test_a_killed_verify_ends_running_jobs_and_is_taken_back(
    processes: WorkerProcesses, device: CudaDevice
) -> None:
    with running_session(processes, device=device, run_ahead=1, context_tokens=1 << 16) as client:
        await client.attached.wait()
        jobs = [make_job(length, max_new_tokens=50_000) for length in (3, 30)]
        running = [asyncio.create_task(client.run(job)) for job in jobs]
        await until(lambda: jobs[0].stats.num_output_tokens > 10)
        processes.send_signal(Role.VERIFY, signal.SIGKILL)
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(end, UnavailableError) for end in ends), ends
        await until(lambda: bool(client.reasons))
        assert processes.wait(Role.VERIFY) == -signal.SIGKILL
        processes.start(Role.VERIFY)
        await client.attached.wait()
        job = make_job(7)
        assert await client.run(job) == [expected(job)]
    assert client.errors == []


async def test_sequences_go_on_without_a_killed_draft_and_with_the_next(
    processes: WorkerProcesses, device: CudaDevice
) -> None:
    with running_session(processes, device=device, run_ahead=1, context_tokens=1 << 16) as client:
        await client.served()
        jobs = [make_job(length, max_new_tokens=5_000) for length in (3, 30)]
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 10)
        processes.send_signal(Role.DRAFT, signal.SIGKILL)
        assert processes.wait(Role.DRAFT) == -signal.SIGKILL
        processes.start(Role.DRAFT)
        assert await running == [expected(job) for job in jobs]
    assert client.errors == []
    assert client.reasons == []
