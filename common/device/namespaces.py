"""What of this host a process sees: two that see another part of it cannot share a GPU's memory or events."""

from __future__ import annotations

import os

_PID_NAMESPACE = "/proc/self/ns/pid"
_SHM = "/dev/shm"


def pid_namespace() -> str:
    """The kernel's name of this process's PID namespace, "pid:[4026531836]"; empty where it does not say."""
    try:
        return os.readlink(_PID_NAMESPACE)
    except OSError:
        return ""


def shm_device() -> int:
    """The number of the device at /dev/shm: another number is another directory, whatever its path; 0 if unknown."""
    try:
        return os.stat(_SHM).st_dev
    except OSError:
        return 0
