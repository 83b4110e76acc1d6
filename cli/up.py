"""`slipstream up`: the four services on this machine, until they are stopped or one dies too often."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from contextlib import ExitStack, asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING

from slipstream.cli.cancellation import StopSignals, background
from slipstream.cli.display import LogFollower, StateLines, nonfailing_console
from slipstream.cli.draft_swaps import DraftSwaps, control_server
from slipstream.cli.models import check_device, check_models
from slipstream.cli.mps import mps_daemon
from slipstream.cli.state_dir import hold_state_dir
from slipstream.cli.status import fetch_status
from slipstream.cli.supervisor import Supervisor
from slipstream.cli.up_config import (
    dialled,
    door_commands,
    free_address,
    gateway_commands,
    grammar_commands,
    held_address,
    placed,
    scheduler_command,
    server_address,
    worker_command,
)
from slipstream.gateway.keys import KeyFile
from slipstream.services.worker.config import DUMMY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from rich.console import Console

    from slipstream.cli.process import ServiceCommand
    from slipstream.cli.service import ServiceState
    from slipstream.cli.status import ServerStatus
    from slipstream.cli.up_config import UpConfig
    from slipstream.common.wire.server import ServerState

_DRAFT_TIMEOUT_S = 5.0
"""Longest wait, after the start, until a draft takes part."""
_PROGRESS_S = 5.0
"""Seconds between two lines that say that a service is still loading."""
_DRAFT_POLL_S = 0.1


async def run_up(config: UpConfig, *, is_verbose: bool) -> int:
    """Serves until a signal ends it, and gives the exit status.

    Raises SlipstreamError when an address or the state directory is taken, when the file of keys is wrong, and when a
    service dies before it was ever ready, or too often.
    """
    if config.api_keys is not None:
        KeyFile(config.api_keys)  # the gateway would find it wrong, too, but only beside workers that load their models
    console = nonfailing_console()
    hurry = asyncio.Event()
    signals = StopSignals(
        on_first=lambda: console.print("stopping: running requests may finish; once more to end them", highlight=False),
        on_second=hurry.set,
    )
    await signals.cancel(_serve(config, console, hurry, is_verbose=is_verbose))
    return signals.exit_status


@asynccontextmanager
async def supervising(
    config: UpConfig, on_change: Callable[[str, ServiceState], None], hurry: asyncio.Event
) -> AsyncIterator[Supervisor]:
    """Yields a supervisor, with an MPS daemon if possible; both end with the context. See `Supervisor`."""
    async with (
        mps_daemon(config.mps_mode, config.mps_dir) as mps,
        Supervisor(
            ready_timeout_s=config.ready_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
            restarts=config,
            on_change=on_change,
            place=lambda command: placed(command, config.mps_dir, mps),
            before_kill=None if mps is None else mps.release,
            hurry=hurry,
        ) as supervisor,
    ):
        yield supervisor


async def _serve(config: UpConfig, console: Console, hurry: asyncio.Event, *, is_verbose: bool) -> None:
    follower = LogFollower(sys.stderr.buffer)

    def follow(log_path: Path) -> None:
        if is_verbose:
            follower.start([log_path])

    with ExitStack() as held:
        announce = held.enter_context(hold_state_dir(config.state_dir))
        listen = held.enter_context(held_address(config.listen, config.gateways, field="listen"))
        server = server_address(config, listen)
        workers, *others = _commands(config, listen)
        doors: list[ServiceCommand] = []
        if config.openai_address is not None:
            address = held_address(config.openai_address, config.openai_workers, field="openai_listen")
            openai = held.enter_context(address)
            doors = door_commands(config, openai)
        await _check(config)
        lines = StateLines(console)
        async with (
            follower,
            supervising(config, lines.on_change, hurry) as supervisor,
            control_server(config.state_dir, supervisor, DraftSwaps(config, supervisor, follow, _check)),
        ):
            # The doors end beside the gateways, whose last requests arrived through them.
            *before, gateways = [workers, *others]
            batches = [*before, [*gateways, *doors]]
            for batch in batches:
                supervisor.start(*batch)
            for command in chain(*batches):
                follow(command.log_path)
            async with background(_say_progress(lines, supervisor)):
                await supervisor.wait_ready()
                status = await supervisor.while_alive(_with_draft(server, supervisor))
            supervisor.end_start()
            if reason := _why_without_draft(status.state):
                console.print(f"draft: requests are served without it until it takes part: {reason}", markup=False)
            status.print()
            if doors:
                scheme = "https" if config.has_tls else "http"
                print(f"OpenAI's interface: {scheme}://{dialled(openai)}/v1", flush=True)
            announce(server)
            _notify_ready()
            await supervisor.watch()


def _notify_ready() -> None:
    """Tells a systemd that started this process, as a unit of `Type=notify`, that the server serves."""
    if name := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(b"READY=1", f"\0{name[1:]}" if name.startswith("@") else name)


async def _say_progress(lines: StateLines, supervisor: Supervisor) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        lines.say_progress(lambda name: supervisor.service(name).process.last_log_lines(1, if_none="").strip())


async def _with_draft(server: str, supervisor: Supervisor) -> ServerStatus:
    """Returns the status once a draft takes part, has ended, or takes too long."""
    end = time.monotonic() + _DRAFT_TIMEOUT_S
    while True:
        status = await fetch_status(server)
        has_failed = any(one.command.is_optional and one.last_end for one in supervisor.services())
        if status.state.draft_state in ("", "attached", "resting") or has_failed or time.monotonic() > end:
            return status
        await asyncio.sleep(_DRAFT_POLL_S)


async def _check(config: UpConfig) -> None:
    """Raises ConfigError or CheckpointError for what no service could serve."""
    check_device(config.device)
    await asyncio.to_thread(
        check_models,
        config.models,
        needs_weights=config.load_format != DUMMY,
        tensor_parallel_size=config.tensor_parallel_size,
        context_tokens=config.context_tokens,
    )


def _why_without_draft(state: ServerState) -> str:
    """Returns why an expected draft does not take part; empty if it does, or none is expected."""
    is_without = state.draft_state in ("missing", "catching up")
    return (state.draft_problem or "it is still loading") if is_without else ""


def _commands(config: UpConfig, listen: str) -> list[list[ServiceCommand]]:
    """Returns workers, scheduler, and gateways for clients at `listen`, after a check that their addresses are free."""
    config.check_metrics_ports()
    workers = [*(worker_command(config, name) for name in config.workers), *grammar_commands(config)]
    scheduler = [scheduler_command(config)]
    gateways = gateway_commands(config, listen)
    for command in (*workers, *scheduler, *(gateways if len(gateways) > 1 else ())):
        free_address(command.address, field="state_dir")
    return [workers, scheduler, gateways]
