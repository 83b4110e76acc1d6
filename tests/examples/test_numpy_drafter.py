"""The NumPy drafter as a process beside the real verify service: the same tokens, some of them guessed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipstream.bundled import target_dir
from slipstream.cli.trace import fetch_trace, trace_json
from slipstream.common.wire.events import Site
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from slipstream.common.wire.trace import TraceRequest
from tests.harness.checkpoints import write_checkpoint
from tests.harness.counted_jobs import Job
from tests.harness.example_drafters import NUMPY_DRAFTER, ExampleDrafted
from tests.harness.trace_format import check
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session, timeline_server
from tests.ordering.replay import Replay

SEED = 5
LOGGED = Path(__file__).parent.parent / "harness" / "logged_drafter.py"
REPETITIVE = "import unittest\n\n" + "".join(
    f"    def test_{name}(self):\n        self.assertEqual(self.{name}, 1)\n\n" for name in ("one", "two", "six", "ten")
)


class NumpyDrafted(ExampleDrafted):
    """Verify, and the example in draft's place; with `log_dir` both log what they access."""

    def __init__(self, folder: Path, target: Path, log_dir: Path | None = None) -> None:
        if log_dir is None:
            super().__init__(folder, target, [str(NUMPY_DRAFTER)])
        else:
            program = [str(LOGGED), str(log_dir / "draft.jsonl")]
            super().__init__(folder, target, program, "--access-log-dir", str(log_dir))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """A small random target and the drafter."""
    folder = tmp_path_factory.mktemp("drafter")
    with NumpyDrafted(folder, write_checkpoint(folder / "target", seed=SEED)) as made:
        made.start(Role.DRAFT, Role.VERIFY)
        yield made


def make_jobs(count: int, *, max_new_tokens: int = 40) -> list[Job]:
    """Greedy, sampled, and sampled with filters; every prompt repeats itself."""
    rng = random.Random(SEED)
    jobs = []
    for number in range(count):
        sampling = SamplingParams(temperature=(0.0, 0.8, 1.2)[number % 3], top_p=(1.0, 0.9)[number % 2], seed=number)
        prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 25))) * 2
        jobs.append(make_job(str(number), prompt, sampling, max_new_tokens))
    return jobs


def make_job(job_id: str, prompt: tuple[int, ...], sampling: SamplingParams, max_new_tokens: int) -> Job:
    """A request that ends with its last token."""
    return Job(
        SequenceSpec(
            job_id=job_id,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(),
        )
    )


def settings(**changes: object) -> dict[str, Any]:
    """Scheduler settings: small sizes, and every check on."""
    sizes = {"fixed_draft_tokens": 3, "slots": 3, "context_tokens": 480, "max_batched_tokens": 16}
    return {**sizes, "page_tokens": 8, "kv_memory_mib": 8, "debug": True, **changes}


async def serve(
    processes: WorkerProcesses, jobs: list[Job], *, has_draft: bool = True, **changes: object
) -> list[list[int]]:
    """The tokens of jobs, by a session of their own."""
    with running_session(processes, has_draft=has_draft, **settings(**changes)) as client:
        await client.served(with_draft=has_draft)
        assert client.epoch is not None
        assert client.epoch.algorithm == ("numpy_ngram" if has_draft else "none")
        outputs = await client.run(*jobs)
    assert client.errors == client.reasons == []
    return outputs


@pytest.fixture(scope="module")
def plain(processes: WorkerProcesses) -> list[list[int]]:
    """Outputs of the nine jobs without a draft."""
    expected = asyncio.run(serve(processes, make_jobs(9), has_draft=False))
    assert all(len(set(output)) > 10 for output in expected)
    return expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_the_same_tokens_as_without_a_draft(
    processes: WorkerProcesses, plain: list[list[int]], run_ahead: int
) -> None:
    """More jobs than slots, so that slots change hands; and single jobs."""
    assert await serve(processes, make_jobs(9), run_ahead=run_ahead) == plain
    for job in make_jobs(3):
        assert await serve(processes, [job], run_ahead=run_ahead) == [plain[int(job.spec.job_id)]]


async def test_the_same_tokens_when_commands_wait_for_acknowledgements(
    processes: WorkerProcesses, plain: list[list[int]]
) -> None:
    assert await serve(processes, make_jobs(9), dispatch="acknowledged", fixed_draft_tokens=7) == plain


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 2])
async def test_everything_it_reads_and_writes_is_in_order(tmp_path: Path, run_ahead: int) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    target = write_checkpoint(tmp_path / "target", seed=SEED)
    with NumpyDrafted(tmp_path, target, logs) as processes:
        processes.start(Role.DRAFT, Role.VERIFY)
        await serve(processes, make_jobs(9), run_ahead=run_ahead, access_log_dir=logs)
        assert processes.end() == [0, 0]
    report = Replay(logs).report()
    assert report.num_logs == 3
    assert report.num_ordered > 500
    assert not report.races
    assert not report.stuck


@pytest.mark.slow
async def test_repetitive_text_is_guessed(tmp_path: Path) -> None:
    """With the bundled model, greedy and sampled: more than one token a step, and the same ones."""
    prompt = tuple(Tokenizer.from_file(str(target_dir() / "tokenizer.json")).encode(REPETITIVE).ids)
    samplings = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95, seed=SEED))
    with NumpyDrafted(tmp_path, target_dir()) as processes:
        processes.start(Role.DRAFT, Role.VERIFY)
        outputs = []
        for has_draft in (True, False):
            jobs = [make_job(str(number), prompt, sampling, 96) for number, sampling in enumerate(samplings)]
            outputs.append(await serve(processes, jobs, has_draft=has_draft, kv_memory_mib=64, fixed_draft_tokens=4))
            if has_draft:
                lengths = [job.stats.mean_accept_length for job in jobs]
        assert outputs[0] == outputs[1]
        print("accept lengths", lengths)
        assert min(lengths) > 1.3
        assert processes.end() == [0, 0]


async def test_a_killed_drafter_costs_no_sequence_and_is_taken_back(processes: WorkerProcesses) -> None:
    expected = await serve(processes, make_jobs(3))
    with running_session(processes, **settings(run_ahead=1)) as client:
        await client.served()
        jobs = make_jobs(3, max_new_tokens=400)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 10)
        processes.send_signal(Role.DRAFT, signal.SIGKILL)
        assert processes.wait(Role.DRAFT) == -signal.SIGKILL
        await until(lambda: client.draft_state != "attached")
        processes.start(Role.DRAFT)
        outputs = await running
        assert [len(output) for output in outputs] == [400] * 3
        assert [output[:40] for output in outputs] == expected
        await client.served()
        assert await client.run(*make_jobs(3)) == expected
    assert client.errors == client.reasons == []


@pytest.mark.slow
async def test_its_steps_are_traced_by_its_stamps_alone(processes: WorkerProcesses) -> None:
    """It does not record what its host does, and need not."""
    with running_session(processes, **settings()) as client:
        await client.served()
        async with timeline_server(client) as address:
            asked = asyncio.create_task(fetch_trace(address, TraceRequest(steps=10)))
            _, trace = await asyncio.gather(client.run(*make_jobs(3, max_new_tokens=120)), asked)
    verify, draft = trace.processes[1:]
    assert {Site.STREAM} <= {record.site for record in draft.records} <= {Site.STREAM, Site.PREFILL}
    assert {record.site for record in verify.records} == {Site.STREAM, Site.RECEIVE, Site.ENQUEUE}
    assert {record.step for record in draft.records} == {step.step for step in trace.steps if step.has_draft}
    check(trace_json(trace))
