"""Verify as several ranks: no token depends on the draft, and a rank that dies or hangs costs no sequence."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from slipstream import bundled
from slipstream.cli.trace import fetch_trace, trace_json
from slipstream.common.errors import UnavailableError
from slipstream.common.rpc.metrics import scrape
from slipstream.common.wire.events import Site
from slipstream.common.wire.step import Role
from slipstream.common.wire.trace import MAX_WAIT_MS, TracedProcess, TraceRequest
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.services.models.head_config import DFLASH, EAGLE, EAGLE3, MTP
from slipstream.services.worker.config import NGRAM, STANDALONE
from slipstream.services.worker.rank_metrics import RANK_FREE, RANK_RESIDENT, RANK_UP, RANK_WAITED
from tests.harness.checkpoints import write_checkpoint, write_guesser
from tests.harness.counted_jobs import Job
from tests.harness.eagle3_checkpoints import AUTHORS, BLOCKS, EAGLE_AUTHORS, MODULES, write_head
from tests.harness.planted_faults import PlantedFaults
from tests.harness.trace_format import check as check_format
from tests.harness.trace_format import slices_by_thread
from tests.harness.transformers_checkpoints import greedy_tokens
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session, timeline_server
from tests.scheduler.test_constraints import EOS, SPECS, check
from tests.scheduler.test_constraints_processes import GrammarProcess
from tests.scheduler.test_session import SEED, make_jobs, settings

pytestmark = pytest.mark.timeout(180)
DRAFT, VERIFY = Role.DRAFT, Role.VERIFY
LAYOUTS = {EAGLE3: AUTHORS, EAGLE: EAGLE_AUTHORS, MTP: MODULES, DFLASH: BLOCKS}
RANKS = ("-m", "slipstream.services.verify_main", "--tensor-parallel-size", "2", "--threads", "1")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=SEED)


@pytest.fixture(scope="module")
def processes(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """A verify of two ranks. A test leaves it as it found it."""
    with WorkerProcesses(tmp_path_factory.mktemp("sockets"), {VERIFY: target}, programs={VERIFY: RANKS}) as made:
        made.start(VERIFY)
        yield made


def followers(processes: WorkerProcesses) -> list[psutil.Process]:
    """The ranks after the first."""
    return psutil.Process(processes.pid(VERIFY)).children()


async def undisturbed(processes: WorkerProcesses, num_jobs: int, max_new_tokens: int) -> list[list[int]]:
    """The tokens of jobs without a draft, when nothing happens."""
    with running_session(processes, has_draft=False, **settings()) as client:
        await client.served(with_draft=False)
        return await client.run(*make_jobs(num_jobs, max_new_tokens=max_new_tokens))


@pytest.mark.parametrize(
    "algorithm", [NGRAM, *(pytest.param(name, marks=pytest.mark.slow) for name in (STANDALONE, *LAYOUTS))]
)
async def test_tokens_do_not_depend_on_the_draft(
    processes: WorkerProcesses, target: Path, tmp_path: Path, algorithm: str
) -> None:
    expected = await undisturbed(processes, 5, 24)
    options = ("--target", str(target)) if algorithm != STANDALONE else ()
    processes.programs[DRAFT] = ("-m", "slipstream.services.draft_main", "--algorithm", algorithm, *options)
    if algorithm != NGRAM:
        layout, path = LAYOUTS.get(algorithm), tmp_path / "draft"
        processes.models[DRAFT] = (
            write_guesser(path, target, seed=SEED) if layout is None else write_head(path, layout=layout, seed=SEED)
        )
    processes.start(DRAFT)
    try:
        with running_session(processes, **settings()) as client:
            await client.served()
            jobs = make_jobs(5, max_new_tokens=24)
            assert await client.run(*jobs) == expected
            assert sum(job.stats.total_draft_tokens for job in jobs) > 0
    finally:
        processes.send_signal(DRAFT, signal.SIGTERM)
        processes.wait(DRAFT)
        processes.models.pop(DRAFT, None)
    if algorithm == EAGLE3:
        greedy = make_jobs(1)[0].spec
        assert greedy_tokens(target, [greedy.prompt], len(expected[0])) == [expected[0]]


async def test_each_rank_has_metrics(processes: WorkerProcesses) -> None:
    await undisturbed(processes, 1, 5)
    with grpc.insecure_channel(processes.address(VERIFY)) as channel:
        port = pb_grpc.WorkerStub(channel).Describe(pb.DescribeRequest()).metrics_port
    while True:  # the other rank says how long it waited with its next sign of life
        page = await scrape(port)
        waited = page.by("rank", RANK_WAITED.name)
        if all(waited.values()):
            break
    assert waited.keys() == {"0", "1"}
    assert page.by("rank", RANK_UP.name) == {"0": 1, "1": 1}
    assert min(page.by("rank", RANK_RESIDENT.name).values()) > 10e6
    assert not page.by("rank", RANK_FREE.name), "it is the host's"


async def test_a_trace_has_the_work_of_each_rank(processes: WorkerProcesses) -> None:
    with running_session(processes, has_draft=False, **settings()) as client:
        await client.served(with_draft=False)
        async with timeline_server(client) as address:
            found: dict[str, TracedProcess] = {}
            while "verify rank 1" not in found:  # on a busy host it may answer too late
                asked = asyncio.create_task(fetch_trace(address, TraceRequest(steps=6, wait_ms=MAX_WAIT_MS)))
                while not asked.done():
                    await client.run(*make_jobs(1, max_new_tokens=20))
                trace = await asked
                found = {process.name: process for process in trace.processes}
    assert list(found) == ["scheduler", "verify", "verify rank 1"]
    verify, rank = found["verify"], found["verify rank 1"]
    assert [rank.pid] == [process.pid for process in followers(processes)]
    assert verify.model.endswith("(2 ranks)"), "which status shows"
    led = {record.step: record for record in verify.records if record.site is Site.STREAM}
    waited = {(record.step, record.begin_ns): record for record in rank.records if record.site is Site.COLLECTIVES}
    work = [record for record in rank.records if record.site is Site.STREAM]
    assert {record.step for record in work} == {step.step for step in trace.steps if step.num_slots}
    for record in work:
        assert led[record.step].begin_ns <= record.begin_ns <= led[record.step].end_ns
        assert record.begin_ns < waited[record.step, record.begin_ns].end_ns <= record.end_ns
    content = trace_json(trace)
    check_format(content)
    shown = slices_by_thread(content)[4, 4000]
    assert [slice_["args"]["step"] for slice_ in shown] == [record.step for record in work]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_dies_or_hangs_ends_all_and_costs_no_token(processes: WorkerProcesses, number: int) -> None:
    """A hanging one takes the time until it is noticed."""
    expected = await undisturbed(processes, 3, 150)
    with running_session(processes, has_draft=False, **settings()) as client:
        await client.served(with_draft=False)
        jobs = make_jobs(3, max_new_tokens=150)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 20)
        ranks = followers(processes)
        (ranks[0]).send_signal(number)
        with pytest.raises(UnavailableError):
            await running
        assert processes.wait(VERIFY) == 1
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() for rank in ranks)
        processes.start(VERIFY)
        await until(lambda: client.num_epochs == 2)
        assert await client.run(*make_jobs(3, max_new_tokens=150)) == expected
    assert client.errors == []


@pytest.mark.slow
async def test_a_rank_whose_thread_hangs_ends_all(
    processes: WorkerProcesses, target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its process lives, and its other thread could show signs of life."""
    faults = PlantedFaults(tmp_path / "record", "rank.before_forward:hang@60")
    with (
        WorkerProcesses(
            tmp_path, {VERIFY: target}, programs={VERIFY: RANKS}, environment=faults.environment
        ) as hanging,
        running_session(hanging, has_draft=False, **settings()) as client,
    ):
        hanging.start(VERIFY)
        await client.served(with_draft=False)
        with pytest.raises(UnavailableError):
            await client.run(*make_jobs(3, max_new_tokens=150))
        assert faults.have_failed
        assert hanging.wait(VERIFY) == 1
        hanging.start(VERIFY)
        await until(lambda: client.num_epochs == 2)
        tokens = await client.run(*make_jobs(3, max_new_tokens=150))
    assert "rank 1 of the target has shown no sign of life for 10 s" in capfd.readouterr().err
    assert tokens == await undisturbed(processes, 3, 150)


