"""The stream of a GPU, and its clock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.common.errors import DeadlineExceededError
from slipstream.common.wire.step import FenceName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.device.cuda.stream import CudaStream


class Failures(list[BaseException]):
    """The errors that streams reported."""


@pytest.fixture
def failures() -> Failures:
    """An empty list of errors."""
    return Failures()


@pytest.fixture
def stream(device: CudaDevice, failures: Failures) -> Iterator[CudaStream]:
    """A stream that must come to its end."""
    before = torch.cuda.current_stream()
    made = device.create_stream("test", failures.append)
    yield made
    torch.cuda.set_stream(before)
    made.close()
    assert device.driver.is_idle(made.handle)


def test_work_runs_in_order_on_the_stream(stream: CudaStream, device: CudaDevice) -> None:
    numbers = torch.zeros(4, dtype=torch.int64, device=device.torch_device)
    torch.cuda.synchronize()
    used: list[int] = []

    def double_and_add() -> None:
        used.append(torch.cuda.current_stream().cuda_stream)
        numbers.mul_(2).add_(1)

    for _ in range(10):
        stream.enqueue(double_and_add)
    stream.synchronize(10.0)
    assert device.to_host([numbers])[0].tolist() == [2**10 - 1] * 4
    assert set(used) == {stream.handle}


def test_work_that_work_enqueues_is_a_part_of_it(stream: CudaStream, failures: Failures) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("on purpose")

    def whole() -> None:
        stream.enqueue(lambda: ran.append("part"))
        ran.append("rest")
        stream.enqueue(fail)
        ran.append("behind what failed")

    stream.enqueue(whole)
    stream.enqueue(lambda: ran.append("later"))
    assert ran == ["part", "rest"]
    assert [str(failure) for failure in failures] == ["on purpose"]


def test_work_that_raises_breaks_the_stream(stream: CudaStream, failures: Failures) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("on purpose")

    for number, work in enumerate((lambda: ran.append(0), fail, lambda: ran.append(2), fail)):
        assert number == 0 or ran == [0]
        stream.enqueue(work)
    assert ran == [0]
    assert [str(failure) for failure in failures] == ["on purpose"]
    with pytest.raises(ValueError, match="on purpose"):
        stream.synchronize(10.0)


def test_synchronize_has_an_end(stream: CudaStream, arena: CudaArena) -> None:
    fence = arena.fence(FenceName.DRAFT_PROPOSED)
    fence.wait(stream, 1)
    with pytest.raises(DeadlineExceededError, match="stream test did not finish"):
        stream.synchronize(0.05)
    fence.release(1)
    stream.synchronize(10.0)


def test_a_thread_that_is_bound_works_on_the_stream(stream: CudaStream, arena: CudaArena, device: CudaDevice) -> None:
    """Its tensor operations are queued behind the stream's waits."""
    fence, tensor = arena.fence(FenceName.DRAFT_PROPOSED), arena.tensor("tokens")
    # CUDA loads a kernel when it is first used, and that waits for every stream: not for one that waits for us.
    tensor.fill_(0)
    torch.cuda.synchronize()

    def work() -> None:
        stream.bind_thread()
        fence.wait(stream, 1)
        tensor.fill_(3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert device.to_host([tensor])[0].tolist() == [0, 0, 0, 0]
    fence.release(1)
    stream.synchronize(10.0)
    assert device.to_host([tensor])[0].tolist() == [3, 3, 3, 3]


def test_stamps_can_be_captured(device: CudaDevice, arena: CudaArena) -> None:
    # Imported here: cuda-bindings need not be there where these tests are only collected.
    from slipstream.benchmarks.spin_kernel import SpinKernel

    stamps, capturing = arena.tensor("stamps"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph, kernel = torch.cuda.CUDAGraph(), SpinKernel(device.driver)
    with torch.cuda.graph(graph, stream=capturing):
        handle = torch.cuda.current_stream().cuda_stream
        device.kernels.stamp(handle, stamps[0].data_ptr())
        kernel.spin_until(handle, stamps[0].data_ptr(), 50_000)
        device.kernels.stamp(handle, stamps[1].data_ptr())
    taken = []
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        taken += device.to_host([stamps[:2]])[0].tolist()
    assert taken == sorted(taken)
    assert all(end - start >= 50_000 for start, end in zip(taken[::2], taken[1::2], strict=True))
