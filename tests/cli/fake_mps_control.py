"""A control daemon in miniature: a foreground daemon with -f, else a client that reads one command.

What it was told is in a journal beside its pipes. FAKE_MPS says what goes wrong: "refuses" starts no server, "dies"
ends the daemon at once, "deaf" ignores quit.
"""

from __future__ import annotations

import os
import signal
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
    (pipes / "control").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def client(command: str) -> None:
    """Carries out one command."""
    if not (pipes / "control").exists():
        sys.exit("Cannot find MPS control daemon process")
    with journal.open("a") as lines:
        lines.write(f"{command}\n")
    if command.startswith("start_server"):
        if fault == "refuses":
            sys.exit("MPS is not supported on this device")
        (pipes / "server").write_text("4711")
    elif command == "get_server_list" and (pipes / "server").exists():
        print((pipes / "server").read_text())
    elif command == "quit":
        os.kill(int((pipes / "control").read_text()), signal.SIGTERM)


daemon() if sys.argv[1:] == ["-f"] else client(sys.stdin.readline().strip())
