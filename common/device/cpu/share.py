"""Who gets a core first where streams and hosts share them.

On a CPU a stream's thread competes with the threads that serve it. A thread that is woken usually takes the core
from the one that woke it: a stream that has just published would stand still, in the middle of a step, for as long
as the scheduler takes to read the result. Linux lets a thread of the class SCHED_BATCH wait its turn instead.
"""

from __future__ import annotations

import contextlib
import os


def yield_to_streams() -> None:
    """The calling thread, and those that it starts from now on, take no core from a stream that works."""
    _set_class(os.SCHED_BATCH)


def work_as_stream() -> None:
    """The calling thread is a stream's: it is not to be interrupted by the others."""
    _set_class(os.SCHED_OTHER)


def _set_class(scheduling_class: int) -> None:
    # A sandbox may forbid it; then everything works as before, only less evenly.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, scheduling_class, os.sched_param(0))
