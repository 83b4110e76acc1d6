"""The supervisor, on fake services that load and die as told: readiness, deaths, and services beside the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.health import check
from slipstream.cli.service import ServiceState
from slipstream.common.errors import DeadlineExceededError, UnavailableError
from tests.harness.supervised import States, sockets_in, supervisor_of
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.supervised import MakeCommand

pytestmark = pytest.mark.timeout(30)


async def until_health(health: str, address: str) -> None:
    """Returns when the service there answers, and that is its answer."""
    while True:
        with contextlib.suppress(UnavailableError):
            assert await check(address) == health
            return


async def test_waits_for_health_not_for_the_socket(fake_service: MakeCommand, tmp_path: Path) -> None:
    states = States()
    go = tmp_path / "go"
    async with supervisor_of(on_change=states) as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft", "--ready-when", str(go)))
        ready = asyncio.ensure_future(supervisor.wait_ready())
        await until(lambda: states.num("verify") == 1)
        await until_health("NOT_SERVING", f"unix:{tmp_path}/draft.sock")
        assert not ready.done()
        go.touch()
        await ready
        assert await check(f"unix:{tmp_path}/draft.sock") == "SERVING"
    assert states[-1][1] is ServiceState.STOPPED
    assert not sockets_in(tmp_path)


async def test_names_the_service_that_dies_while_loading(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with supervisor_of() as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft", "--die-at-once"))
        with pytest.raises(UnavailableError, match=r"draft ended with exit status 1 before it was ready") as caught:
            await supervisor.wait_ready()
    assert "fake service cannot load its model" in str(caught.value)
    assert str(tmp_path / "draft.log") in str(caught.value)


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGUSR1, "ended with exit status 7"), (signal.SIGKILL, "was killed by SIGKILL")]
)
async def test_names_the_service_that_dies_later(
    fake_service: MakeCommand, tmp_path: Path, number: signal.Signals, end: str
) -> None:
    async with supervisor_of() as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft"))
        await supervisor.wait_ready()
        os.kill(supervisor.pid("verify"), number)
        with pytest.raises(UnavailableError, match=f"verify {end};"):
            await supervisor.watch()
    assert not sockets_in(tmp_path)


async def test_says_which_service_is_late(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with supervisor_of(ready_timeout_s=1.5) as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft", "--ready-when", str(tmp_path / "never")))
        with pytest.raises(DeadlineExceededError, match=r"draft not ready after 1\.5 s"):
            await supervisor.wait_ready()


async def test_a_death_ends_the_work_that_needs_the_service(fake_service: MakeCommand) -> None:
    async with supervisor_of() as supervisor:
        supervisor.start(fake_service("verify"))
        await supervisor.wait_ready()
        assert await supervisor.while_alive(asyncio.sleep(0, "done")) == "done"
        asyncio.get_running_loop().call_later(0.05, os.kill, supervisor.pid("verify"), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed"):
            await supervisor.while_alive(asyncio.sleep(60))


async def test_a_death_explains_the_error_that_it_caused(fake_service: MakeCommand) -> None:
    async def lose() -> None:
        os.kill(supervisor.pid("verify"), signal.SIGKILL)
        raise UnavailableError("lost")

    async with supervisor_of() as supervisor:
        supervisor.start(fake_service("verify"))
        await supervisor.wait_ready()
        with pytest.raises(UnavailableError, match="verify was killed"):
            await supervisor.while_alive(lose())


async def test_a_service_beside_the_others_is_kept_only_when_told_so(fake_service: MakeCommand) -> None:
    async with supervisor_of() as supervisor:
        supervisor.start(replace(fake_service("draft"), restarts=True))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        first = supervisor.start_beside(replace(fake_service("draft-2"), restarts=True))
        await first.process.ready.wait()
        os.kill(first.process.pid, signal.SIGKILL)
        await first.process.ended.wait()
        await supervisor.retire(first)
        second = supervisor.start_beside(replace(fake_service("draft-3"), restarts=True))
        await second.process.ready.wait()
        old = supervisor.service("draft")
        supervisor.keep(second, replace(second.command, name="draft"))
        await supervisor.retire(old)
        assert [one.name for one in supervisor.services()] == ["draft"]
        os.kill(second.process.pid, signal.SIGKILL)
        await until(lambda: second.num_restarts == 1 and second.is_ready)
        assert first.num_restarts == old.num_restarts == 0
        third = supervisor.start_beside(replace(fake_service("draft-4"), restarts=True))
        await third.process.ready.wait()
        os.kill(third.process.pid, signal.SIGKILL)
        await until(lambda: third.due is not None)
        supervisor.keep(third, third.command)
        await until(lambda: third.num_restarts == 1 and third.is_ready)
        assert not watching.done()
        watching.cancel()
