"""A supervisor of fake services, with bounds of a test's length, and what it was seen to do."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from slipstream.cli.process import ServiceCommand
from slipstream.cli.service import ServiceState
from slipstream.cli.supervisor import Supervisor

MakeCommand = Callable[..., ServiceCommand]
"""`fake_command` in a folder."""
_FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


def fake_command(folder: Path, name: str, *options: str) -> ServiceCommand:
    """A fake service at a socket in `folder`, named for it; options are those of `fake_service.py`."""
    address = f"unix:{folder}/{name}.sock"
    argv = (sys.executable, str(_FAKE_SERVICE), "--listen", address, *options)
    return ServiceCommand(name=name, argv=argv, address=address, log_path=folder / f"{name}.log")


def supervisor_of(**settings: Any) -> Supervisor:
    """A supervisor; `settings` replace some of its arguments."""
    return Supervisor(**{"ready_timeout_s": 60.0, "drain_timeout_s": 10.0, "exit_timeout_s": 0.5, **settings})


@asynccontextmanager
async def serving(*commands: ServiceCommand, **settings: Any) -> AsyncIterator[Supervisor]:
    """A supervisor whose services are started side by side, and ready; `settings` as of `supervisor_of`."""
    async with supervisor_of(**settings) as supervisor:
        supervisor.start(*commands)
        await supervisor.wait_ready()
        yield supervisor


class States(list[tuple[str, ServiceState]]):
    """The changes of services' states, in order: an `on_change` of the supervisor."""

    def __call__(self, name: str, state: ServiceState) -> None:
        """Appends a change."""
        self.append((name, state))

    def num(self, name: str, state: ServiceState = ServiceState.READY) -> int:
        """How often a service came to a state."""
        return self.count((name, state))


class Kills(list[tuple[int, bool]]):
    """The processes that the supervisor was about to kill, and whether they were there: its `before_kill`."""

    async def __call__(self, pid: int) -> None:
        """Appends a process."""
        self.append((pid, psutil.pid_exists(pid)))


def workers_of(fake_service: MakeCommand) -> list[ServiceCommand]:
    """Verify and draft, which are started again together."""
    return [replace(fake_service(name), restarts=True, group="workers") for name in ("verify", "draft")]


def sockets_in(folder: Path) -> list[Path]:
    """The Unix sockets that lie there."""
    return [path for path in folder.iterdir() if path.is_socket()]
