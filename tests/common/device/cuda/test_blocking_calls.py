"""Calls that wait for all streams are made while no stream waits for another process, whoever drops what is shared."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.common.device.manifest import EVENT, EVENTS, TIMELINE, BufferSpec
from slipstream.common.errors import DeadlineExceededError
from slipstream.common.worker.step import FenceName
from tests.harness import fake_cuda
from tests.harness.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.fake_cuda import FakeCuda

SPECS = (BufferSpec("lengths", (3, 4), torch.int64, "verify"),)
FREE, DESTROY = "cuMemFree", "cuEventDestroy"


class Fence:
    """Notes the values that a stream is made to wait for."""

    def __init__(self) -> None:
        self.awaited: list[int] = []

    def wait_on_stream(self, handle: int, value: int) -> None:
        """See `TimelineFence.wait_on_stream`."""
        self.awaited.append(value)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A driver that does all that it is asked."""
    with fake_cuda.installed() as fake:
        yield fake


@pytest.fixture
def gpu(cuda: FakeCuda) -> Any:
    """The parts of a device that an arena needs."""
    driver = fake_cuda.driver()
    calls = fake_cuda.module("cuda.blocking_calls").BlockingCalls(driver)
    side = SimpleNamespace(zero=lambda address, size: None)
    return SimpleNamespace(driver=driver, calls=calls, kernels=None, side=side, has_timelines=True, retired=[])


@pytest.fixture
def copy(gpu: Any) -> Any:
    """A copy of results, on a stream that waits for steps."""
    module = fake_cuda.module("cuda.pinned_copy")
    module.torch = SimpleNamespace(zeros=lambda size, dtype, pin_memory: torch.zeros(size, dtype=dtype), **_TYPES)
    return module.PinnedCopy(gpu.driver, gpu.calls, Fence(), [torch.zeros(3, 4, dtype=torch.int64).unbind()])


_TYPES = {"uint8": torch.uint8, "int64": torch.int64, "Tensor": torch.Tensor}


def make_arena(gpu: Any, kind: str = TIMELINE) -> Any:
    """An arena of this process."""
    arena = fake_cuda.module("cuda.arena").CudaArena
    return arena.create(SPECS, list(FenceName), kind, gpu, gpu.retired)


def land(copy: Any, value: int) -> None:
    """The step is done, and its copy has come."""
    copy._landed.value = value


def test_the_garbage_collector_gives_nothing_back_itself(cuda: FakeCuda, gpu: Any, copy: Any) -> None:
    """It runs on any thread, as on the one that still has to send the command of the step that a stream waits for."""
    knot: list[Any] = [make_arena(gpu, EVENT)]
    knot.append(knot)
    copy.start(1, 0)
    del knot
    gc.collect()
    assert FREE not in cuda.calls
    assert DESTROY not in cuda.calls
    land(copy, 1)
    make_arena(gpu).seal()
    assert cuda.calls.count(FREE) == 1
    assert cuda.calls.count(DESTROY) == len(FenceName) * EVENTS
    copy.close()


def test_nothing_is_allocated_or_freed_while_a_stream_waits(cuda: FakeCuda, gpu: Any, copy: Any) -> None:
    arena = make_arena(gpu)
    make_arena(gpu).close()
    made: list[Any] = []
    for step, work, call in ((1, lambda: made.append(make_arena(gpu)), "cuMemAlloc"), (2, arena.seal, FREE)):
        copy.start(step, 0)
        num_calls = len(cuda.calls)
        thread = threading.Thread(target=work)
        thread.start()
        block_until(gpu.calls.lock.locked)
        assert cuda.calls[num_calls:] == []
        land(copy, step)
        thread.join()
        assert call in cuda.calls[num_calls:]
    copy.close()


def test_no_stream_is_made_to_wait_meanwhile(gpu: Any, copy: Any) -> None:
    with gpu.calls.at_rest():
        thread = threading.Thread(target=copy.start, args=(1, 0))
        thread.start()
        thread.join(0.05)  # it cannot be seen that it waits
        assert copy._fence.awaited == []
    thread.join()
    assert copy._fence.awaited == [1]
    land(copy, 1)
    copy.close()


def test_a_stream_that_waits_for_a_process_that_is_gone_is_not_waited_for_long(
    cuda: FakeCuda, gpu: Any, copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that releases it needs the lock: the new arena has to be asked for again."""
    monkeypatch.setattr(fake_cuda.module("cuda.blocking_calls"), "AT_REST_TIMEOUT_S", 0.05)
    arena = make_arena(gpu)
    make_arena(gpu).close()
    copy.start(1, 0)
    with pytest.raises(DeadlineExceededError, match=r"^steps under way have not ended within 0\.1 s"):
        make_arena(gpu)
    arena.seal()
    assert FREE not in cuda.calls
    land(copy, 1)
    copy.close()
    make_arena(gpu)
    assert cuda.calls.count(FREE) == 1
