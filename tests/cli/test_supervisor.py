"""The supervisor, on fake services that load, die, hang and drain as told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from slipstream.cli.cancellation import StopSignals
from slipstream.cli.status import check
from slipstream.cli.up import restarts as restarts_module
from slipstream.cli.up.restarts import RestartSettings
from slipstream.cli.up.service import ServiceState
from slipstream.cli.up.supervisor import Supervisor
from slipstream.common.errors import DeadlineExceededError, UnavailableError
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import MakeCommand

pytestmark = pytest.mark.timeout(30)

FEW = RestartSettings(max_restarts=2)
MAX_DEATHS = FEW.max_restarts + 1


async def until_health(health: str, address: str) -> None:
    """Returns when the service there answers, and that is its answer."""
    while True:
        with contextlib.suppress(UnavailableError):
            assert await check(address) == health
            return


def sockets_in(folder: Path) -> list[Path]:
    """The Unix sockets that lie there."""
    return [path for path in folder.iterdir() if path.is_socket()]


def _supervisor(**changes: Any) -> Supervisor:
    return Supervisor(**{"ready_timeout_s": 20.0, "drain_timeout_s": 10.0, "exit_timeout_s": 0.5, **changes})


async def test_waits_for_health_not_for_the_socket(fake_service: MakeCommand, tmp_path: Path) -> None:
    changes: list[tuple[str, ServiceState]] = []
    go = tmp_path / "go"
    async with Supervisor(
        ready_timeout_s=20.0, drain_timeout_s=10.0, on_change=lambda name, state: changes.append((name, state))
    ) as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft", "--ready-when", str(go)))
        ready = asyncio.ensure_future(supervisor.wait_ready())
        await until(lambda: ("verify", ServiceState.READY) in changes)
        await until_health("NOT_SERVING", f"unix:{tmp_path}/draft.sock")
        assert not ready.done()
        go.touch()
        await ready
        assert await check(f"unix:{tmp_path}/draft.sock") == "SERVING"
    assert changes[-1][1] is ServiceState.STOPPED
    assert not sockets_in(tmp_path)


async def test_names_the_service_that_dies_while_loading(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with _supervisor() as supervisor:
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
    async with _supervisor() as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft"))
        await supervisor.wait_ready()
        os.kill(supervisor.pid("verify"), number)
        with pytest.raises(UnavailableError, match=f"verify {end};"):
            await supervisor.watch()
    assert not sockets_in(tmp_path)


async def test_a_death_ends_the_work_that_needs_the_service(fake_service: MakeCommand) -> None:
    async with _supervisor() as supervisor:
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

    async with _supervisor() as supervisor:
        supervisor.start(fake_service("verify"))
        await supervisor.wait_ready()
        with pytest.raises(UnavailableError, match="verify was killed"):
            await supervisor.while_alive(lose())


async def test_a_service_that_may_restart_is_started_again(
    fake_service: MakeCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[tuple[str, ServiceState]] = []
    async with _supervisor(on_change=lambda name, state: changes.append((name, state))) as supervisor:
        supervisor.start(fake_service("verify"))
        supervisor.start(replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        pids = [supervisor.pid("gateway")]
        for number in (1, 2):
            os.kill(pids[-1], signal.SIGKILL)
            await until(lambda: changes.count(("gateway", ServiceState.READY)) == number + 1)  # noqa: B023
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
    let_go: list[tuple[int, bool]] = []
    changes: list[tuple[str, ServiceState]] = []

    async def before_kill(pid: int) -> None:
        let_go.append((pid, psutil.pid_exists(pid)))

    def on_change(name: str, state: ServiceState) -> None:
        changes.append((name, state))

    async with _supervisor(on_change=on_change, before_kill=before_kill) as supervisor:
        workers = [replace(fake_service(name), restarts=True, group="workers") for name in ("verify", "draft")]
        supervisor.start(*workers, replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        verify, draft, gateway = (supervisor.pid(name) for name in ("verify", "draft", "gateway"))
        os.kill(draft, signal.SIGKILL)
        await until(lambda: all(changes.count((name, ServiceState.READY)) == 2 for name in ("verify", "draft")))
        assert let_go == [(verify, True)]
        assert not {verify, draft} & {supervisor.pid("verify"), supervisor.pid("draft")}
        assert supervisor.pid("gateway") == gateway
        assert await check(f"unix:{tmp_path}/verify.sock") == await check(f"unix:{tmp_path}/draft.sock") == "SERVING"
        assert "draft was killed by SIGKILL and is started again, together with verify; its log is now" in caplog.text
        assert not watching.done()
        watching.cancel()
    assert not sockets_in(tmp_path)


async def test_the_deaths_of_a_group_are_counted_together(
    fake_service: MakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 0.01)
    changes: list[tuple[str, ServiceState]] = []
    async with _supervisor(restarts=FEW, on_change=lambda name, state: changes.append((name, state))) as supervisor:
        names = ("verify", "draft")
        supervisor.start(*(replace(fake_service(name), restarts=True, group="workers") for name in names))
        await supervisor.wait_ready()
        watching = asyncio.ensure_future(supervisor.watch())
        for number in range(MAX_DEATHS):
            await until(lambda: all(changes.count((name, ServiceState.READY)) == number + 1 for name in names))  # noqa: B023
            os.kill(supervisor.pid(names[number % 2]), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed by SIGKILL, the last of 3 ends within 300 s; "):
            await watching


async def test_a_service_that_dies_too_often_is_not_started_again(
    fake_service: MakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 0.01)
    command = fake_service("gateway")
    dying = replace(command, argv=(*command.argv, "--die-when", str(tmp_path / "broken")), restarts=True)
    changes: list[ServiceState] = []
    async with _supervisor(restarts=FEW, on_change=lambda _name, state: changes.append(state)) as supervisor:
        supervisor.start(dying)
        await supervisor.wait_ready()
        (tmp_path / "broken").touch()
        with pytest.raises(UnavailableError, match="before it was ready, the last of 3 ends within 300 s; ") as caught:
            await supervisor.watch()
    assert "fake service cannot load its model" in str(caught.value)
    assert changes.count(ServiceState.LOADING) == changes.count(ServiceState.DIED) == MAX_DEATHS


async def test_a_service_that_was_never_ready_is_not_started_again(fake_service: MakeCommand) -> None:
    async with _supervisor() as supervisor:
        supervisor.start(replace(fake_service("gateway", "--die-at-once"), restarts=True))
        with pytest.raises(UnavailableError, match="gateway ended with exit status 1 before it was ready; "):
            await supervisor.wait_ready()


async def test_a_death_during_a_wait_to_start_again_is_noticed_at_once(
    fake_service: MakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(restarts_module, "_MAX_PAUSE_S", 60.0)
    dying = fake_service("gateway", "--die-when", str(tmp_path / "broken"))
    deaths: list[str] = []

    def on_change(name: str, state: ServiceState) -> None:
        if state is ServiceState.DIED:
            deaths.append(name)

    async with _supervisor(on_change=on_change) as supervisor:
        supervisor.start(fake_service("verify"), replace(dying, restarts=True))
        await supervisor.wait_ready()
        (tmp_path / "broken").touch()
        watching = asyncio.ensure_future(supervisor.watch())
        await until(lambda: deaths == ["gateway", "gateway"])
        os.kill(supervisor.pid("verify"), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed"):
            await watching


async def test_a_service_that_hangs_is_killed_and_started_again_alone(
    fake_service: MakeCommand, caplog: pytest.LogCaptureFixture
) -> None:
    let_go: list[int] = []

    async def before_kill(pid: int) -> None:
        let_go.append(pid)

    changes: list[tuple[str, ServiceState]] = []
    async with _supervisor(
        on_change=lambda name, state: changes.append((name, state)),
        before_kill=before_kill,
        restarts=RestartSettings(hang_timeout_s=0.8),
    ) as supervisor:
        supervisor.start(*(replace(fake_service(name), restarts=True, group="workers") for name in ("verify", "draft")))
        await supervisor.wait_ready()
        verify, draft = supervisor.pid("verify"), supervisor.pid("draft")
        watching = asyncio.ensure_future(supervisor.watch())
        os.kill(draft, signal.SIGSTOP)
        await until(lambda: changes.count(("draft", ServiceState.READY)) == 2)
        assert "draft did not answer for 0.8 s and was killed and is started again; its log is now" in caplog.text
        assert let_go == [draft]
        assert supervisor.pid("verify") == verify
        assert not psutil.pid_exists(draft)
        service = supervisor.service("draft").report()
        assert (service.state, service.num_restarts) == ("ready", 1)
        assert service.last_end == "did not answer for 0.8 s and was killed"
        assert not watching.done()
        watching.cancel()


async def test_a_pause_shorter_than_the_bound_costs_nothing(fake_service: MakeCommand) -> None:
    async with _supervisor(restarts=RestartSettings(hang_timeout_s=2.0)) as supervisor:
        supervisor.start(replace(fake_service("gateway"), restarts=True))
        await supervisor.wait_ready()
        pid = supervisor.pid("gateway")
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGCONT)
        assert await supervisor.while_alive(asyncio.sleep(3.0, "served on")) == "served on"
        assert supervisor.pid("gateway") == pid


async def test_the_others_are_ready_without_an_optional_service_and_it_is_tried_again(
    fake_service: MakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 0.01)
    broken = tmp_path / "broken"
    broken.touch()
    draft = replace(fake_service("draft", "--die-when", str(broken)), restarts=True, is_optional=True, group="workers")
    async with _supervisor() as supervisor:
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


async def test_an_optional_service_that_dies_too_often_waits_and_the_others_serve_on(
    fake_service: MakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_module, "_FIRST_PAUSE_S", 0.01)
    async with _supervisor(restarts=RestartSettings(max_restarts=1)) as supervisor:
        workers = [replace(fake_service(name), restarts=True, group="workers") for name in ("verify", "draft")]
        supervisor.start(workers[0], replace(workers[1], is_optional=True))
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


async def test_a_service_beside_the_others_is_kept_only_when_told_so(fake_service: MakeCommand) -> None:
    async with _supervisor() as supervisor:
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


async def test_says_which_service_is_late(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with _supervisor(ready_timeout_s=1.5) as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft", "--ready-when", str(tmp_path / "never")))
        with pytest.raises(DeadlineExceededError, match=r"draft not ready after 1\.5 s"):
            await supervisor.wait_ready()


async def test_stops_the_last_started_first(fake_service: MakeCommand, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options = ("--journal", str(journal))
    async with _supervisor() as supervisor:
        supervisor.start(fake_service("verify", *options), fake_service("draft", *options))
        supervisor.start(fake_service("scheduler", *options))
        await supervisor.wait_ready()
        await supervisor.stop("draft")
        assert journal.read_text().split("/")[-1] == "draft.sock SIGTERM\n"
    names = [line.split("/")[-1] for line in journal.read_text().splitlines()]
    assert names == [f"{name}.sock SIGTERM" for name in ("draft", "scheduler", "verify")]


async def test_a_service_that_does_not_drain_is_ended_after_the_bound(fake_service: MakeCommand) -> None:
    async with _supervisor(drain_timeout_s=0.2) as supervisor:
        supervisor.start(fake_service("deaf", "--deaf", "99"), fake_service("once", "--deaf", "1"))
        await supervisor.wait_ready()
        start = time.monotonic()
    assert time.monotonic() - start < 4


async def test_a_service_that_is_stopped_is_killed_and_its_socket_removed(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    async with _supervisor(drain_timeout_s=0.2) as supervisor:
        supervisor.start(fake_service("verify"))
        await supervisor.wait_ready()
        os.kill(supervisor.pid("verify"), signal.SIGSTOP)
    assert not sockets_in(tmp_path)


async def test_what_comes_before_a_kill_is_waited_for(fake_service: MakeCommand) -> None:
    told: list[tuple[int, bool]] = []

    async def before_kill(pid: int) -> None:
        told.append((pid, psutil.pid_exists(pid)))

    times = {"ready_timeout_s": 20.0, "drain_timeout_s": 0.2, "exit_timeout_s": 0.2}
    async with Supervisor(**times, before_kill=before_kill) as supervisor:
        supervisor.start(fake_service("polite"), fake_service("deaf", "--deaf", "99"))
        await supervisor.wait_ready()
        deaf = supervisor.pid("deaf")
    assert told == [(deaf, True)]


async def test_what_goes_wrong_before_a_kill_leaves_no_service_running(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    async def before_kill(_pid: int) -> None:
        raise UnavailableError("nobody answers")

    async def work() -> None:
        async with Supervisor(**times, before_kill=before_kill) as supervisor:
            supervisor.start(fake_service("verify"))
            supervisor.start(fake_service("deaf", "--deaf", "99"), fake_service("draft"))
            await supervisor.wait_ready()

    times = {"ready_timeout_s": 20.0, "drain_timeout_s": 0.2, "exit_timeout_s": 0.2}
    before = psutil.Process().children()
    with pytest.raises(UnavailableError, match="nobody answers"):
        await work()
    assert psutil.Process().children() == before
    assert not sockets_in(tmp_path)


async def test_a_state_that_cannot_be_shown_leaves_no_service_running(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    def on_change(_name: str, state: ServiceState) -> None:
        if state is ServiceState.STOPPING:
            raise OSError("no terminal")

    async def work() -> None:
        async with Supervisor(ready_timeout_s=20.0, drain_timeout_s=10.0, on_change=on_change) as supervisor:
            supervisor.start(fake_service("verify"))
            supervisor.start(fake_service("scheduler"))
            await supervisor.wait_ready()

    with pytest.raises(OSError, match="no terminal"):
        await work()
    assert not sockets_in(tmp_path)


async def test_a_signal_after_a_death_hurries_the_stop_and_hides_nothing(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"

    async def interrupt() -> None:
        await until(journal.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    async def work() -> None:
        async with supervisor:
            supervisor.start(fake_service("verify"), fake_service("draft"))
            supervisor.start(fake_service("scheduler", "--deaf", "1", "--journal", str(journal)))
            await supervisor.wait_ready()
            os.kill(supervisor.pid("draft"), signal.SIGUSR1)
            await supervisor.watch()

    supervisor = _supervisor(drain_timeout_s=60.0)
    interrupting = asyncio.ensure_future(interrupt())
    with pytest.raises(UnavailableError, match="draft ended with exit status 7"):
        await StopSignals().cancel(work())
    await interrupting
    assert not sockets_in(tmp_path)


async def test_a_cancellation_of_the_stop_comes_after_its_end(fake_service: MakeCommand, tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def work() -> None:
        async with _supervisor(drain_timeout_s=60.0) as supervisor:
            supervisor.start(fake_service("verify", "--deaf", "1", "--journal", str(journal)))
            await supervisor.wait_ready()

    working = asyncio.ensure_future(work())
    await until(journal.exists)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not sockets_in(tmp_path)


async def test_a_service_has_its_own_environment(fake_service: MakeCommand) -> None:
    async with _supervisor() as supervisor:
        supervisor.start(replace(fake_service("verify"), environment={"SLIPSTREAM_TEST": "inside"}))
        await supervisor.wait_ready()
        environment = psutil.Process(supervisor.pid("verify")).environ()
    assert environment["SLIPSTREAM_TEST"] == "inside"
    assert environment["PATH"] == os.environ["PATH"]


async def test_hurry_ends_the_drain(fake_service: MakeCommand) -> None:
    hurry = asyncio.Event()
    async with _supervisor(drain_timeout_s=60.0, hurry=hurry) as supervisor:
        supervisor.start(fake_service("slow", "--deaf", "1"))
        supervisor.start(fake_service("front", "--deaf", "1"))
        await supervisor.wait_ready()
        asyncio.get_running_loop().call_later(0.1, hurry.set)
        start = time.monotonic()
    assert time.monotonic() - start < 6


async def test_the_socket_of_a_live_owner_stays(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with _supervisor() as owner:
        owner.start(fake_service("verify"))
        await owner.wait_ready()
        async with _supervisor() as intruder:
            intruder.start(fake_service("verify", "--die-at-once"))
            with pytest.raises(UnavailableError):
                await intruder.watch()
        assert await check(f"unix:{tmp_path}/verify.sock") == "SERVING"


async def test_keeps_the_log_of_the_run_before(fake_service: MakeCommand, tmp_path: Path) -> None:
    for _ in range(2):
        async with _supervisor() as supervisor:
            supervisor.start(fake_service("verify"))
            await supervisor.wait_ready()
    assert (tmp_path / "verify.log").read_text() == (tmp_path / "verify.log.1").read_text() == "fake service speaking\n"


def test_services_die_with_a_supervisor_that_is_killed(fake_service: MakeCommand, tmp_path: Path) -> None:
    command = fake_service("verify")
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from slipstream.cli.up.process import ServiceCommand
        from slipstream.cli.up.supervisor import Supervisor

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
        psutil.wait_procs([service], timeout=5)
        assert not service.is_running() or service.status() == psutil.STATUS_ZOMBIE
