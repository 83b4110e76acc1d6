"""Dummy kernels: kernels of a known length, in place of a model's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from slipstream.common.device.cuda.poll_backoff import sleep_precisely

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.benchmarks.spin_kernel import SpinKernel
    from slipstream.common.device.cuda.kernels import CudaKernels

T = TypeVar("T")

SPIN_S = 0.00015
"""A sleep may end late by so much, and a kernel must not: 90 us are common on a virtual machine."""


class Kernel(Protocol):
    """A kernel of a known length, which includes what it computes. Belongs to one stream."""

    def run(self, compute: Callable[[], T]) -> T:
        """Stream work: returns what `compute` does; the stream goes on when the length is over."""
        ...

    def rows(self, values: Sequence[int]) -> torch.Tensor:
        """[len(values)] int64 where the kernel runs."""
        ...


class HostKernel:
    """On the stream's own thread: sleeps, and looks at the clock for the last bit."""

    def __init__(self, length_ms: float) -> None:
        self._length_s = length_ms / 1000

    def run(self, compute: Callable[[], T]) -> T:
        """See `Kernel.run`."""
        end = time.monotonic() + self._length_s
        result = compute()
        sleep_precisely(max(0.0, end - time.monotonic() - SPIN_S))
        while time.monotonic() < end:
            pass
        return result

    def rows(self, values: Sequence[int]) -> torch.Tensor:
        """See `Kernel.rows`."""
        return torch.tensor(values, dtype=torch.int64)


class GpuKernel:
    """On a GPU: looks at its clock behind what is computed, until the length is over. Only enqueues."""

    def __init__(self, length_ms: float, kernels: CudaKernels, spin: SpinKernel, device: torch.device) -> None:
        self._length_ns = round(length_ms * 1e6)
        self._kernels = kernels
        self._spin = spin
        self._device = device
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows: tuple[tuple[int, ...], torch.Tensor] = ((), torch.zeros(0, dtype=torch.int64, device=device))

    def run(self, compute: Callable[[], T]) -> T:
        """See `Kernel.run`."""
        stream, start = torch.cuda.current_stream(self._device).cuda_stream, self._start.data_ptr()
        self._kernels.stamp(stream, start)
        result = compute()
        self._spin.spin_until(stream, start, self._length_ns)
        return result

    def rows(self, values: Sequence[int]) -> torch.Tensor:
        """See `Kernel.rows`. Mostly the same as in the step before: then there is nothing to copy."""
        wanted = tuple(values)
        if self._rows[0] != wanted:
            pinned = torch.tensor(wanted, dtype=torch.int64).pin_memory()
            self._rows = (wanted, pinned.to(self._device, non_blocking=True))
        return self._rows[1]
