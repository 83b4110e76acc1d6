"""The drafter in plain CUDA beside the real verify service: the same tokens. And what a conformance kit finds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from slipstream.bundled import prompts, target_dir
from slipstream.cli.check_drafter import run_check_drafter
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from tests.harness.counted_jobs import Job
from tests.harness.example_drafters import CUDA_DRAFTER, OWN_DRAFTERS, ExampleDrafted, serving
from tests.harness.worker_processes import running_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.device.interface import Device
    from tests.harness.worker_processes import WorkerProcesses

CHECKED = {
    "cuda_lookup": (str(CUDA_DRAFTER), "--tokenizer", str(target_dir())),
    **{algorithm: (*program, "--device", "cuda") for algorithm, program in OWN_DRAFTERS.items()},
}
NUM_JOBS = 6
MAX_NEW_TOKENS = 96
SIZES = {"slots": 3, "fixed_draft_tokens": 4, "context_tokens": 512, "max_batched_tokens": 64, "kv_memory_mib": 256}
REPETITIVE = "".join(f"    def test_{name}(self):\n        self.check({name})\n\n" for name in ("one", "two", "six"))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    """The bundled target in rows of one width, so that what is computed of a token does not depend on the draft."""
    folder, width = tmp_path_factory.mktemp("drafter"), str(SIZES["fixed_draft_tokens"] + 1)
    program = [str(CUDA_DRAFTER), "--dtype", "float32"]
    options = ("--device", "cuda", "--dtype", "float32", "--deterministic-width", width)
    with ExampleDrafted(folder, target_dir(), program, *options) as made:
        made.start(Role.DRAFT, Role.VERIFY)
        yield made


def make_jobs() -> list[Job]:
    """Held-out prompts and one that repeats itself, greedy and sampled in turn; more of them than slots."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir())
    texts = [REPETITIVE, REPETITIVE, *(prompt.text for prompt in prompts()[: NUM_JOBS - 2])]
    return [
        Job(
            SequenceSpec(
                job_id=str(number),
                prompt=tuple(tokenizer(text).input_ids),
                max_new_tokens=MAX_NEW_TOKENS,
                sampling=SamplingParams(temperature=0.7 * (number % 2), seed=number),
                stop_token_ids=frozenset(),
            )
        )
        for number, text in enumerate(texts)
    ]


async def serve(
    processes: WorkerProcesses, jobs: list[Job], device: Device, *, has_draft: bool = True, **settings: Any
) -> list[list[int]]:
    """The tokens of jobs, by a session of their own."""
    settings = {"device": device, "has_draft": has_draft, "no_prefix_cache": True, **SIZES, **settings}
    with running_session(processes, **settings) as client:
        await client.served(with_draft=has_draft)
        assert client.epoch is not None
        assert client.epoch.algorithm == ("cuda_lookup" if has_draft else "none")
        outputs = await client.run(*jobs)
    assert client.errors == client.reasons == []
    return outputs


@pytest.fixture(scope="module")
def plain(processes: WorkerProcesses, device: CudaDevice) -> list[list[int]]:
    """Outputs of the jobs without a draft."""
    return asyncio.run(serve(processes, make_jobs(), device, has_draft=False))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_the_same_tokens_as_without_a_draft(
    processes: WorkerProcesses, plain: list[list[int]], device: CudaDevice, run_ahead: int
) -> None:
    jobs = make_jobs()
    assert await serve(processes, jobs, device, run_ahead=run_ahead) == plain
    lengths = [job.stats.mean_accept_length for job in jobs]
    print("accept lengths", lengths)
    # Greedy and sampled: the noise is the target's, at the position of the token that is guessed.
    assert min(lengths[:2]) > 1.5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafter", CHECKED)
def test_nothing_is_broken_by(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, *CHECKED[drafter]) as address:
        # Attaching compiles kernels where the cache has none.
        status = run_check_drafter(address, "auto", timeout_s=120.0)
    assert status == 0, capsys.readouterr().out
