"""Tests of memory of the host that a GPU writes, with a fake driver: who maps it, and until when."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.common.device.interface import Arena, PollTime
from slipstream.common.errors import DeviceError, FailedPreconditionError, ManifestError
from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.step import FenceName
from tests.harness import fake_cuda
from tests.harness.fake_cuda import FakeCuda, Result

SPECS = (BufferSpec("lengths", (3, 4), torch.int64, "verify"),)
PROPOSED = FenceName.DRAFT_PROPOSED
GPU_ADDRESS = 1 << 40


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A driver that does all that it is asked."""
    with fake_cuda.installed() as fake:
        fake.answers["cuMemHostGetDevicePointer"] = (Result.CUDA_SUCCESS, GPU_ADDRESS)
        yield fake


class Stores:
    """Kernels that only note what they are told to store."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, int]] = []

    def store(self, stream: int, address: int, value: int) -> None:
        """See `CudaKernels.store`."""
        self.done.append((stream, address, value))


def polled() -> Arena:
    """The scheduler's end."""
    made: Arena = fake_cuda.module("cuda.arena").PolledArena.create(SPECS, (PROPOSED,))
    return made


def written(arena: Arena, stores: Stores | None = None, *, has_timelines: bool = False) -> Any:
    """A worker's end, of a GPU whose streams write no words themselves."""
    gpu = SimpleNamespace(driver=fake_cuda.driver(), kernels=stores or Stores(), has_timelines=has_timelines)
    return fake_cuda.module("cuda.arena").WrittenArena.of(arena.manifest, gpu)


def test_the_host_sees_a_value_that_nobody_wakes_it_for(cuda: FakeCuda) -> None:
    arena = polled()
    fence = arena.fence(PROPOSED)
    assert not fence.wait_on_host(1, 0.01)
    memory = fake_cuda.module("cuda.arena").HostArena.open(arena.manifest)
    thread = threading.Thread(target=memory.fence(PROPOSED).release, args=(3,))
    thread.start()
    assert fence.wait_on_host(2, 10.0, PollTime(time.monotonic() + 0.001, usual_s=0.001))
    thread.join()
    assert fence.poll() == 3
    arena.close()


def new_stream() -> Any:
    """A stream, whose work PyTorch has no part in."""
    stream_module = fake_cuda.module("cuda.stream")
    stream_module.torch = SimpleNamespace(
        cuda=SimpleNamespace(ExternalStream=lambda handle, device: handle, set_stream=lambda stream: None),
        inference_mode=torch.inference_mode,
    )
    return stream_module.CudaStream("verify", fake_cuda.driver(), torch.device("cuda"), lambda error: None)


def test_a_stream_waits_where_the_gpu_has_the_word_and_any_process_releases_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, stream, waits = polled(), new_stream(), list[tuple[int, int, int]]()
    calls = SimpleNamespace(wait_at_least=lambda *arguments: waits.append(arguments), write=lambda *_: None)
    monkeypatch.setattr(fake_cuda.module("cuda.driver").CudaDriver, "streams", calls)
    fence = written(arena, has_timelines=True).fence(PROPOSED)
    fence.wait(stream, 7)
    assert waits == [(stream.handle, GPU_ADDRESS + arena.manifest.fences[0].offset, 7)]
    assert fence.is_releasable
    fence.release(7)
    assert arena.fence(PROPOSED).poll() == 7
    arena.close()


def test_a_stream_writes_where_the_gpu_has_the_word(cuda: FakeCuda) -> None:
    arena, stores = polled(), Stores()
    fence, stream = written(arena, stores).fence(PROPOSED), new_stream()
    fence.signal(stream, 7)
    assert stores.done == [(stream.handle, GPU_ADDRESS + arena.manifest.fences[0].offset, 7)]
    with pytest.raises(FailedPreconditionError, match="stream verify: a fence that is only for the host"):
        fence.wait(stream, 7)
    arena.close()


def test_the_gpu_has_the_memory_until_the_last_fence_is_gone(cuda: FakeCuda) -> None:
    arena = polled()
    opened = written(arena)
    fence = opened.fence(PROPOSED)
    assert cuda.calls.count("cuMemHostRegister") == 1
    opened.close()
    del opened
    gc.collect()
    assert "cuMemHostUnregister" not in cuda.calls
    del fence
    gc.collect()
    assert cuda.calls.count("cuMemHostUnregister") == 1
    arena.close()


def test_memory_that_the_gpu_cannot_have_is_the_drivers_error(cuda: FakeCuda) -> None:
    arena = polled()
    cuda.fail("cuMemHostRegister", Result.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
        written(arena)
    arena.close()


def test_what_is_not_there_is_named(cuda: FakeCuda) -> None:
    arena = polled()
    opened = written(arena)
    with pytest.raises(ManifestError, match="no buffer seq_lens"):
        opened.tensor("seq_lens")
    with pytest.raises(ManifestError, match="no fence VERIFY_STASH"):
        opened.fence(FenceName.VERIFY_STASH)
    arena.close()
