"""Every service of a real server dies, hangs or stops at each of its points: every job ends with the same tokens."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from slipstream.bundled import prompts, target_dir
from slipstream.client import AsyncClient
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.gateway.tokenizer import load_tokenizer
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_verify
from slipstream.services.worker.config import WorkerConfig
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.planted_faults import POINTS, PlantedFaults
from tests.harness.running import running_up, until
from tests.harness.workers import local_workers

pytestmark = pytest.mark.timeout(180)

NUM_JOBS = 6
MAX_NEW_TOKENS = 160
OPTIONS = ("--device", "cpu", "--metrics-port", "0", "--fixed-draft-tokens", "4")
TIMES = {"draft.before_ready": 1, "draft.before_attach": 1, "gateway.before_submit": 1}
"""Points that a server comes to once; the others fail in the middle of the jobs."""
TIME = 20
AGAIN = {
    "scheduler.before_attach": f"verify.before_publish:kill@{TIME}",
    "scheduler.before_attach_draft": f"draft.before_proposed:kill@{TIME}",
    "verify.before_attach": f"scheduler.after_send:kill@{TIME}",
}
"""Points that fail the second time: a server that loses a service before it is ready does not start. For each, what
makes the process come there again."""
HUNG = (
    *("gateway.before_delivery:stop", "scheduler.after_send:stop", "verify.before_publish:stop"),
    *("draft.before_proposed:stop", "draft.before_proposed:hang", "draft.before_step:hang"),
)


def sampling_of(number: int) -> dict[str, Any]:
    """Greedy and sampled in turn."""
    return {"temperature": 0.8 * (number % 2), "seed": number}


async def outputs(address: str, *, name: str) -> list[tuple[int, ...]]:
    """The tokens of each job, all at once. `name`: what the jobs' names begin with."""

    async def run(client: AsyncClient, number: int) -> tuple[int, ...]:
        prompt = prompts()[number].text
        tokens: list[int] = []
        async for chunk in client.generate(
            prompt,
            job_id=f"{name}-{number}",
            max_new_tokens=MAX_NEW_TOKENS,
            ignore_eos=True,
            reconnect_s=120.0,
            **sampling_of(number),
        ):
            tokens += chunk.token_ids
        return tuple(tokens)

    async with AsyncClient(address, connect_timeout_s=120.0) as client:
        return list(await asyncio.gather(*(run(client, number) for number in range(NUM_JOBS))))


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The tokens of the target alone, in this process."""
    tokenizer = load_tokenizer(target_dir())
    jobs = [
        Job(
            SequenceSpec(
                job_id=str(number),
                prompt=tuple(tokenizer.encode(prompts()[number].text)),
                max_new_tokens=MAX_NEW_TOKENS,
                sampling=SamplingParams(**sampling_of(number)),
                stop_token_ids=frozenset(),
            )
        )
        for number in range(NUM_JOBS)
    ]
    verify = make_verify(WorkerConfig(model=target_dir(), device="cpu"), HostDevice(), 0)
    with local_workers(verify) as workers:
        outputs = LocalEpoch(1, SchedulerConfig(verify="unix:/none", slots=NUM_JOBS), workers).run(jobs)
    return [tuple(outputs[job]) for job in jobs]


async def check_until_failed(faults: PlantedFaults, state_dir: Path, expected: list[tuple[int, ...]]) -> None:
    """Runs the jobs, once more with other names while not every point has failed."""
    is_over, number = False, 0
    while not is_over:
        is_over, number = faults.have_failed, number + 1
        assert await outputs((state_dir / "server").read_text(), name=f"round-{number}") == expected


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(name for name in POINTS if not name.startswith("rank.")))
def test_a_service_that_dies(expected: list[tuple[int, ...]], tmp_path: Path, name: str) -> None:
    points = (f"{name}:kill@2", AGAIN[name]) if name in AGAIN else (f"{name}:kill@{TIMES.get(name, TIME)}",)
    faults, state_dir = PlantedFaults(tmp_path / "record", *points), tmp_path / "state"
    with running_up(state_dir, *OPTIONS, environment=faults.environment) as up:
        asyncio.run(check_until_failed(faults, state_dir, expected))
        for point in points:
            is_loading = point.startswith("draft.before_ready")
            again = "before it was ready and is tried again" if is_loading else "and is started again"
            killed = f"{point.partition('.')[0]} was killed by SIGKILL {again}"
            until(lambda killed=killed: killed in up.errors(), up)  # type: ignore[misc]
        up.signal(signal.SIGINT)
        assert up.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scheduler.before_delivery", "scheduler.before_take_in"])
def test_a_service_whose_callback_or_thread_fails(expected: list[tuple[int, ...]], tmp_path: Path, name: str) -> None:
    faults, state_dir = PlantedFaults(tmp_path / "record", f"{name}:raise@{TIME}"), tmp_path / "state"
    with running_up(state_dir, *OPTIONS, environment=faults.environment) as up:
        asyncio.run(check_until_failed(faults, state_dir, expected))
        until(lambda: "scheduler ended with exit status 1 and is started again" in up.errors(), up)


@pytest.mark.slow
@pytest.mark.parametrize("point", HUNG)
def test_a_service_that_hangs(expected: list[tuple[int, ...]], tmp_path: Path, point: str) -> None:
    faults, state_dir = PlantedFaults(tmp_path / "record", f"{point}@{TIME}"), tmp_path / "state"
    options = (*OPTIONS, "--hang-timeout-s", "2")
    with running_up(state_dir, *options, environment=faults.environment) as up:
        asyncio.run(check_until_failed(faults, state_dir, expected))
        if point.endswith(":stop"):
            until(lambda: "and is started again" in up.errors(), up)
        up.signal(signal.SIGINT)
        until(lambda: "stopping" in up.errors(), up)
        # A thread that hangs drains nothing.
        up.signal(signal.SIGINT)
        up.end()
