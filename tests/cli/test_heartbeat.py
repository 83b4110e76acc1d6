"""Services that stop answering, under the supervisor."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from slipstream.cli.health import until_hung
from slipstream.cli.service import Service
from slipstream.cli.up_config import RestartSettings
from slipstream.common.errors import UnavailableError
from tests.harness.supervised import Kills, States, supervisor_of, workers_of
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.cli.supervisor import Supervisor
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


async def test_a_service_that_hangs_as_it_starts_again_is_killed_and_tried_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, states = tmp_path / "hanging", States()
    async with supervisor_of(on_change=states, restarts=RestartSettings(hang_timeout_s=0.8)) as supervisor:
        supervisor.start(replace(fake_service("verify", "--stop-when", str(hanging)), restarts=True))
        await supervisor.wait_ready()
        service = supervisor.service("verify")

        async def hang_once() -> str:
            await until(lambda: service.slowest_start_s > 0)
            patience_s = 3 * service.slowest_start_s
            hanging.touch()
            os.kill(service.process.pid, signal.SIGKILL)
            await until(lambda: service.num_restarts == 1 and _is_stopped(service.process.pid))
            hanging.unlink()
            await until(lambda: states.num("verify") == 2)
            return f"verify did not answer for {patience_s} s and was killed before it was ready and is tried again; "

        assert await supervisor.while_alive(hang_once()) in caplog.text
    assert (service.num_restarts, service.num_hung_starts) == (2, 0)


async def test_a_service_that_hangs_after_it_has_answered_is_found_as_one_that_is_ready(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervisor_of(restarts=RestartSettings(hang_timeout_s=0.8)) as supervisor:
        service = await _loading_again(supervisor, fake_service, tmp_path)
        watching = asyncio.ensure_future(supervisor.watch())
        await until(lambda: service.slowest_start_s > 0)
        os.kill(service.process.pid, signal.SIGSTOP)
        (tmp_path / "loaded").touch()
        await until(lambda: service.is_ready)
        assert "scheduler did not answer for 0.8 s and was killed before it was ready and is tried again" in caplog.text
        assert not watching.done()
        watching.cancel()


async def test_a_service_that_is_not_ready_in_time_again_and_again_ends_all(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RestartSettings(max_restarts=1, restart_window_s=0.001)
    async with supervisor_of(restarts=settings) as supervisor:
        await _loading_again(supervisor, fake_service, tmp_path, ready_timeout_s=0.2)
        late = "scheduler was not ready after 0.2 s and was killed before it was ready"
        with pytest.raises(UnavailableError, match=f"^{late}, the last of 2 such starts; "):
            await supervisor.watch()
        assert f"{late} and is tried again; " in caplog.text


async def _loading_again(
    supervisor: Supervisor, fake_service: MakeCommand, folder: Path, *, ready_timeout_s: float = 20.0
) -> Service:
    """A scheduler that was ready and died. It answers when it is started again, and is ready when `loaded` exists."""
    loaded = folder / "loaded"
    loaded.touch()
    supervisor.start(replace(fake_service("scheduler", "--ready-when", str(loaded)), restarts=True))
    await supervisor.wait_ready()
    service = supervisor.service("scheduler")
    await until(lambda: service.slowest_start_s > 0)
    service.slowest_start_s = 0
    loaded.unlink()
    supervisor._ready_timeout_s = ready_timeout_s
    os.kill(service.process.pid, signal.SIGKILL)
    return service


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_a_start_has_a_multiple_of_the_slowest_before_and_more_after_each_that_hung(fake_service: MakeCommand) -> None:
    service = Service(fake_service("verify"))
    assert service.start_timeout_s(10.0) == math.inf
    service.was_ever_ready, service.slowest_start_s = True, 4
    assert (service.start_timeout_s(10.0), service.start_timeout_s(3.0)) == (30.0, 12.0)
    service.num_hung_starts = 2
    assert service.start_timeout_s(3.0) == 48.0
    service.num_hung_starts = 10_000
    assert service.start_timeout_s(3.0) < math.inf


async def test_an_answer_between_those_that_are_missed_counts_from_the_start() -> None:
    script = [False, False, False, True, False, True, False, False, False, False]
    asked: list[float] = []

    async def answers(part_s: float) -> bool:
        asked.append(part_s)
        return script[len(asked) - 1]

    await until_hung(answers, 0.004)
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
