"""Services that die or stop answering, under the supervisor."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.cli import supervisor as restarts_module
from slipstream.cli.health import check, until_hung
from slipstream.cli.process import ServiceCommand
from slipstream.cli.service import Service, ServiceState
from slipstream.cli.supervisor import Supervisor
from slipstream.cli.up_config import RestartSettings
from slipstream.common.errors import UnavailableError
from tests.harness.supervised import Kills, MakeCommand, States, serving, sockets_in, supervisor_of, workers_of
from tests.harness.waiting import until

FEW = RestartSettings(max_restarts=2)
MAX_DEATHS = FEW.max_restarts + 1
HANG_TIMEOUT_S = 1.5
"""Longer than a busy machine leaves a service without its turn."""


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
        pids = [supervisor.service("gateway").process.pid]
        for number in (1, 2):
            os.kill(pids[-1], signal.SIGKILL)
            await until(lambda: states.num("gateway") == number + 1)  # noqa: B023
            assert await check(f"unix:{tmp_path}/gateway.sock") == "SERVING"
            pids.append(supervisor.service("gateway").process.pid)
        assert len(set(pids)) == 3
        assert "gateway was killed by SIGKILL and is started again" in caplog.text
        os.kill(supervisor.service("verify").process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed by SIGKILL;"):
            await watching
    assert not sockets_in(tmp_path)


async def test_a_death_starts_the_whole_group_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states, kills = States(), Kills()
    async with serving(
        *workers_of(fake_service), replace(fake_service("gateway"), restarts=True), on_change=states, before_kill=kills
    ) as supervisor:
        watching = asyncio.ensure_future(supervisor.watch())
        verify, draft, gateway = (supervisor.service(name).process.pid for name in ("verify", "draft", "gateway"))
        os.kill(draft, signal.SIGKILL)
        await until(lambda: states.num("verify") == states.num("draft") == 2)
        assert kills == [(verify, True)]
        assert not {verify, draft} & {supervisor.service("verify").process.pid, supervisor.service("draft").process.pid}
        assert supervisor.service("gateway").process.pid == gateway
        assert await check(f"unix:{tmp_path}/verify.sock") == await check(f"unix:{tmp_path}/draft.sock") == "SERVING"
        assert "draft was killed by SIGKILL and is started again, together with verify; its log is now" in caplog.text
        assert not watching.done()
        watching.cancel()
    assert not sockets_in(tmp_path)


@pytest.mark.usefixtures("short_pauses")
async def test_the_deaths_of_a_group_are_counted_together(fake_service: MakeCommand) -> None:
    states = States()
    async with serving(*workers_of(fake_service), restarts=FEW, on_change=states) as supervisor:
        watching = asyncio.ensure_future(supervisor.watch())
        for number in range(MAX_DEATHS):
            await until(lambda: states.num("verify") == states.num("draft") == number + 1)  # noqa: B023
            os.kill(supervisor.service(("verify", "draft")[number % 2]).process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed by SIGKILL, the last of 3 ends within 300 s; "):
            await watching


@pytest.mark.usefixtures("short_pauses")
async def test_a_death_by_a_signal_without_a_name_is_one_as_any(
    fake_service: MakeCommand, caplog: pytest.LogCaptureFixture
) -> None:
    states = States()
    async with serving(replace(fake_service("gateway"), restarts=True), on_change=states) as supervisor:
        watching = asyncio.ensure_future(supervisor.watch())
        os.kill(supervisor.service("gateway").process.pid, signal.SIGRTMIN + 1)
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
    async with serving(dying, restarts=FEW, on_change=states) as supervisor:
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
    async with serving(fake_service("verify"), replace(dying, restarts=True), on_change=states) as supervisor:
        (tmp_path / "broken").touch()
        watching = asyncio.ensure_future(supervisor.watch())
        await until(lambda: states.num("gateway", ServiceState.DIED) == 2)
        os.kill(supervisor.service("verify").process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed"):
            await watching


@pytest.mark.usefixtures("short_pauses")
async def test_the_others_are_ready_without_an_optional_service_and_it_is_tried_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    draft = replace(fake_service("draft", "--die-when", str(broken)), restarts=True, is_optional=True, group="workers")
    async with serving(replace(fake_service("verify"), restarts=True, group="workers"), draft) as supervisor:
        verify = supervisor.service("verify").process.pid
        service = supervisor.service("draft")

        async def until_ready() -> None:
            await until(lambda: service.num_restarts >= 3)
            broken.unlink()
            await until(lambda: service.is_ready)

        await supervisor.while_alive(until_ready())
        assert supervisor.service("verify").process.pid == verify
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
    async with serving(replace(fake_service("verify"), restarts=True, group="workers"), on_change=states) as supervisor:
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


async def test_a_service_that_hangs_is_killed_and_started_again_alone(
    fake_service: MakeCommand, caplog: pytest.LogCaptureFixture
) -> None:
    states, kills = States(), Kills()
    settings = RestartSettings(hang_timeout_s=HANG_TIMEOUT_S)
    async with serving(*workers_of(fake_service), on_change=states, before_kill=kills, restarts=settings) as supervisor:
        verify, draft = supervisor.service("verify").process.pid, supervisor.service("draft").process.pid
        watching = asyncio.ensure_future(supervisor.watch())
        os.kill(draft, signal.SIGSTOP)
        await until(lambda: states.num("draft") == 2)
        assert (
            f"draft did not answer for {HANG_TIMEOUT_S} s and was killed and is started again; its log is now"
            in caplog.text
        )
        assert kills == [(draft, True)]
        assert supervisor.service("verify").process.pid == verify
        assert not psutil.pid_exists(draft)
        service = supervisor.service("draft").report()
        assert (service.state, service.num_restarts) == ("ready", 1)
        assert service.last_end == f"did not answer for {HANG_TIMEOUT_S} s and was killed"
        assert not watching.done()
        watching.cancel()


async def test_a_service_that_hangs_as_it_starts_again_is_killed_and_tried_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, states = tmp_path / "hanging", States()
    async with serving(
        replace(fake_service("verify", "--stop-when", str(hanging)), restarts=True),
        on_change=states,
        restarts=RestartSettings(hang_timeout_s=HANG_TIMEOUT_S),
    ) as supervisor:
        service = supervisor.service("verify")

        async def hang_once() -> str:
            await until(lambda: service.slowest_start_s > 0)
            patience_s = service.start_timeout_s(HANG_TIMEOUT_S)
            hanging.touch()
            os.kill(service.process.pid, signal.SIGKILL)
            await until(lambda: service.num_restarts == 1 and _is_stopped(service.process.pid))
            hanging.unlink()
            await until(lambda: states.num("verify") == 2)
            return f"verify did not answer for {patience_s:g} s and was killed before it was ready and is tried again; "

        assert await supervisor.while_alive(hang_once()) in caplog.text
    assert (service.num_restarts, service.num_hung_starts) == (2, 0)


async def test_a_service_that_hangs_after_it_has_answered_is_found_as_one_that_is_ready(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervisor_of(restarts=RestartSettings(hang_timeout_s=HANG_TIMEOUT_S)) as supervisor:
        service = await _loading_again(supervisor, fake_service, tmp_path)
        watching = asyncio.ensure_future(supervisor.watch())
        await until(lambda: service.slowest_start_s > 0)
        os.kill(service.process.pid, signal.SIGSTOP)
        (tmp_path / "loaded").touch()
        await until(lambda: service.is_ready)
        assert (
            f"scheduler did not answer for {HANG_TIMEOUT_S} s and was killed before it was ready and is tried again"
            in caplog.text
        )
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
    async with serving(
        replace(fake_service("gateway"), restarts=True), restarts=RestartSettings(hang_timeout_s=4.0)
    ) as supervisor:
        pid = supervisor.service("gateway").process.pid
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGCONT)
        assert await supervisor.while_alive(asyncio.sleep(5.0, "served on")) == "served on"
        assert supervisor.service("gateway").process.pid == pid
