"""Attaching compiles every kernel that steps launch, and takes all memory: what is late holds up all requests."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.bundled import target_dir
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import WorkerConfig
from tests.gpu.test_cuda_models import DRAFTS, MODELS
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker, local_workers
from tests.scheduler.test_ragged_drafts import chosen_at_random

if TYPE_CHECKING:
    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.wire.step import StepCommand

VOCAB_SIZE = 256
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=3),
)
WAVES = ((1,), (2,), (3, 5), (20, 1), (40, 9, 7), (63, 64, 65), (1, 100, 1, 1), (300, 2, 900), (130,) * 6, (4,) * 6)
"""Lengths of prompts that come together."""
FLOOD = (300,) * 14
"""More wait than small steps take in, so steps draft none."""
CROWD = ((8,) * 200,)
"""With so many slots, some mixed steps have more tokens than graphs take."""


class ListeningWorker(LocalWorker):
    """Notes what is late while a step is enqueued.

    Kernels that are compiled, or loaded from Triton's cache, and in mixed steps memory of the device and pinned memory.
    """

    compiled: list[str]
    allocated: list[str]
    taking_in: list[int]
    """The numbers of the steps whose stash a draft takes in without drafting."""

    def send(self, command: StepCommand) -> None:
        """See `LocalWorker.send`."""

        import triton

        what = f"{len(command.slots)} rows and {sum(len(chunk.tokens) for chunk in command.chunks)} tokens"

        def note(**arguments: Any) -> None:
            self.compiled.append(f"{what}: {arguments['repr']}")

        signals = {point.fence for point in command.ops.signals}
        if FenceName.DRAFT_PROPOSED in signals and not command.most_draft_tokens:
            self.taking_in.append(command.step)
        triton.knobs.runtime.jit_cache_hook = note
        before = _reserved()
        try:
            super().send(command)
        finally:
            triton.knobs.runtime.jit_cache_hook = None
        if command.slots and command.chunks and before != _reserved():
            self.allocated.append(f"{what}: {before} to {_reserved()}")


def _reserved() -> tuple[int, int]:
    """Bytes of the device's memory in large blocks, and pinned allocations of the host's.

    Small blocks of 2 MiB may be added: their number depends on the moments at which the device is done with others.
    """
    large = torch.cuda.memory_stats()["reserved_bytes.large_pool.current"]
    return large, torch.cuda.host_memory_stats()["num_host_alloc"]


def forget_kernels() -> None:
    """Has this process compile each kernel anew, or load it from Triton's cache, as if it had just started."""
    import triton

    for name, module in list(sys.modules.items()):
        if name.startswith("slipstream."):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()


@pytest.mark.timeout(300)  # where Triton's cache is empty all kernels are compiled
@pytest.mark.usefixtures("tiny_small_steps")
@pytest.mark.parametrize(
    ("draft", "slots", "lengths_of_waves", "fixed_draft_tokens"),
    [
        *(pytest.param(draft, 12, (*WAVES, FLOOD), 4, id=draft) for draft in DRAFTS),
        pytest.param(EAGLE3, 200, CROWD, 4, id="crowd"),
        pytest.param(EAGLE3, 12, (*WAVES, FLOOD), None, id="chosen"),
    ],
)
def test_no_kernel_is_compiled_for_a_request(
    device: CudaDevice,
    draft: str,
    slots: int,
    lengths_of_waves: tuple[tuple[int, ...], ...],
    fixed_draft_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor for a number of draft tokens that is drawn anew in each step."""
    chosen_at_random(monkeypatch)
    forget_kernels()
    for name in ("compiled", "allocated", "taking_in"):
        monkeypatch.setattr(ListeningWorker, name, [], raising=False)
    roles = [make_verify(WorkerConfig(model=target_dir(), dtype="bfloat16"), device, 0)]
    if draft != "none":
        model = MODELS.get(draft)
        config = WorkerConfig(model=model, algorithm=draft, target=target_dir(), dtype="bfloat16")
        roles.append(make_draft(config, device, 0))
    settings = SchedulerConfig(
        verify="unix:/none",
        fixed_draft_tokens=fixed_draft_tokens,
        slots=slots,
        context_tokens=1024,
        max_batched_tokens=700,
        kv_memory_mib=64,
    )
    print("prompts from seed 1")
    generator = random.Random(1)
    waves = [[job(generator, length, number) for number, length in enumerate(lengths)] for lengths in lengths_of_waves]
    with local_workers(*roles, device=device, make=ListeningWorker) as workers:
        epoch = LocalEpoch(1, settings, workers, device=device)
        outputs = epoch.run(*waves)
    assert all(outputs.values())
    assert ListeningWorker.compiled == []
    assert ListeningWorker.allocated == []
    assert bool(ListeningWorker.taking_in) == (draft != "none")


def job(generator: random.Random, num_tokens: int, number: int) -> Job:
    """Random tokens."""
    return Job(
        SequenceSpec(
            job_id=f"{generator.random()}",
            prompt=tuple(generator.randrange(VOCAB_SIZE) for _ in range(num_tokens)),
            max_new_tokens=12,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            stop_token_ids=frozenset(),
            top_logprobs=2 if number % 4 == 3 else None,
        )
    )
