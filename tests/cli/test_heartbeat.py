"""Services that stop answering, under the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from slipstream.cli.up import service as service_module
from slipstream.cli.up.restarts import RestartSettings
from tests.harness.supervised import Kills, States, supervisor_of, workers_of
from tests.harness.waiting import until

if TYPE_CHECKING:
    from tests.harness.supervised import MakeCommand

pytestmark = pytest.mark.timeout(30)


async def test_a_service_that_hangs_is_killed_and_started_again_alone(
    fake_service: MakeCommand, caplog: pytest.LogCaptureFixture
) -> None:
    states, kills = States(), Kills()
    settings = RestartSettings(hang_timeout_s=0.8)
    async with supervisor_of(on_change=states, before_kill=kills, restarts=settings) as supervisor:
        supervisor.start(*workers_of(fake_service))
        await supervisor.wait_ready()
        verify, draft = supervisor.pid("verify"), supervisor.pid("draft")
        watching = asyncio.ensure_future(supervisor.watch())
        os.kill(draft, signal.SIGSTOP)
        await until(lambda: states.num("draft") == 2)
        assert "draft did not answer for 0.8 s and was killed and is started again; its log is now" in caplog.text
        assert kills == [(draft, True)]
        assert supervisor.pid("verify") == verify
        assert not psutil.pid_exists(draft)
        service = supervisor.service("draft").report()
        assert (service.state, service.num_restarts) == ("ready", 1)
        assert service.last_end == "did not answer for 0.8 s and was killed"
        assert not watching.done()
        watching.cancel()


async def test_an_answer_between_those_that_are_missed_counts_from_the_start() -> None:
    script = [False, False, False, True, False, True, False, False, False, False]
    asked: list[float] = []

    async def answers(part_s: float) -> bool:
        asked.append(part_s)
        return script[len(asked) - 1]

    await service_module._until_missed(answers, 0.004)
    assert asked == [0.001] * len(script)


@pytest.mark.slow
async def test_a_pause_shorter_than_the_bound_costs_nothing(fake_service: MakeCommand) -> None:
    async with supervisor_of(restarts=RestartSettings(hang_timeout_s=4.0)) as supervisor:
        supervisor.start(replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        pid = supervisor.pid("gateway")
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGCONT)
        assert await supervisor.while_alive(asyncio.sleep(5.0, "served on")) == "served on"
        assert supervisor.pid("gateway") == pid
