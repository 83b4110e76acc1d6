"""What a kernel that overlaps the one before it does first."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Waits until all that the kernel before wrote is there; the one behind it may be launched meanwhile.

    That one waits in turn until this kernel has ended, and with it all before it.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
