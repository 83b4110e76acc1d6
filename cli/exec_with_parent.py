"""Becomes a command that the kernel kills when its parent dies: exec_with_parent.py PARENT_PID COMMAND...

Run by path with `python -I -S`, so it imports nothing of the project and is gone in milliseconds.
An exec'ed wrapper instead of `preexec_fn`, which would run Python in a forked child of a process
that has threads. The bond survives exec, and lasts as long as the *thread* that started this:
start services from a thread that lives as long as they should, the main thread.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Binds this process to its parent, then replaces it by the command."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL, for a service that hangs must not outlive its supervisor either.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit("the parent died before the child was bound to it")
    os.execv(command[0], command)


main()
