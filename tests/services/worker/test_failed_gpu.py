"""A GPU that fails while nothing runs, as when another client of MPS dies: the worker ends, to be replaced."""

from __future__ import annotations

import pytest

from slipstream.common.device.cpu.fence import ReadOnlyFence
from slipstream.common.errors import DeviceError
from slipstream.common.wire.step import FenceName
from slipstream.services.worker import engine
from tests.harness.recording_role import Recorder, attached
from tests.harness.workers import LocalWorker, attachment_to, decode

LOST = DeviceError("cuMemcpyDtoHAsync: CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_ILLEGAL_ADDRESS")


def fail(*_: object, **__: object) -> None:
    """Stands for any call to a lost GPU."""
    raise LOST


def ends_with(worker: LocalWorker, error: BaseException) -> None:
    """The worker's process ends by what the stream reports."""
    assert worker.failures == [error]
    assert worker.stream.failure is error


def test_abandon_gives_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Recorder()
    with attached(role) as (worker, arena):
        worker.send(decode(1, 1, waits=1))
        with monkeypatch.context() as patch:
            patch.setattr(ReadOnlyFence, "release", fail)
            worker.engine.abandon(1)
        ends_with(worker, LOST)
        assert worker.engine.epoch is None
        assert not role.is_open
        # The stream's thread still waits; on a GPU that is gone with the process.
        for name in (FenceName.VERIFY_STASH, FenceName.DRAFT_PROPOSED):
            arena.fence(name).release(1)


def test_an_attachment_that_finds_it_out_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(Recorder()) as (worker, arena):
        worker.engine.drain()
        monkeypatch.setattr(worker.engine._device, "open_arena", fail)
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            worker.attach(attachment_to(arena, 2))
        ends_with(worker, LOST)


def test_a_description_that_finds_it_out_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ...")

    with attached(Recorder()) as (worker, _):
        monkeypatch.setattr(engine, "measured", ask)
        with pytest.raises(DeviceError, match=r"^the GPU failed: .* illegal memory access was encountered$"):
            worker.describe()
        (failure,) = worker.failures
        assert isinstance(failure, DeviceError)
