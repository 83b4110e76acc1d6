"""Settings of the tests that need a GPU: skipped where there is none, and said why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.common.device.choose import cuda_obstacle
from slipstream.common.wire.manifest import EVENT, TIMELINE, BufferSpec
from tests.harness.other_process import GpuUser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.device import CudaDevice

SPECS = (
    BufferSpec("lengths", (3, 4), torch.int64, "verify"),
    BufferSpec("states", (5, 7, 2), torch.bfloat16, "verify"),
    BufferSpec("halves", (6, 3), torch.float16, "verify"),
    BufferSpec("floats", (3, 9), torch.float32, "verify"),
    BufferSpec("tokens", (4,), torch.int32, "draft"),
    BufferSpec("seen", (512,), torch.int64, "draft"),
    BufferSpec("stamps", (512,), torch.int64, "verify"),
)
KINDS = (TIMELINE, EVENT)


def load_all_kernels() -> None:
    """Initialises CUDA in this process so that no kernel is loaded later, when it is launched for the first time.

    Such a load waits for the streams of its context. Here both workers have one context and one thread, and draft's
    stream may wait for a command to verify that this thread has yet to send. For the same reason no stream shares a
    hardware queue with another. Processes that are started are as ever.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_MODULE_LOADING", "EAGER")
        environment.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if cuda_obstacle() is None:
            torch.zeros(1, device="cuda")


load_all_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test in this folder."""
    obstacle = cuda_obstacle()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    """The GPU with its best fences."""
    from slipstream.common.device.cuda.device import CudaDevice

    return CudaDevice()


@pytest.fixture(scope="session", params=KINDS)
def device_of_kind(request: pytest.FixtureRequest) -> CudaDevice:
    """The GPU with fences of either kind."""
    from slipstream.common.device.cuda.device import CudaDevice

    return CudaDevice(request.param)


@pytest.fixture(scope="session")
def pair() -> Iterator[tuple[GpuUser, GpuUser]]:
    """Two processes on the GPU for all tests that leave them alive."""
    with GpuUser.running() as one, GpuUser.running() as two:
        yield one, two


@pytest.fixture(scope="session")
def other(pair: tuple[GpuUser, GpuUser]) -> GpuUser:
    """One of them."""
    return pair[0]


@pytest.fixture
def arena(device: CudaDevice) -> Iterator[CudaArena]:
    """An arena that this process owns."""
    from slipstream.common.wire.step import FenceName

    made = device.create_arena(SPECS, list(FenceName))
    yield made
    made.close()


@pytest.fixture
def arena_of_kind(device_of_kind: CudaDevice) -> Iterator[CudaArena]:
    """An arena with fences of either kind."""
    from slipstream.common.wire.step import FenceName

    made = device_of_kind.create_arena(SPECS, list(FenceName))
    yield made
    made.close()
