"""Drafters as processes: those of `examples/` beside a real verify service, and any of ours alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.bundled import dflash_dir, eagle3_dir, standalone_dir, target_dir
from slipstream.common.wire.step import Role
from tests.harness.waiting import is_listening, until
from tests.harness.worker_processes import WorkerProcesses

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMPY_DRAFTER = EXAMPLES / "numpy_drafter" / "main.py"
CUDA_DRAFTER = EXAMPLES / "cuda_drafter" / "main.py"
_DRAFT = ("-m", "slipstream.services.draft_main")
OWN_DRAFTERS = {
    "standalone": (*_DRAFT, "--model", str(standalone_dir())),
    "eagle3": (*_DRAFT, "--algorithm", "eagle3", "--model", str(eagle3_dir()), "--target", str(target_dir())),
    "dflash": (*_DRAFT, "--algorithm", "dflash", "--model", str(dflash_dir()), "--target", str(target_dir())),
    "ngram": (*_DRAFT, "--algorithm", "ngram", "--target", str(target_dir())),
}
"""Python's arguments for the draft service, by algorithm."""


class ExampleDrafted(WorkerProcesses):
    """Verify, and an example in draft's place."""

    def __init__(self, folder: Path, target: Path, program: Sequence[str], *options: str) -> None:
        """`program`: the drafter's file and its own arguments. `options` go to verify."""
        super().__init__(folder, {Role.VERIFY: target, Role.DRAFT: target}, *options)
        self._program = program

    def start(self, *roles: Role) -> None:
        """See `WorkerProcesses.start`."""
        super().start(*(role for role in roles if role is Role.VERIFY))
        if Role.DRAFT in roles:
            tokenizer, address = str(self.models[Role.DRAFT]), self.address(Role.DRAFT)
            command = [sys.executable, *self._program, "--tokenizer", tokenizer, "--listen", address]
            self._running[Role.DRAFT] = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Runs a drafter, given by Python's arguments; yields its address when it serves."""
    path = str(folder / "draft.sock")
    with subprocess.Popen((sys.executable, *arguments, "--listen", f"unix:{path}")) as process:
        try:
            # The address is claimed long before it is listened at.
            asyncio.run(until(lambda: is_listening(path)))
            yield f"unix:{path}"
        finally:
            process.terminate()
