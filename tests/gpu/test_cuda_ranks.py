"""Verify on two GPUs: the same sums on both, the same tokens whatever drafts, and nothing left of a rank that dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
import torch.multiprocessing

from slipstream.common.errors import UnavailableError
from slipstream.common.wire.step import Role
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import NGRAM
from tests.harness.checkpoints import write_checkpoint
from tests.harness.cuda_sums import check_sums
from tests.harness.eagle3_checkpoints import write_head
from tests.harness.transformers_checkpoints import greedy_tokens
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session
from tests.scheduler.test_session import SEED, make_jobs, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.cuda.device import CudaDevice

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs"),
]
DRAFT, VERIFY = Role.DRAFT, Role.VERIFY
CALM = settings(debug=False)
NEW_TOKENS = 60


def test_all_ways_to_add_up_give_both_ranks_the_same_bits(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(check_sums, args=(str(tmp_path / "store"),), nprocs=2)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=SEED, intermediate_size=256)


Drafts = Mapping[str, Path | None]
"""Models by algorithm."""


@pytest.fixture(scope="module")
def drafts(target: Path) -> Drafts:
    return {NGRAM: None, EAGLE3: write_head(target.with_name("head"), seed=SEED)}


def verify_of(folder: Path, target: Path, *options: str, num_ranks: int = 2) -> WorkerProcesses:
    """A verify of several ranks; `check_drafts` adds a draft."""
    folder.mkdir(mode=0o700)
    ranks = ("--device", "cuda", "--tensor-parallel-size", str(num_ranks))
    program = ("-m", "slipstream.services.verify_main", *ranks, *options)
    return WorkerProcesses(folder, {VERIFY: target}, programs={VERIFY: program})


async def check_drafts(
    made: WorkerProcesses, drafts: Drafts, device: CudaDevice, *options: str, times: int = 1
) -> list[list[int]]:
    """Asserts that the tokens with each draft are those without, and returns them. `times`: as it dies in between."""
    with made as processes, running_session(processes, device=device, **CALM) as client:
        processes.start(VERIFY)
        await client.served(with_draft=False)
        expected = await client.run(*make_jobs(6, max_new_tokens=NEW_TOKENS))
        for algorithm, model in [draft for draft in drafts.items() for _ in range(times)]:
            of_draft = ("--algorithm", algorithm, "--target", str(processes.models[VERIFY]), *options)
            processes.programs[DRAFT] = ("-m", "slipstream.services.draft_main", *of_draft)
            processes.models |= {} if model is None else {DRAFT: model}
            processes.start(DRAFT)
            await client.served()
            jobs = make_jobs(6, max_new_tokens=NEW_TOKENS)
            assert await client.run(*jobs) == expected
            assert sum(job.stats.total_draft_tokens for job in jobs) > 0
            processes.send_signal(DRAFT, signal.SIGKILL)
            processes.wait(DRAFT)
            await until(lambda: client.draft_state == "missing")
        assert client.errors == client.reasons == []
    return expected


@pytest.mark.parametrize(("dtype", "width"), [("float32", None), ("float32", "5"), ("bfloat16", "5")])
async def test_tokens_do_not_depend_on_the_draft(
    tmp_path: Path, device: CudaDevice, target: Path, drafts: Drafts, dtype: str, width: str | None
) -> None:
    options = ("--dtype", dtype, *(() if width is None else ("--deterministic-width", width)))
    draft_options = ("--device", "cuda", "--dtype", dtype)
    found = await check_drafts(verify_of(tmp_path / "run", target, *options), drafts, device, *draft_options)
    if dtype == "float32":
        greedy = make_jobs(1)[0].spec
        assert greedy_tokens(target, [greedy.prompt], NEW_TOKENS) == [found[0]]


@pytest.fixture(scope="module")
def verify(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    with verify_of(tmp_path_factory.mktemp("sockets") / "run", target, "--dtype", "float32") as made:
        made.start(VERIFY)
        yield made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_dies_or_hangs_ends_all_and_costs_no_token(
    verify: WorkerProcesses, device: CudaDevice, number: int
) -> None:
    with running_session(verify, device=device, has_draft=False, **CALM) as client:
        await client.served(with_draft=False)
        expected = await client.run(*make_jobs(3, max_new_tokens=400))
        free = torch.cuda.mem_get_info(1)[0]
        jobs = make_jobs(3, max_new_tokens=400)
        running = asyncio.create_task(client.run(*jobs))
        await until(lambda: jobs[0].stats.num_output_tokens > 20)
        ranks = psutil.Process(verify.pid(VERIFY)).children()
        ranks[0].send_signal(number)
        with pytest.raises(UnavailableError):
            await running
        assert verify.wait(VERIFY) == 1
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
        assert torch.cuda.mem_get_info(1)[0] > free, "its memory is given back"
        verify.start(VERIFY)
        await until(lambda: client.num_epochs == 2)
        assert await client.run(*make_jobs(3, max_new_tokens=400)) == expected
    assert client.errors == []


def test_all_ranks_end_with_the_first(verify: WorkerProcesses) -> None:
    ranks = psutil.Process(verify.pid(VERIFY)).children()
    verify.send_signal(VERIFY, signal.SIGTERM)
    assert verify.wait(VERIFY) == 0
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