@pytest.mark.slow
async def test_ranks_end_with_the_first(processes: WorkerProcesses) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        await undisturbed(processes, 1, 5)
        ranks = followers(processes)
        processes.send_signal(VERIFY, number)
        assert processes.wait(VERIFY) == (0 if number == signal.SIGTERM else -number)
        gone, alive = psutil.wait_procs(ranks, timeout=60)
        assert len(gone) == 1
        assert not alive
        processes.start(VERIFY)


@pytest.mark.slow
async def test_constraints_hold_at_several_ranks(tmp_path: Path) -> None:
    """Rank 0 alone applies masks."""
    sizes = {"vocab_size": 4096, "bos_token_id": EOS, "eos_token_id": EOS}
    target = write_checkpoint(tmp_path / "target", seed=SEED, has_tokenizer=False, **sizes)  # type: ignore[arg-type]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(bundled.target_dir() / name, target)
    models = {VERIFY: target, DRAFT: write_guesser(tmp_path / "draft", target, seed=SEED)}
    with (
        WorkerProcesses(tmp_path, models, programs={VERIFY: RANKS}) as workers,
        GrammarProcess(tmp_path) as grammar,
        running_session(
            workers, grammar=grammar.address, slots=4, context_tokens=128, grammar_timeout_ms=2e4
        ) as client,
    ):
        workers.start(VERIFY)
        await client.served(with_draft=False)
        plain = await client.run(*map(Job, SPECS))
        check(plain)
        workers.start(DRAFT)
        await client.served()
        jobs = [Job(replace(one, job_id=f"drafted {one.job_id}")) for one in SPECS]
        assert await client.run(*jobs) == plain
        assert sum(job.stats.total_accepted_tokens for job in jobs) > 0
