"""`slipstream demo`: the bundled models with drafting and without, watched live and compared."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slipstream import bundled
from slipstream.cli.cancellation import StopSignals
from slipstream.cli.demo_report import comparison, first_difference, speed_sentence
from slipstream.cli.demo_run import Workload, run_workload
from slipstream.cli.demo_screen import LineScreen, LiveScreen, legend
from slipstream.cli.loading import LoadingDisplay
from slipstream.cli.model_choice import ModelChoice
from slipstream.cli.server_status import fetch_status
from slipstream.cli.up.commands import free_address, placed, scheduler_command, worker_command
from slipstream.cli.up.config import UpConfig
from slipstream.cli.up.mps import mps_daemon
from slipstream.cli.up.supervisor import Supervisor
from slipstream.common.errors import ConfigError
from slipstream.services.worker.config import ALGORITHMS

if TYPE_CHECKING:
    from slipstream.cli.demo_report import DemoRun
    from slipstream.cli.up.mps import MpsDaemon
    from slipstream.cli.up.process import ServiceCommand

PROMPT_STRIDE = 16
"""Takes one of so many of the bundled prompts, which makes four."""
MAX_NEW_TOKENS = 256
TEMPERATURE = 0.8
SEED = 1
DTYPE = "float32"
"""In which drafting changes no token, on a GPU either; in bfloat16 a near tie may fall the other way."""


async def run_demo(algorithm: str, device: str) -> int:
    """Runs it in a state directory of its own, on free ports, under MPS where that is there; gives the exit status.

    That is 1 when drafting changed the tokens, and 130 when a signal ended it.
    Raises SlipstreamError when a service dies, and ConfigError for an algorithm that drafts nothing or a device that
    is none.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError("algorithm", algorithm, " or ".join(ALGORITHMS))
    hurry = asyncio.Event()
    status = await StopSignals(on_second=hurry.set).cancel(_served(algorithm, device, hurry))
    return 130 if status is None else status


async def _served(algorithm: str, device: str, hurry: asyncio.Event) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        models = ModelChoice.choose(target=None, draft=None, algorithm=algorithm, num_draft_tokens=None)
        config = UpConfig(models=models, device=device, dtype=DTYPE, state_dir=Path(folder), listen="127.0.0.1:0")
        loading = LoadingDisplay(console, is_live=console.is_terminal)
        async with mps_daemon(config.mps_mode, config.mps_dir) as mps:
            supervisor = Supervisor(
                ready_timeout_s=config.ready_timeout_s,
                drain_timeout_s=config.drain_timeout_s,
                on_change=loading.on_change,
                before_kill=None if mps is None else mps.let_go,
                hurry=hurry,
            )
            return await _Demo(console, supervisor, loading, mps).run(config)


class _Demo:
    def __init__(
        self, console: Console, supervisor: Supervisor, loading: LoadingDisplay, mps: MpsDaemon | None
    ) -> None:
        self._console = console
        self._supervisor = supervisor
        self._loading = loading
        self._mps = mps
        self._workload = Workload(
            prompts=bundled.prompts()[::PROMPT_STRIDE],
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=TEMPERATURE,
            seed=SEED,
        )

    async def run(self, config: UpConfig) -> int:
        plain = replace(config, models=replace(config.models, draft=None))
        async with self._supervisor:
            self._start(config, *(worker_command(config, name) for name in config.workers))
            drafted = await self._measure(config, f"drafting {config.models.num_draft_tokens} tokens a step")
            # The verify process stays, and decodes plainly for a scheduler that has no draft.
            await self._supervisor.stop("scheduler", "draft")
            undrafted = await self._measure(plain, "no drafting")
        return self._report(drafted, undrafted)

    async def _measure(self, config: UpConfig, title: str) -> DemoRun:
        scheduler = scheduler_command(config, free_address(config.listen, field="listen"))
        with self._loading:
            self._start(config, scheduler)
            await self._supervisor.wait_ready()
        return await self._supervisor.while_alive(self._run_workload(scheduler.address, title))

    def _start(self, config: UpConfig, *services: ServiceCommand) -> None:
        self._supervisor.start(*(placed(service, config.mps_dir, self._mps) for service in services))

    async def _run_workload(self, server: str, title: str) -> DemoRun:
        status = await fetch_status(server)
        metrics_port = status.service("scheduler").metrics_port
        order = f"{status.state.fence} fences" + (", MPS" if status.state.under_mps else "")
        self._console.rule(f"{title} ({order})")
        self._console.print(legend(self._console))
        prompts = self._workload.prompts
        show = LiveScreen if self._console.is_terminal else LineScreen
        return await run_workload(server, metrics_port, self._workload, show(self._console, prompts), title)

    def _report(self, drafted: DemoRun, undrafted: DemoRun) -> int:
        self._console.print(comparison(drafted, undrafted))
        self._console.print(speed_sentence(drafted, undrafted), highlight=False)
        difference = first_difference(drafted, undrafted)
        if difference is None:
            count = f"{drafted.num_tokens} tokens of {len(drafted.token_ids)} prompts"
            self._console.print(f"Token ids with and without drafting: the same, all {count}.", highlight=False)
            return 0
        prompt, token = difference
        text = f"Token ids with and without drafting DIFFER, first at token {token} of prompt {prompt + 1}."
        self._console.print(Text(text, style="bold red"))
        return 1
