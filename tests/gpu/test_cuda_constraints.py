"""Masks on a GPU: streams wait for them, kernels apply them, and outputs are a CPU's, whatever becomes of them."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream import bundled
from slipstream.common.wire.layout import GRAMMAR_OWN_FENCES, UNMASKED, UNMATCHED, BufferName, GrammarShape
from slipstream.common.wire.step import FenceName, Role
from slipstream.services.factory import make_verify
from slipstream.services.worker.config import WorkerConfig
from tests.gpu.test_cuda_rehearsal import ListeningWorker, forget_kernels
from tests.harness import masked_steps
from tests.harness.counted_jobs import Job
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session
from tests.scheduler.test_constraints import SPECS, plain, target
from tests.scheduler.test_constraints_processes import GrammarProcess, active, num_output

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from tests.harness.worker_processes import Client

__all__ = ["plain", "target"]

STEP, SLOTS, K, VOCAB_SIZE = 7, 6, 3, 128_256
STAMPS = (0, STEP, -STEP, STEP - 1, STEP, STEP)
"""By slot: those of the step, of a matcher that has failed, and of an earlier step."""
SETTINGS: dict[str, Any] = {
    "slots": 8,
    "context_tokens": 128,
    "fixed_draft_tokens": 4,
    "kv_memory_mib": 256,
    "grammar_timeout_ms": 1000.0,
}
NUM_ROUNDS = 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stream_waits_for_masks_in_the_hosts_memory(device: CudaDevice, dtype: torch.dtype) -> None:
    """And so does what is enqueued after it: the masks are written while the stream waits."""
    # Imported here, as there is no triton where there is no GPU.
    from slipstream.services.models.kernels.masks import apply_masks, faults_of

    shape = GrammarShape(num_slots=SLOTS, num_draft_tokens=K, vocab_size=VOCAB_SIZE)
    own = device.create_arena(shape.own_specs(), GRAMMAR_OWN_FENCES, on_host=True)
    opened, stream = device.open_arena(own.manifest), device.create_stream("sampling", lambda error: None)
    before = torch.cuda.current_stream()
    masks, stamps = (opened.tensor(name) for name in (BufferName.MASKS, BufferName.MASK_STAMPS))
    rows, constrained = (torch.tensor(values, device="cuda") for values in ((4, 5, 1, 3, 2, 0), (0, 1, 1, 1, 1, 0)))
    logits = torch.randn(len(rows), K + 1, VOCAB_SIZE, dtype=dtype, device="cuda")
    expected, masked, found = logits.cpu(), logits.clone(), torch.zeros(len(rows), dtype=torch.int64, device="cuda")

    def apply() -> None:
        faults = faults_of(stamps, constrained, rows, STEP)
        apply_masks(masks, constrained, rows, faults, masked)
        found.copy_(faults)

    stream.enqueue(apply)  # loads the kernels
    stream.synchronize(10.0)
    assert found.tolist() == [UNMASKED, 0, UNMASKED, UNMASKED, UNMASKED, 0]
    assert torch.equal(masked, logits)
    opened.fence(FenceName.GRAMMAR_READY).wait(stream, STEP)
    stream.enqueue(apply)
    words = own.tensor(BufferName.MASKS)
    words.copy_(torch.randint(-(2**31), 2**31, words.shape, generator=torch.Generator().manual_seed(1)))
    own.tensor(BufferName.MASK_STAMPS).copy_(torch.tensor(STAMPS))
    assert not device.driver.is_idle(stream.handle)
    own.fence(FenceName.GRAMMAR_READY).release(STEP)
    stream.synchronize(10.0)
    torch.cuda.set_stream(before)
    assert found.tolist() == [0, 0, 0, UNMASKED, UNMATCHED, 0]
    for row in (0, 2):
        bits = words[int(rows[row]), :, :, None] >> torch.arange(32) & 1
        expected[row].masked_fill_(bits.flatten(1)[:, :VOCAB_SIZE] == 0, float("-inf"))
    assert torch.equal(masked.cpu(), expected)
    stream.close()
    own.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_wait_where_they_should_and_compile_nothing(
    device: CudaDevice, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_kernels()
    for name in ("compiled", "allocated", "taking_in"):
        monkeypatch.setattr(ListeningWorker, name, [], raising=False)
    monkeypatch.setattr(masked_steps, "LocalWorker", ListeningWorker)
    role = make_verify(WorkerConfig(model=bundled.target_dir(), dtype="float32"), device, 0)
    masked_steps.check_masked_steps(role, device, temperature=temperature)
    assert ListeningWorker.compiled == []


def accepted(jobs: list[Job]) -> int:
    """Draft tokens that were accepted."""
    return sum(job.stats.total_accepted_tokens for job in jobs)


@pytest.mark.timeout(300)
async def test_outputs_are_those_of_a_cpu_with_a_draft_and_every_loss(
    tmp_path: Path, device: CudaDevice, plain: list[list[int]]
) -> None:
    """Rows of one width in float32: what is computed of a token does not depend on the draft, or on the batch."""
    programs = {Role.VERIFY: ("-m", "slipstream.services.verify_main", "--deterministic-width", "5")}
    models = {Role.VERIFY: bundled.target_dir(), Role.DRAFT: bundled.standalone_dir()}
    options = ("--device", "cuda", "--dtype", "float32")
    with (
        WorkerProcesses(tmp_path, models, *options, programs=programs) as processes,
        GrammarProcess(tmp_path) as grammar,
        running_session(processes, device=device, grammar=grammar.address, **SETTINGS) as client,
    ):
        processes.start(Role.VERIFY)
        await client.served(with_draft=False)
        assert await client.run(*map(Job, SPECS)) == plain
        processes.start(Role.DRAFT)
        await client.served()
        jobs = [Job(replace(one, job_id=f"drafted-{one.job_id}")) for one in SPECS]
        assert await client.run(*jobs) == plain
        assert accepted(jobs) > 0
        await lose_grammar_workers(client, grammar, plain)
        assert not client.errors
        assert not client.reasons


async def lose_grammar_workers(client: Client, grammar: GrammarProcess, plain: list[list[int]]) -> None:
    """Kills and stops them while sequences run."""
    jobs = [Job(replace(one, job_id=f"{number}-{one.job_id}")) for number in range(NUM_ROUNDS) for one in SPECS]
    running = asyncio.create_task(client.run(*jobs))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        before = num_output(client, jobs)
        await until(lambda: active(client) is not None and num_output(client, jobs) > before + 20)  # noqa: B023
        lost = active(client)
        grammar.process.send_signal(number)
        await until(lambda: active(client) is not lost)  # noqa: B023
        if number is signal.SIGSTOP:
            grammar.process.send_signal(signal.SIGCONT)
        else:
            grammar.restart()
    assert await running == NUM_ROUNDS * plain
