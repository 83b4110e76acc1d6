"""Which services the supervisor starts again after a death, how often, and together with which others."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slipstream.cli import supervisor as restarts_module
from slipstream.cli.health import check
from slipstream.cli.service import ServiceState
from slipstream.cli.up_config import RestartSettings
from slipstream.common.errors import UnavailableError
from tests.harness.supervised import Kills, States, sockets_in, supervisor_of, workers_of
from tests.harness.waiting import until

if TYPE_CHECKING:
    from slipstream.cli.process import ServiceCommand
    from tests.harness.supervised import MakeCommand

pytestmark = pytest.mark.timeout(30)

FEW = RestartSettings(max_restarts=2)
MAX_DEATHS = FEW.max_restarts + 1


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that died is started again almost at once."""
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 0.01)


async def test_a_service_that_may_restart_is_started_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = States()
    async with supervisor_of(on_change=states) as supervisor:
        supervisor.start(fake_service("verify"))
        supervisor.start(replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        pids = [supervisor.pid("gateway")]
        for number in (1, 2):
            os.kill(pids[-1], signal.SIGKILL)
            await until(lambda: states.num("gateway") == number + 1)  # noqa: B023
            assert await check(f"unix:{tmp_path}/gateway.sock") == "SERVING"
            pids.append(supervisor.pid("gateway"))
        assert len(set(pids)) == 3
        assert "gateway was killed by SIGKILL and is started again" in caplog.text
        os.kill(supervisor.pid("verify"), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed by SIGKILL;"):
            await watching
    assert not sockets_in(tmp_path)


async def test_a_death_starts_the_whole_group_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states, kills = States(), Kills()
    async with supervisor_of(on_change=states, before_kill=kills) as supervisor:
        supervisor.start(*workers_of(fake_service), replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        verify, draft, gateway = (supervisor.pid(name) for name in ("verify", "draft", "gateway"))
        os.kill(draft, signal.SIGKILL)
        await until(lambda: states.num("verify") == states.num("draft") == 2)
        assert kills == [(verify, True)]
        assert not {verify, draft} & {supervisor.pid("verify"), supervisor.pid("draft")}
        assert supervisor.pid("gateway") == gateway
        assert await check(f"unix:{tmp_path}/verify.sock") == await check(f"unix:{tmp_path}/draft.sock") == "SERVING"
        assert "draft was killed by SIGKILL and is started again, together with verify; its log is now" in caplog.text
        assert not watching.done()
        watching.cancel()
    assert not sockets_in(tmp_path)


@pytest.mark.usefixtures("short_pauses")
async def test_the_deaths_of_a_group_are_counted_together(fake_service: MakeCommand) -> None:
    states = States()
    async with supervisor_of(restarts=FEW, on_change=states) as supervisor:
        supervisor.start(*workers_of(fake_service))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        for number in range(MAX_DEATHS):
            await until(lambda: states.num("verify") == states.num("draft") == number + 1)  # noqa: B023
            os.kill(supervisor.pid(("verify", "draft")[number % 2]), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed by SIGKILL, the last of 3 ends within 300 s; "):
            await watching


@pytest.mark.usefixtures("short_pauses")
async def test_a_death_by_a_signal_without_a_name_is_one_as_any(
    fake_service: MakeCommand, caplog: pytest.LogCaptureFixture
) -> None:
    states = States()
    async with supervisor_of(on_change=states) as supervisor:
        supervisor.start(replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        os.kill(supervisor.pid("gateway"), signal.SIGRTMIN + 1)
        await until(lambda: states.num("gateway") == 2)
        assert f"gateway was killed by signal {signal.SIGRTMIN + 1} and is started again" in caplog.text
        watching.cancel()


async def test_a_service_without_a_log_ends_as_any(fake_service: MakeCommand, tmp_path: Path) -> None:
    command = replace(fake_service("gateway"), argv=("/bin/sh", "-c", f"rm {tmp_path}/gateway.log; exit 7"))
    async with supervisor_of() as supervisor:
        supervisor.start(command)
        with pytest.raises(
            UnavailableError, match=r"ended with exit status 7 before it was ready;(?s:.*)cannot be read"
        ):
            await supervisor.wait_ready()


async def test_a_service_that_dies_too_often_is_not_started_again(fake_service: MakeCommand, tmp_path: Path) -> None:
    command = fake_service("gateway")
    dying = replace(command, argv=(*command.argv, "--die-when", str(tmp_path / "broken")), restarts=True)
    states = States()
    async with supervisor_of(restarts=FEW, on_change=states) as supervisor:
        supervisor.start(dying)
        await supervisor.wait_ready()
        (tmp_path / "broken").touch()
        with pytest.raises(UnavailableError, match="before it was ready, the last of 3 ends within 300 s; ") as caught:
            await supervisor.watch()
    assert "fake service cannot load its model" in str(caught.value)
    assert states.num("gateway", ServiceState.LOADING) == states.num("gateway", ServiceState.DIED) == MAX_DEATHS


async def test_a_service_that_was_never_ready_is_not_started_again(fake_service: MakeCommand) -> None:
    async with supervisor_of() as supervisor:
        supervisor.start(replace(fake_service("gateway", "--die-at-once"), restarts=True))
        with pytest.raises(UnavailableError, match="gateway ended with exit status 1 before it was ready; "):
            await supervisor.wait_ready()


async def test_a_death_during_a_wait_to_start_again_is_noticed_at_once(
    fake_service: MakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(restarts_module, "_MAX_PAUSE_S", 60.0)
    dying = fake_service("gateway", "--die-when", str(tmp_path / "broken"))
    states = States()
    async with supervisor_of(on_change=states) as supervisor:
        supervisor.start(fake_service("verify"), replace(dying, restarts=True))
        await supervisor.wait_ready()
        (tmp_path / "broken").touch()
        watching = asyncio.ensure_future(supervisor.watch())
        await until(lambda: states.num("gateway", ServiceState.DIED) == 2)
        os.kill(supervisor.pid("verify"), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed"):
            await watching


@pytest.mark.usefixtures("short_pauses")
async def test_the_others_are_ready_without_an_optional_service_and_it_is_tried_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    draft = replace(fake_service("draft", "--die-when", str(broken)), restarts=True, is_optional=True, group="workers")
    async with supervisor_of() as supervisor:
        supervisor.start(replace(fake_service("verify"), restarts=True, group="workers"), draft)
        await supervisor.wait_ready()
        verify = supervisor.pid("verify")
        service = supervisor.service("draft")

        async def until_ready() -> None:
            await until(lambda: service.num_restarts >= 3)
            broken.unlink()
            await until(lambda: service.is_ready)

        await supervisor.while_alive(until_ready())
        assert supervisor.pid("verify") == verify
    line = "draft ended with exit status 1 before it was ready and is tried again, and the others serve without it; "
    assert caplog.text.count(line) == caplog.text.count("fake service cannot load its model") == 1


@pytest.mark.usefixtures("short_pauses")
async def test_an_optional_service_that_dies_too_often_waits_and_the_others_serve_on(fake_service: MakeCommand) -> None:
    async with supervisor_of(restarts=RestartSettings(max_restarts=1)) as supervisor:
        needed, optional = workers_of(fake_service)
        supervisor.start(needed, replace(optional, is_optional=True))
        await supervisor.wait_ready()
        verify, draft = supervisor.service("verify"), supervisor.service("draft")

        async def kill_twice() -> None:
            for num_restarts in (1, 2):
                await until(lambda: verify.is_ready and draft.is_ready)
                os.kill(draft.process.pid, signal.SIGKILL)
                await until(lambda: verify.num_restarts == num_restarts and verify.is_ready)  # noqa: B023

        await supervisor.while_alive(kill_twice())
        assert (draft.num_restarts, draft.is_running) == (1, False)
        assert draft.due is not None
        assert 290 < draft.due - time.monotonic() <= 300


def unservable_draft(fake_service: MakeCommand, broken: Path) -> ServiceCommand:
    """A draft whose settings are wrong while a file exists."""
    draft = fake_service("draft", "--status", "2", "--die-when", str(broken))
    return replace(draft, restarts=True, is_optional=True, group="workers")


async def test_a_start_fails_with_an_optional_service_whose_settings_are_wrong(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    never_ready = fake_service("verify", "--ready-when", f"{tmp_path}/none")
    async with supervisor_of() as supervisor:
        supervisor.start(never_ready, unservable_draft(fake_service, Path("/")))
        with pytest.raises(UnavailableError, match=r"^draft ended with exit status 2 before it was ready; ") as caught:
            await supervisor.wait_ready()
    assert "fake service cannot load its model" in str(caught.value)


async def test_the_others_serve_on_without_an_optional_service_whose_settings_are_wrong(
    fake_service: MakeCommand, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not started again with its group either."""
    states = States()
    async with supervisor_of(on_change=states) as supervisor:
        supervisor.start(replace(fake_service("verify"), restarts=True, group="workers"))
        await supervisor.wait_ready()
        supervisor.end_start()
        supervisor.start(unservable_draft(fake_service, Path("/")))
        verify, draft = supervisor.service("verify"), supervisor.service("draft")

        async def kill_verify() -> None:
            await until(lambda: draft.due == math.inf)
            os.kill(verify.process.pid, signal.SIGKILL)
            await until(lambda: verify.num_restarts == 1 and verify.is_ready)

        await supervisor.while_alive(kill_verify())
        assert (draft.report().state, draft.report().last_end) == ("died", "ended with exit status 2")
    line = "draft ended with exit status 2 before it was ready and is not tried again: the others serve without it; "
    assert caplog.text.count(line) == caplog.text.count("fake service cannot load its model") == 1
    assert states.num("draft", ServiceState.LOADING) == 1


@pytest.mark.usefixtures("short_pauses")
async def test_an_optional_service_whose_settings_become_wrong_is_tried_a_few_times(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, states = tmp_path / "broken", States()
    async with supervisor_of(restarts=FEW, on_change=states) as supervisor:
        supervisor.start(fake_service("verify"), replace(unservable_draft(fake_service, broken), group=""))
        await until(lambda: all(one.is_ready for one in supervisor.services()))
        await supervisor.wait_ready()
        broken.touch()
        await supervisor.while_alive(until(lambda: supervisor.service("draft").due == math.inf))
    assert states.num("draft", ServiceState.LOADING) == states.num("draft", ServiceState.DIED) == MAX_DEATHS
    assert caplog.text.count("and is not tried again: the others serve without it; ") == 1
