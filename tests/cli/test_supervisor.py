"""The supervisor: starts, ends in order, and the processes of services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.cli.cancellation import StopSignals
from slipstream.cli.health import check
from slipstream.cli.service import ServiceState
from slipstream.common.errors import DeadlineExceededError, UnavailableError
from tests.harness.supervised import Kills, MakeCommand, States, serving, sockets_in, supervisor_of
from tests.harness.waiting import block_until, runs, until


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
    async with serving(fake_service("verify"), fake_service("draft")) as supervisor:
        os.kill(supervisor.service("verify").process.pid, number)
        with pytest.raises(UnavailableError, match=f"verify {end};"):
            await supervisor.watch()
    assert not sockets_in(tmp_path)


async def test_says_which_service_is_late(fake_service: MakeCommand, tmp_path: Path) -> None:
    async with supervisor_of(ready_timeout_s=1.5) as supervisor:
        supervisor.start(fake_service("verify"), fake_service("draft", "--ready-when", str(tmp_path / "never")))
        with pytest.raises(DeadlineExceededError, match=r"draft not ready after 1\.5 s"):
            await supervisor.wait_ready()


async def test_a_death_ends_the_work_that_needs_the_service(fake_service: MakeCommand) -> None:
    async with serving(fake_service("verify")) as supervisor:
        assert await supervisor.while_alive(asyncio.sleep(0, "done")) == "done"
        asyncio.get_running_loop().call_later(0.05, os.kill, supervisor.service("verify").process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="verify was killed"):
            await supervisor.while_alive(asyncio.sleep(60))


async def test_a_death_explains_the_error_that_it_caused(fake_service: MakeCommand) -> None:
    async def lose() -> None:
        os.kill(supervisor.service("verify").process.pid, signal.SIGKILL)
        raise UnavailableError("lost")

    async with serving(fake_service("verify")) as supervisor:
        with pytest.raises(UnavailableError, match="verify was killed"):
            await supervisor.while_alive(lose())


async def test_a_service_beside_the_others_is_kept_only_when_told_so(fake_service: MakeCommand) -> None:
    async with serving(replace(fake_service("draft"), restarts=True)) as supervisor:
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


async def test_stops_the_last_started_first(fake_service: MakeCommand, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options = ("--journal", str(journal))
    async with supervisor_of() as supervisor:
        supervisor.start(fake_service("verify", *options), fake_service("draft", *options))
        supervisor.start(fake_service("scheduler", *options))
        await supervisor.wait_ready()
        await supervisor.retire(supervisor.service("draft"))
        assert journal.read_text().split("/")[-1] == "draft.sock SIGTERM\n"
    names = [line.split("/")[-1] for line in journal.read_text().splitlines()]
    assert names == [f"{name}.sock SIGTERM" for name in ("draft", "scheduler", "verify")]


async def test_a_service_that_does_not_drain_is_ended_after_the_bound(fake_service: MakeCommand) -> None:
    commands = fake_service("deaf", "--deaf", "99"), fake_service("once", "--deaf", "1")
    async with serving(*commands, drain_timeout_s=0.2):
        start = time.monotonic()
    assert time.monotonic() - start < 20


async def test_a_service_that_is_stopped_is_killed_and_its_sockets_removed(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    async with serving(fake_service("verify"), drain_timeout_s=0.2) as supervisor:
        with socket.socket(socket.AF_UNIX) as commands:
            commands.bind(str(tmp_path / "verify.sock.commands"))
        os.kill(supervisor.service("verify").process.pid, signal.SIGSTOP)
    assert not sockets_in(tmp_path)


async def test_what_comes_before_a_kill_is_waited_for(fake_service: MakeCommand) -> None:
    kills = Kills()
    commands = fake_service("polite"), fake_service("deaf", "--deaf", "99")
    async with serving(*commands, drain_timeout_s=1.0, exit_timeout_s=2.0, before_kill=kills) as supervisor:
        deaf = supervisor.service("deaf").process.pid
    assert kills == [(deaf, True)]


async def test_what_goes_wrong_before_a_kill_leaves_no_service_running(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    async def before_kill(_pid: int) -> None:
        raise UnavailableError("nobody answers")

    async def work() -> None:
        async with supervisor_of(drain_timeout_s=0.2, before_kill=before_kill) as supervisor:
            supervisor.start(fake_service("verify"))
            supervisor.start(fake_service("deaf", "--deaf", "99"), fake_service("draft"))
            await supervisor.wait_ready()

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
        async with supervisor_of(on_change=on_change) as supervisor:
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
            os.kill(supervisor.service("draft").process.pid, signal.SIGUSR1)
            await supervisor.watch()

    supervisor = supervisor_of(drain_timeout_s=60.0)
    interrupting = asyncio.ensure_future(interrupt())
    with pytest.raises(UnavailableError, match="draft ended with exit status 7"):
        await StopSignals().cancel(work())
    await interrupting
    assert not sockets_in(tmp_path)


async def test_a_cancellation_of_the_stop_comes_after_its_end(fake_service: MakeCommand, tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def work() -> None:
        command = fake_service("verify", "--deaf", "1", "--journal", str(journal))
        async with serving(command, drain_timeout_s=60.0):
            pass

    working = asyncio.ensure_future(work())
    await until(journal.exists)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not sockets_in(tmp_path)


async def test_hurry_ends_the_drain(fake_service: MakeCommand) -> None:
    hurry = asyncio.Event()
    async with supervisor_of(drain_timeout_s=60.0, hurry=hurry) as supervisor:
        supervisor.start(fake_service("slow", "--deaf", "1"))
        supervisor.start(fake_service("front", "--deaf", "1"))
        await supervisor.wait_ready()
        asyncio.get_running_loop().call_later(0.1, hurry.set)
        start = time.monotonic()
    assert time.monotonic() - start < 20


async def test_a_service_has_its_own_environment(fake_service: MakeCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    # Options have their values on the command line: a variable would change those that have their default there.
    monkeypatch.setenv("SLIPSTREAM_SLOTS", "3")
    async with serving(replace(fake_service("verify"), environment={"SLIPSTREAM_TEST": "inside"})) as supervisor:
        environment = psutil.Process(supervisor.service("verify").process.pid).environ()
    assert environment["SLIPSTREAM_TEST"] == "inside"
    assert "SLIPSTREAM_SLOTS" not in environment
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
        async with serving(fake_service("verify")):
            pass
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
                print(supervisor.service("verify").process.pid, flush=True)
                await supervisor.watch()

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        service = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        block_until(lambda: not runs(service))
