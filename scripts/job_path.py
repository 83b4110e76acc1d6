"""Lists the project's files that one job passes through: `job_path.py [--json]`.

Starts gateway, scheduler, draft (the bundled EAGLE-3 head) and verify on the CPU, runs a few jobs, and records in each
process the functions that were entered between the call of Generate and its end. A file counts if one of them was
entered by every job, and not while there was none: checks of health, and what else comes by the clock, come beside
every job on a busy machine. Every process runs under `sys.setprofile` by way of this file; the product has no code for
it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slipstream.client import Client

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("gateway", "scheduler", "services", "common")
"""The product's folders that count. The stubs in protos do not."""
ALGORITHM = "eagle3"
PROMPT = "def main():\n"
MAX_NEW_TOKENS = 16
NUM_JOBS = 6
IDLE = NUM_JOBS + 1
"""The switch's number for the time without a job: after each, as long as it took. A job is noted by its own number."""
READY_TIMEOUT_S = 90.0
JOB_TIMEOUT_S = 60.0
_TRACED = "--traced"


@dataclass(frozen=True, slots=True)
class JobPath:
    """The files that a job enters."""

    files: dict[str, list[str]]
    """By path within the repository: the services that enter it."""
    text: str
    """The text that the job generated."""

    @property
    def num_lines(self) -> int:
        """Lines of all these files."""
        return sum(num_lines(path) for path in self.files)


def num_lines(path: str) -> int:
    """Lines of a file of the repository."""
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def measure() -> JobPath:
    """Runs jobs, and returns the path of one.

    Raises RuntimeError if a service ends, does not become ready, or enters no file of this checkout.
    """
    from slipstream.client import Client

    with tempfile.TemporaryDirectory(prefix="job-path-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        (folder / "switch").write_bytes(b"\0")
        with _services(folder) as processes, (folder / "switch").open("r+b") as file:
            switch = mmap.mmap(file.fileno(), 1)
            with Client(f"unix:{folder}/gateway.sock") as client:
                _await_ready(client, processes)
                options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.8, "seed": 1}
                for number in range(1, NUM_JOBS + 1):
                    begun_at = time.monotonic()
                    switch[0] = number
                    chunks = list(client.generate(PROMPT, timeout_s=JOB_TIMEOUT_S, **options))
                    switch[0] = 0
                    took_s = time.monotonic() - begun_at
                    time.sleep(took_s)  # the services do the rest of what the job began
                    switch[0] = IDLE
                    time.sleep(took_s)
                    switch[0] = 0
            switch.close()
        files = read_files(folder, processes)
    return JobPath(files, "".join(chunk.text for chunk in chunks))


def read_files(folder: Path, services: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of which all jobs enter a function. Raises RuntimeError if a service enters none."""
    from slipstream import common

    files: dict[str, list[str]] = {}
    for service in services:
        lines = (folder / f"{service}.files").read_text(encoding="utf-8").splitlines()
        if not lines:
            used = Path(common.__path__[0]).resolve().parent
            raise RuntimeError(f"{service} enters no file of {ROOT}: slipstream is imported from {used}")
        entered: list[set[str]] = [set() for _ in range(IDLE)]
        for line in lines:
            number, _, function = line.partition(" ")
            entered[int(number) - 1].add(function)
        *jobs, idle = entered
        for path in {function.rpartition(":")[0] for function in set.intersection(*jobs) - idle}:
            files.setdefault(path, []).append(service)
    return dict(sorted(files.items()))


@contextmanager
def _services(folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    from slipstream import bundled

    target, head = str(bundled.target_dir()), str(bundled.eagle3_dir())
    address = {name: f"unix:{folder}/{name}.sock" for name in _MODULES}
    # Tracing is slow: still each step is drafted, and no draft is lost. `auto` enters `draft_choice.py`, too.
    patient = ("--fixed-draft-tokens", "4", "--draft-timeout-ms", "20000")
    options = {
        "verify": ("--model", target, "--device", "cpu"),
        "draft": ("--model", head, "--algorithm", ALGORITHM, "--target", target, "--device", "cpu"),
        "scheduler": ("--verify", address["verify"], "--draft", address["draft"], "--device", "cpu", *patient),
        "gateway": ("--scheduler", address["scheduler"]),
    }
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, module in _MODULES.items():
            traced = (sys.executable, str(Path(__file__).resolve()), _TRACED, str(folder), name, module)
            shared = ("--listen", address[name], "--log-level", "WARNING")
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            processes[name] = subprocess.Popen((*traced, *options[name], *shared), env=environment)
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


_MODULES = {
    "verify": "slipstream.services.verify_main",
    "draft": "slipstream.services.draft_main",
    "scheduler": "slipstream.scheduler.main",
    "gateway": "slipstream.gateway.main",
}


def _await_ready(client: Client, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Waits until all services are there and the draft takes part."""
    from slipstream.common.errors import SlipstreamError

    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        with suppress(SlipstreamError):  # the gateway does not listen yet
            if client.server_info().algorithm == ALGORITHM:
                return
        ended = [name for name, process in processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"ended: {', '.join(ended)}" if ended else "the services do not become ready")
        time.sleep(0.1)


def run_traced(folder: Path, service: str, module: str, arguments: list[str]) -> None:
    """Runs a service's module and notes the project's functions that it enters while the switch is on."""
    with (folder / "switch").open("r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    noted, lock = (folder / f"{service}.files").open("w", encoding="utf-8"), threading.Lock()
    seen: list[set[tuple[str, int]]] = [set() for _ in range(IDLE + 1)]
    roots = tuple(str(ROOT / name) + os.sep for name in FOLDERS)

    def profile(frame: Any, event: str, _: object) -> None:
        if event != "call" or not (number := switch[0]):
            return
        code = frame.f_code
        function = code.co_filename, code.co_firstlineno
        if function in seen[number] or not code.co_flags & CO_OPTIMIZED:
            return  # or the body of a module or of a class: an import, not a call
        with lock:
            if function not in seen[number]:
                seen[number].add(function)
                real = os.path.realpath(code.co_filename)
                if real.startswith(roots):
                    noted.write(f"{number} {Path(real).relative_to(ROOT)}:{code.co_firstlineno}\n")
                    noted.flush()

    sys.argv = [module, *arguments]
    sys.path[0] = ""  # this file's folder holds nothing that a service may import
    threading.setprofile(profile)
    sys.setprofile(profile)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    is_json = parser.parse_args().json
    path = measure()
    if is_json:
        print(json.dumps({"files": path.files, "num_files": len(path.files), "num_lines": path.num_lines}, indent=2))
        return
    for name, services in path.files.items():
        print(f"{num_lines(name):5}  {name:48} {', '.join(services)}")
    print(f"{path.num_lines:5}  lines in {len(path.files)} files")


if __name__ == "__main__":
    if sys.argv[1:2] == [_TRACED]:
        run_traced(Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        main()
