"""How the supervisor stops services: in order, within bounds, and whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from slipstream.cli.cancellation import StopSignals
from slipstream.cli.service import ServiceState
from slipstream.common.errors import UnavailableError
from tests.harness.supervised import Kills, sockets_in, supervisor_of
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.supervised import MakeCommand

pytestmark = pytest.mark.timeout(30)


async def test_stops_the_last_started_first(fake_service: MakeCommand, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options = ("--journal", str(journal))
    async with supervisor_of() as supervisor:
        supervisor.start(fake_service("verify", *options), fake_service("draft", *options))
        supervisor.start(fake_service("scheduler", *options))
        await supervisor.wait_ready()
        await supervisor.stop("draft")
        assert journal.read_text().split("/")[-1] == "draft.sock SIGTERM\n"
    names = [line.split("/")[-1] for line in journal.read_text().splitlines()]
    assert names == [f"{name}.sock SIGTERM" for name in ("draft", "scheduler", "verify")]


async def test_a_service_that_does_not_drain_is_ended_after_the_bound(fake_service: MakeCommand) -> None:
    async with supervisor_of(drain_timeout_s=0.2) as supervisor:
        supervisor.start(fake_service("deaf", "--deaf", "99"), fake_service("once", "--deaf", "1"))
        await supervisor.wait_ready()
        start = time.monotonic()
    assert time.monotonic() - start < 20


async def test_a_service_that_is_stopped_is_killed_and_its_socket_removed(
    fake_service: MakeCommand, tmp_path: Path
) -> None:
    async with supervisor_of(drain_timeout_s=0.2) as supervisor:
        supervisor.start(fake_service("verify"))
        await supervisor.wait_ready()
        os.kill(supervisor.pid("verify"), signal.SIGSTOP)
    assert not sockets_in(tmp_path)


async def test_what_comes_before_a_kill_is_waited_for(fake_service: MakeCommand) -> None:
    kills = Kills()
    async with supervisor_of(drain_timeout_s=0.2, before_kill=kills) as supervisor:
        supervisor.start(fake_service("polite"), fake_service("deaf", "--deaf", "99"))
        await supervisor.wait_ready()
        deaf = supervisor.pid("deaf")
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
            os.kill(supervisor.pid("draft"), signal.SIGUSR1)
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
        async with supervisor_of(drain_timeout_s=60.0) as supervisor:
            supervisor.start(fake_service("verify", "--deaf", "1", "--journal", str(journal)))
            await supervisor.wait_ready()

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
