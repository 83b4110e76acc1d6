"""Memory of the host that a GPU writes: what a stream has written is there once its fence says so."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.common.device.interface import PollTime
from slipstream.common.wire.step import FenceName
from tests.gpu.conftest import SPECS
from tests.harness.other_process import GpuUser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.device.interface import Arena

PROPOSED = FenceName.DRAFT_PROPOSED


@pytest.fixture
def hosted(device: CudaDevice) -> Iterator[Arena]:
    """An arena of this process, in memory of the host."""
    made = device.create_arena(SPECS, [PROPOSED], on_host=True)
    yield made
    made.close()


def test_results_come_to_the_host_past_everything_else(
    device: CudaDevice, hosted: Arena, arena: CudaArena, other: GpuUser
) -> None:
    """The producer goes on working, and a stream of this process has work that never ends by itself."""
    fence = hosted.fence(PROPOSED)
    before = torch.cuda.current_stream()
    busy = device.create_stream("busy", lambda error: None)
    ended = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
    assert other.open(hosted.manifest) == "opened"
    hosted.seal()
    torch.cuda.synchronize()
    end = arena.fence(FenceName.VERIFY_STASH)
    end.wait(busy, 1)
    device.stamp(busy, ended[0])
    names = ("lengths", "floats", "tokens", "halves")
    try:
        for step in range(1, 200):
            assert not fence.wait_on_host(step, 0.0)
            other.do(*(f"fill {name} {step}" for name in names), f"signal {int(PROPOSED)} {step}")
            if step == 5:
                other.do("spin 100000")
            assert fence.wait_on_host(step, 10.0, PollTime(time.monotonic(), usual_s=0.0001))
            for name in names:
                tensor = hosted.tensor(name)
                assert tensor.device.type == "cpu"
                assert (tensor == step).all()
        assert device.to_host([ended])[0].item() == 0, "the busy stream was still busy"
    finally:
        end.release(1)
    torch.cuda.set_stream(before)
    busy.close()


@pytest.mark.parametrize("has_timelines", [True, False])
def test_a_gpu_without_memory_operations_on_streams_sets_it_by_a_kernel(
    device: CudaDevice, hosted: Arena, has_timelines: bool
) -> None:
    # Imported here: cuda-bindings need not be there where these tests are only collected.
    from slipstream.common.device.cuda.arena import WrittenArena

    gpu: Any = SimpleNamespace(driver=device.driver, kernels=device.kernels, has_timelines=has_timelines)
    written, before = WrittenArena.of(hosted.manifest, gpu), torch.cuda.current_stream()
    stream = device.create_stream("writes", lambda error: None)
    tensor = written.tensor("lengths")
    assert tensor.device.type == "cuda"
    for value in range(1, 50):
        stream.enqueue(lambda value=value: tensor.fill_(value))  # type: ignore[misc]
        written.fence(PROPOSED).signal(stream, value)
        assert hosted.fence(PROPOSED).wait_on_host(value, 10.0)
        assert (hosted.tensor("lengths") == value).all()
    torch.cuda.set_stream(before)
    stream.close()


def test_a_view_keeps_the_memory_and_a_new_mapping_follows(device: CudaDevice, hosted: Arena) -> None:
    for value in (1, 2):
        written = device.open_arena(hosted.manifest)
        tensor = written.tensor("lengths")
        written.close()
        del written
        gc.collect()
        tensor.fill_(value)
        torch.cuda.synchronize()
        assert (hosted.tensor("lengths") == value).all()
        del tensor
        gc.collect()


def test_a_producer_that_is_killed_leaves_the_last_value(hosted: Arena) -> None:
    with GpuUser.on(hosted) as producer:
        producer.do("fill lengths 1", f"signal {int(PROPOSED)} 1")
        assert hosted.fence(PROPOSED).wait_on_host(1, 10.0)
        producer.do("spin 60000000", "fill lengths 2", f"signal {int(PROPOSED)} 2")
        producer.kill()
    assert not hosted.fence(PROPOSED).wait_on_host(2, 0.05)
    assert (hosted.tensor("lengths") == 1).all()
