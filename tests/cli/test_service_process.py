"""The process of a service: its environment, its log, its socket, and its end with the supervisor's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from slipstream.cli.health import check
from slipstream.common.errors import UnavailableError
from tests.harness.supervised import supervisor_of
from tests.harness.waiting import block_until, runs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.supervised import MakeCommand

pytestmark = pytest.mark.timeout(30)


async def test_a_service_has_its_own_environment(fake_service: MakeCommand) -> None:
    async with supervisor_of() as supervisor:
        supervisor.start(replace(fake_service("verify"), environment={"SLIPSTREAM_TEST": "inside"}))
        await supervisor.wait_ready()
        environment = psutil.Process(supervisor.pid("verify")).environ()
    assert environment["SLIPSTREAM_TEST"] == "inside"
    assert environment["PATH"] == os.environ["PATH"]


async def test_the_socket_of_a_live_owner_stays(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with supervisor_of() as owner:
        owner.start(fake_service("verify"))
        await owner.wait_ready()
        async with supervisor_of() as intruder:
            intruder.start(fake_service("verify", "--die-at-once"))
            with pytest.raises(UnavailableError):
                await intruder.watch()
        assert await check(f"unix:{tmp_path}/verify.sock") == "SERVING"


async def test_keeps_the_log_of_the_run_before(fake_service: MakeCommand, tmp_path: Path) -> None:
    for _ in range(2):
        async with supervisor_of() as supervisor:
            supervisor.start(fake_service("verify"))
            await supervisor.wait_ready()
    assert (tmp_path / "verify.log").read_text() == (tmp_path / "verify.log.1").read_text() == "fake service speaking\n"


def test_services_die_with_a_supervisor_that_is_killed(fake_service: MakeCommand, tmp_path: Path) -> None:
    command = fake_service("verify")
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from slipstream.cli.process import ServiceCommand
        from slipstream.cli.supervisor import Supervisor

        async def main():
            async with Supervisor(ready_timeout_s=20, drain_timeout_s=5) as supervisor:
                supervisor.start(ServiceCommand(name="verify", argv={command.argv!r}, address={command.address!r},
                                                log_path=pathlib.Path({str(command.log_path)!r})))
                await supervisor.wait_ready()
                print(supervisor.pid("verify"), flush=True)
                await supervisor.watch()

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        service = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        block_until(lambda: not runs(service))
