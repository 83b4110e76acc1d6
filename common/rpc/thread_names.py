"""Names of threads that the operating system knows, too: `top -H` shows who takes which part of a process's time."""

from __future__ import annotations

import ctypes

STEP_LOOP = "step-loop"

_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)


def name_this_thread(name: str) -> None:
    """Names the calling thread. `name`: at most 15 characters of ASCII count."""
    _libc.prctl(_PR_SET_NAME, name.encode("ascii"), 0, 0, 0)
