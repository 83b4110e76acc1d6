"""A control daemon in miniature: a foreground daemon with -f, else a client that reads one command.

What it was told is in a journal beside its pipes. The daemon has a process for a server, whose id is there too, and
leaves it behind. FAKE_MPS has what goes wrong: "refuses" starts no server, "dies" ends the daemon at once, "deaf"
ignores quit, "waits at quit", or at another command, carries it out when there is a file `go`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
journal = pipes / "journal"
fault = os.environ.get("FAKE_MPS", "")


def daemon() -> None:
    """Serves until it is told to quit."""
    if fault == "dies":
        sys.exit("no such device")
    if fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (pipes / "server_process").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
    (pipes / "control").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def client(command: str) -> None:
    """Carries out one command."""
    if not (pipes / "control").exists():
        sys.exit("Cannot find MPS control daemon process")
    with journal.open("a") as lines:
        lines.write(f"{command}\n")
    if f"waits at {command.split()[0]}" in fault:
        while not (pipes / "go").exists():
            time.sleep(0.01)
    if command.startswith("start_server"):
        if "refuses" in fault:
            sys.exit("MPS is not supported on this device")
        (pipes / "server").write_text("4711")
    elif command == "get_server_list" and (pipes / "server").exists():
        print((pipes / "server").read_text())
    elif command == "quit":
        os.kill(int((pipes / "control").read_text()), signal.SIGTERM)


daemon() if sys.argv[1:] == ["-f"] else client(sys.stdin.readline().strip())
