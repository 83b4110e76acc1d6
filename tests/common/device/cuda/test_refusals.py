"""Tests of the errors for a GPU or driver that lacks a feature or fails, with a fake driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.common.errors import ConfigError, DeviceError, ManifestError, MismatchError, OutOfMemoryError
from slipstream.common.wire.manifest import EVENT, EVENTS, TIMELINE, BufferSpec, FenceWord, Manifest, lay_out
from slipstream.common.wire.step import FenceName
from tests.harness import fake_cuda
from tests.harness.fake_cuda import FakeCuda, Result

SPECS = (BufferSpec("lengths", (3, 4), torch.int64, "verify"),)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A driver that does all that it is asked."""
    with fake_cuda.installed() as fake:
        yield fake


class Side:
    """A fake `SideStream` that touches no memory."""

    handle = 7

    def __init__(self, word: int = 1) -> None:
        self.word = word

    def zero(self, address: int, size: int) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Returns at once."""

    def read_word(self, address: int) -> int:
        """Returns the word that was given."""
        return self.word


def gpu(*, has_timelines: bool = True) -> Any:
    """A fake device with the attributes that an arena needs."""
    driver = fake_cuda.driver()
    return SimpleNamespace(driver=driver, kernels=None, side=Side(), has_timelines=has_timelines)


def manifest(kind: str, **events: Any) -> Manifest:
    """A manifest of another process's arena."""
    buffers, words, size = lay_out(SPECS, list(FenceName), kind)
    words = tuple(FenceWord(word.fence, word.kind, word.offset, **events) for word in words)
    return Manifest("cuda_ipc", "", size, buffers, words, bytes(64))


def create(kind: str) -> Any:
    """An arena of this process."""
    return fake_cuda.module("cuda.arena").CudaArena.create(SPECS, list(FenceName), kind, gpu(), [])


def open_arena(found: Manifest, **kind: bool) -> Any:
    """Another process's."""
    return fake_cuda.module("cuda.arena").CudaArena.open(found, gpu(**kind))


def test_a_gpu_that_is_taken_is_said_with_where_to_look(cuda: FakeCuda) -> None:
    def busy(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")

    made = fake_cuda.module("cuda.driver")
    made.torch = SimpleNamespace(zeros=busy, device=torch.device)
    with pytest.raises(DeviceError, match=r"^the GPU cannot be used: CUDA error: .* busy or unavailable; nvidia-smi"):
        made.CudaDriver(0)


def test_a_driver_that_shares_no_memory_is_a_setting_that_cannot_be(cuda: FakeCuda) -> None:
    cuda.fail("cuIpcGetMemHandle", Result.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(ConfigError, match=r"^device: got 'cuda', accepted: cpu here: this driver cannot share memory"):
        create(TIMELINE)
    gc.collect()
    assert cuda.calls.count("cuMemAlloc") == cuda.calls.count("cuMemFree") == 1, "nothing is left behind"


def test_a_driver_that_shares_no_events_is_one_too(cuda: FakeCuda) -> None:
    cuda.fail("cuIpcGetEventHandle", Result.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(ConfigError, match=r"^fence: got 'event', accepted: timeline, or device cpu"):
        create(EVENT)
    gc.collect()
    assert cuda.calls.count("cuEventDestroy") == len(FenceName) * EVENTS


def test_an_arena_that_does_not_fit_is_refused_with_its_size(cuda: FakeCuda) -> None:
    cuda.fail("cuMemAlloc", Result.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(
        OutOfMemoryError, match=r"^2 MiB of shared buffers; 3 of 8 MiB of the GPU are free: take a smaller slots"
    ):
        create(TIMELINE)


def test_a_handle_that_cannot_be_opened_has_the_remedy(cuda: FakeCuda) -> None:
    cuda.fail("cuIpcOpenMemHandle", Result.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(ManifestError, match=r"CUDA_ERROR_INVALID_VALUE.* containers need the same PID namespace"):
        open_arena(manifest(TIMELINE))


def test_a_gpu_that_failed_is_not_taken_for_a_handle_that_is_wrong(cuda: FakeCuda) -> None:
    """As after the death of another client of MPS: the worker is to be replaced, and the scheduler to wait for that."""
    cuda.fail("cuIpcOpenMemHandle", Result.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        open_arena(manifest(TIMELINE))
    assert caught.value.is_lasting


def test_memory_of_another_size_is_let_go(cuda: FakeCuda) -> None:
    with pytest.raises(ManifestError, match="the memory handle is of 0 bytes"):
        open_arena(manifest(TIMELINE))
    gc.collect()
    assert "cuIpcCloseMemHandle" in cuda.calls


def test_events_that_cannot_be_opened_have_the_remedy(cuda: FakeCuda) -> None:
    cuda.answers["cuIpcOpenMemHandle"] = (Result.CUDA_SUCCESS, 1 << 21)
    cuda.answers["cuMemGetAddressRange"] = (Result.CUDA_SUCCESS, 1 << 21, 1 << 30)
    cuda.fail("cuIpcOpenEventHandle", Result.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(ManifestError, match=r"an event handle cannot be opened .* /dev/shm"):
        open_arena(manifest(EVENT, events=(bytes(64),) * EVENTS))
    gc.collect()
    assert "cuIpcCloseMemHandle" in cuda.calls


def test_a_fence_that_this_gpu_has_not_is_refused_with_the_other(cuda: FakeCuda) -> None:
    with pytest.raises(MismatchError, match="scheduler has 'timeline', this worker can only do 'event'"):
        open_arena(manifest(TIMELINE), has_timelines=False)


@pytest.mark.parametrize("missing", [None, "cuStreamWriteValue64", "cuStreamWaitValue64"])
def test_whether_streams_wait_for_words_is_tried(cuda: FakeCuda, missing: str | None) -> None:
    if missing is not None:
        cuda.fail(missing, Result.CUDA_ERROR_NOT_SUPPORTED)
    works = fake_cuda.module("cuda.fences").has_timelines
    assert works(fake_cuda.driver(), Side()) is (missing is None)
    assert not works(fake_cuda.driver(), Side(word=0)), "a call that does nothing is none"
    assert cuda.calls.count("cuMemAlloc") == cuda.calls.count("cuMemFree")


def test_a_stream_on_a_gpu_that_failed_is_at_its_end(cuda: FakeCuda) -> None:
    """`synchronize` raises the driver's error at once, and `close` does not wait."""
    failures: list[BaseException] = []
    made = fake_cuda.module("cuda.stream")
    made.torch = SimpleNamespace(cuda=SimpleNamespace(ExternalStream=lambda handle, device: handle))
    stream = made.CudaStream("verify", fake_cuda.driver(), torch.device("cuda"), failures.append)
    cuda.fail("cuStreamQuery", Result.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.synchronize(60.0)
    stream.close()
    assert [str(failure) for failure in failures] == ["cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS: as it was told"]
