"""Launching kernels one after the other on a stream: the wait at their beginning, and what they may read before."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from collections.abc import Mapping


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Waits until everything that the kernel before wrote is visible; the next kernel may be launched meanwhile.

    The next kernel waits in turn until this one has ended, and with it all before it.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(at: tl.tensor) -> None:
    """Prefetches lines of memory into L2 without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


_MULTIPROCESSORS_WITHOUT_CUDA = 4


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU, which a grid should fill; a few in Triton's interpreter."""
    if device.type != "cuda":
        return _MULTIPROCESSORS_WITHOUT_CUDA
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """True for the GPUs that tiles were measured on, whose copy engine brings them from memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def overlapping(device: torch.device) -> Mapping[str, Any]:
    """Options for launching a kernel that waits by itself for the one before it (programmatic dependent launch).

    Such a kernel may be launched while those before it still run, back to the last that does not overlap, which hides
    the cost of the launch. It must call `wait_for_previous` in every program before it touches memory that one of
    those writes, and before it writes what one of them reads.
    """
    return _overlapping(device.index) if device.type == "cuda" else {"OVERLAPS": False}


@cache
def _overlapping(index: int | None) -> Mapping[str, Any]:
    is_there = torch.cuda.get_device_capability(index) >= (9, 0)
    return {"OVERLAPS": True, "launch_pdl": True} if is_there else {"OVERLAPS": False}
