"""A grammar worker as a process beside the workers, over gRPC: it is killed, or stopped, and outputs go on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from llguidance import LLMatcher

from slipstream import bundled
from slipstream.common.wire.step import Role
from slipstream.scheduler.constraints import GrammarWorker
from tests.harness.counted_jobs import Job
from tests.harness.waiting import until
from tests.harness.worker_processes import Client, WorkerProcesses, running_session
from tests.scheduler.test_constraints import SPECS, check

pytestmark = pytest.mark.timeout(120)

DEEP = LLMatcher.grammar_from_lark(
    "start: A0\n" + "\n".join(f'A{number}: "a" (A{number + 1} | "b{number}")' for number in range(900)) + '\nA900: "c"'
)
"""The gateway takes it."""


class GrammarProcess:
    """The process, which can be lost and started again."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/grammar.sock"
        self.process = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        command = ("-P", "-m", "slipstream.services.grammar_main", "--listen", self.address, "--log-level", "WARNING")
        # With the stack that some hosts give threads.
        return subprocess.Popen(("sh", "-c", 'ulimit -s 2048 && exec "$@"', "sh", sys.executable, *command))

    def kill(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Kills it, and starts another one."""
        self.kill()
        self.process = self._started()


def active(client: Client) -> GrammarWorker | None:
    """The grammar worker that takes part."""
    assert client.epoch is not None
    return client.epoch.constraints.active


def num_output(client: Client, jobs: list[Job]) -> int:
    """Tokens of these jobs so far."""
    return sum(len(client.jobs.outputs.get(job, ())) for job in jobs)


@pytest.mark.slow
async def test_outputs_go_on_when_the_process_is_killed_or_stopped(tmp_path: Path) -> None:
    models = {Role.VERIFY: bundled.target_dir(), Role.DRAFT: bundled.standalone_dir()}
    settings = {"slots": 4, "context_tokens": 128, "grammar_timeout_ms": 1000.0}
    with WorkerProcesses(tmp_path, models, "--threads", "1") as processes, GrammarProcess(tmp_path) as grammar:
        processes.start(Role.VERIFY, Role.DRAFT)
        with running_session(processes, grammar=grammar.address, **settings) as client:
            await client.served()
            expected = await client.run(*map(Job, SPECS))
            check(expected)
            await client.run(Job(replace(SPECS[0], job_id="deep", grammar=DEEP)))
            jobs = [Job(replace(one, job_id=f"{number}-{one.job_id}")) for number in range(4) for one in SPECS]
            running = asyncio.create_task(client.run(*jobs))
            for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
                before = num_output(client, jobs)
                await until(lambda: active(client) is not None and num_output(client, jobs) > before + 40)  # noqa: B023
                lost = active(client)
                grammar.process.send_signal(number)
                await until(lambda: active(client) is not lost)  # noqa: B023
                if number is signal.SIGSTOP:
                    grammar.process.send_signal(signal.SIGCONT)
                else:
                    grammar.restart()
            assert await running == 4 * expected
        assert client.errors == client.reasons == []
