"""The host as this process uses it: names and scheduling classes of threads, its namespaces, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

STEP_LOOP = "step-loop"
"""Name of the scheduler's step thread."""

STREAM_SLICE_NS = 1_000_000
"""The time slice of a CPU stream's thread: shorter than others', to which Linux gives 1.4 ms on two cores."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SYS_SCHED_SETATTR = 314  # on x86-64
_libc = ctypes.CDLL(None)


class SchedulingAttributes(ctypes.Structure):
    """`struct sched_attr` of Linux, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def name_this_thread(name: str) -> None:
    """Names the calling thread for the operating system too, as `top -H` shows it. At most 15 ASCII characters."""
    _libc.prctl(_PR_SET_NAME, name.encode("ascii"), 0, 0, 0)


def end_with_parent(pid: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, that of process `pid`; or ends it now."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pid:
        sys.exit(f"process {pid}, which started this one, has ended")


def yield_to_streams() -> None:
    """Keeps the calling thread, and threads that it starts from now on, from taking a core from a CPU stream.

    On a CPU a stream's thread competes with the threads that serve it. A thread that is woken usually takes the core
    from the one that woke it: a stream that has just published would stand still in the middle of a step until the
    scheduler has read the result. Linux lets a thread of the class SCHED_BATCH wait its turn instead.
    """
    _set_scheduling_class(os.SCHED_BATCH)


def work_as_stream() -> None:
    """Has the calling thread, which works for a stream, run soon after it is woken.

    Undoes `yield_to_streams`, and asks for a shorter time slice: from version 6.12 on, Linux lets a woken thread take
    the core from one with a longer slice. Older versions ignore it. The thread's share of the core is the same.
    """
    _set_scheduling_class(os.SCHED_OTHER)
    attributes = SchedulingAttributes(ctypes.sizeof(SchedulingAttributes), os.SCHED_OTHER, runtime=STREAM_SLICE_NS)
    _libc.syscall(_SYS_SCHED_SETATTR, 0, ctypes.byref(attributes), 0)  # may be forbidden, like the class


def _set_scheduling_class(scheduling_class: int) -> None:
    # A sandbox may forbid it; then everything works as before, only less evenly.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, scheduling_class, os.sched_param(0))


def pid_namespace() -> str:
    """The kernel's name of this process's PID namespace, such as "pid:[4026531836]"; empty if unknown.

    Processes of different PID namespaces cannot share a GPU's memory.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def shm_device() -> int:
    """The number of the device at /dev/shm, the same for processes that see the same directory; 0 if unknown.

    Processes that see another one cannot share a GPU's events.
    """
    try:
        return os.stat("/dev/shm").st_dev
    except OSError:
        return 0


def host_bytes() -> int:
    """The host's memory, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
