"""The clock of the stamps against the host's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slipstream.common.device.cuda.device import CudaDevice

PAUSE_S = 0.2
MOST_DRIFT = 1e-3
"""The most drift between two clocks, as a fraction: far above quartz tolerance, far below another clock rate."""


def test_the_two_clocks_run_at_one_rate(device: CudaDevice) -> None:
    first = device.sample_clock()
    time.sleep(PAUSE_S)
    last = device.sample_clock()
    for found in (first, last):
        assert found.uncertainty_ns < 1_000_000
    host_ns, device_ns = last.host_ns - first.host_ns, last.device_ns - first.device_ns
    assert host_ns >= 0.9e9 * PAUSE_S
    assert abs(host_ns - device_ns) < MOST_DRIFT * host_ns + first.uncertainty_ns + last.uncertainty_ns
    print(f"within {first.uncertainty_ns} and {last.uncertainty_ns} ns, drift {host_ns - device_ns} ns in {host_ns} ns")


def test_a_look_at_the_clock_is_in_the_order_of_stamps(device: CudaDevice) -> None:
    """It is the clock that streams stamp with."""
    stamp = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    torch.cuda.synchronize()
    failures: list[BaseException] = []
    current = torch.cuda.current_stream()
    stream = device.create_stream("test", failures.append)
    before = device.sample_clock()
    device.stamp(stream, stamp)
    stream.synchronize(10.0)
    after = device.sample_clock()
    torch.cuda.set_stream(current)
    stream.close()
    assert failures == []
    assert before.device_ns < int(device.to_host([stamp])[0]) < after.device_ns
