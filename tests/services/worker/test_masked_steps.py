"""Verify's steps with masks: what they wait for, when, and what becomes of rows whose masks are missing."""

from __future__ import annotations

import pytest

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.wire.events import EventLog, Site
from slipstream.services.factory import make_verify
from slipstream.services.worker import epoch
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.fused_future_map import FusedMasks
from slipstream.services.worker.future_map import FutureMap, Region
from slipstream.services.worker.masks import MOST_TIMED, GrammarMasks, MaskWaits
from tests.harness.inline_device import InlineDevice
from tests.harness.masked_steps import check_masked_steps


@pytest.mark.parametrize(
    ("device", "masks", "temperature"),
    [
        pytest.param(HostDevice(), GrammarMasks, 0.0, id="cpu"),
        pytest.param(InlineDevice(), GrammarMasks, 1.0, id="graphs"),
        pytest.param(InlineDevice(), FusedMasks, 0.0, id="kernels", marks=pytest.mark.slow),
    ],
)
def test_masks_are_waited_for_and_decide_each_token(
    device: Device, masks: type[GrammarMasks], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "_classes", lambda device: (FutureMap, Region, masks))
    role = make_verify(WorkerConfig(model=bundled.target_dir()), device, 0)
    check_masked_steps(role, device, temperature=temperature)


def test_waits_that_do_not_end_are_not_timed() -> None:
    """A wait is timed once a later one finds both of its stamps; more than are kept wait without a clock."""
    device, log = InlineDevice(), EventLog()
    stream, waits = device.create_stream("verify", pytest.fail), MaskWaits(device, log)
    is_over = False
    for step in range(1, MOST_TIMED + 3):
        with waits.timed(stream, step):
            stream.wait_until(lambda: is_over)
    assert log.since(0) == []
    is_over = True
    device.run()
    with waits.timed(stream, 100):
        pass
    assert [event.step for event in log.since(0)] == list(range(1, MOST_TIMED + 1))
    assert log.stalled_ns[Site.MASKS] == sum(event.end_ns - event.begin_ns for event in log.since(0)) > 0
