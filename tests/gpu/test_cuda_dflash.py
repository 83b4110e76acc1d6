"""A block drafter on a GPU, with graphs and kernels: the tokens are those of plain decoding on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import DFLASH
from slipstream.services.worker.config import WorkerConfig
from tests.harness.checkpoints import write_checkpoint
from tests.harness.eagle3_checkpoints import BLOCKS, LLAMA_BLOCKS, write_head
from tests.harness.local_epoch import LocalEpoch
from tests.harness.seeded_jobs import make_jobs
from tests.harness.workers import local_workers

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.device.interface import Device

NUM_JOBS = 10


def serve(
    device: Device, target: Path, head: Path | None, num_draft_tokens: int, kv_dtype: str = "auto"
) -> tuple[list[list[int]], int]:
    """The tokens of each job, and how many draft tokens were accepted."""
    roles = [make_verify(WorkerConfig(model=target, dtype="float32"), device, 0)]
    if head is not None:
        config = WorkerConfig(model=head, target=target, algorithm=DFLASH, dtype="float32", kv_dtype=kv_dtype)
        roles.append(make_draft(config, device, 0))
    settings = SchedulerConfig(
        verify="unix:/none",
        fixed_draft_tokens=num_draft_tokens,
        slots=4,
        context_tokens=128,
        max_batched_tokens=16,
        kv_memory_mib=64,
    )
    jobs = make_jobs(NUM_JOBS)
    with local_workers(*roles, device=device) as workers:
        outputs = LocalEpoch(1, settings, workers, device=device).run(jobs)
    return [outputs[job] for job in jobs], sum(job.stats.total_accepted_tokens for job in jobs)


@pytest.mark.parametrize(
    ("layout", "num_draft_tokens", "kv_dtype"), [(BLOCKS, 15, "auto"), (LLAMA_BLOCKS, 4, "auto"), (BLOCKS, 7, "fp8")]
)
def test_in_float32_tokens_are_the_cpus(
    device: CudaDevice, tmp_path: Path, layout: str, num_draft_tokens: int, kv_dtype: str
) -> None:
    target = write_checkpoint(tmp_path / "target", seed=11)
    head = write_head(tmp_path / "head", layout=layout)
    plain, _ = serve(HostDevice(), target, None, 1)
    outputs, num_accepted = serve(device, target, head, num_draft_tokens, kv_dtype)
    assert outputs == plain
    assert num_accepted > 0


def test_guesses_are_the_cpus(device: CudaDevice, tmp_path: Path) -> None:
    """As many draft tokens are accepted as on a CPU, but for near ties."""
    target, head = write_checkpoint(tmp_path / "target", seed=11), write_head(tmp_path / "head", layout=BLOCKS)
    counts = [serve(place, target, head, 7)[1] for place in (HostDevice(), device)]
    assert counts[1] == pytest.approx(counts[0], rel=0.1)
