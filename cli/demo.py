"""`slipstream demo`: the bundled models with drafting and without, watched live and compared."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream import bundled
from slipstream.cli.cancellation import StopSignals
from slipstream.cli.demo_screen import DemoScreen, legend
from slipstream.cli.model_choice import ModelChoice
from slipstream.cli.status import fetch_status
from slipstream.cli.step_times import StepTimes
from slipstream.cli.up.commands import free_address, scheduler_command, worker_command
from slipstream.cli.up.config import UpConfig
from slipstream.cli.up.display import LoadingDisplay
from slipstream.cli.up.run import supervising
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slipstream.cli.up.supervisor import Supervisor
    from slipstream.common.api.output_chunk import Usage

PROMPT_STRIDE = 16
"""Takes one of so many of the bundled prompts, which makes four."""
MAX_NEW_TOKENS = 192
TEMPERATURE = 0.8
SEED = 1
"""Seed of the first prompt; the others count on from it."""
DTYPE = "float32"
"""In float32 drafting changes no token, on a GPU either; in bfloat16 a near tie may fall the other way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """All prompts at once, through one scheduler."""

    title: str
    token_ids: tuple[tuple[int, ...], ...]
    """Token ids of each prompt's output."""
    seconds: float
    """From the first request to the last token."""
    usages: tuple[Usage, ...]
    times: StepTimes

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all outputs per second."""
        return self.num_tokens / self.seconds

    @property
    def mean_accept_length(self) -> float:
        """Tokens that a verify step brings a request: 1 + accepted / steps."""
        num_steps = sum(usage.num_verify_steps for usage in self.usages)
        return 1.0 + sum(usage.total_accepted_tokens for usage in self.usages) / num_steps if num_steps else 1.0


async def run_demo(algorithm: str, device: str) -> int:
    """Runs it in a state directory of its own, on free ports, under MPS where that is there; gives the exit status.

    That is 1 when drafting changed the tokens, and 130 when a signal ended it. Raises SlipstreamError when a service
    dies.
    """
    hurry = asyncio.Event()
    status = await StopSignals(on_second=hurry.set).cancel(_serve(algorithm, device, hurry))
    return 130 if status is None else status


async def _serve(algorithm: str, device: str, hurry: asyncio.Event) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        models = ModelChoice.choose(target=None, draft=None, algorithm=algorithm, num_draft_tokens=None)
        config = UpConfig(models=models, device=device, dtype=DTYPE, state_dir=Path(folder), listen="127.0.0.1:0")
        loading = LoadingDisplay(console, is_live=console.is_terminal)
        async with supervising(config, loading.on_change, hurry) as supervisor:
            return await _Demo(console, supervisor, loading).run(config)


class _Demo:
    def __init__(self, console: Console, supervisor: Supervisor, loading: LoadingDisplay) -> None:
        self._console = console
        self._supervisor = supervisor
        self._loading = loading
        self._prompts = bundled.prompts()[::PROMPT_STRIDE]

    async def run(self, config: UpConfig) -> int:
        self._supervisor.start(*(worker_command(config, name) for name in config.workers))
        drafted = await self._measure(config, f"drafting {config.models.num_draft_tokens} tokens a step")
        # The workers stay: verify decodes plainly for a scheduler that has no draft.
        await self._supervisor.stop("scheduler")
        plain = replace(config, models=replace(config.models, draft=None))
        undrafted = await self._measure(plain, "no drafting")
        return report(self._console, drafted, undrafted)

    async def _measure(self, config: UpConfig, title: str) -> DemoRun:
        scheduler = scheduler_command(config, free_address(config.listen, field="listen"))
        with self._loading:
            self._supervisor.start(scheduler)
            await self._supervisor.wait_ready()
        return await self._supervisor.while_alive(self._run_prompts(scheduler.address, title))

    async def _run_prompts(self, server: str, title: str) -> DemoRun:
        status = await fetch_status(server)
        metrics_port = status.service("scheduler").metrics_port
        order = f"{status.state.fence} fences" + (", MPS" if status.state.under_mps else "")
        self._console.rule(f"{title} ({order})")
        self._console.print(legend(self._console))
        async with AsyncClient(server) as client:
            before, start = await StepTimes.scrape(metrics_port), time.monotonic()
            with DemoScreen(self._console, self._prompts) as screen:
                outputs = await asyncio.gather(
                    *(self._generate(client, index, screen) for index in range(len(self._prompts)))
                )
            seconds = time.monotonic() - start
            times = await StepTimes.scrape(metrics_port) - before
        token_ids, usages = zip(*outputs, strict=True)
        return DemoRun(title=title, token_ids=token_ids, seconds=seconds, usages=usages, times=times)

    async def _generate(self, client: AsyncClient, index: int, screen: DemoScreen) -> tuple[tuple[int, ...], Usage]:
        token_ids: list[int] = []
        usage: Usage | None = None
        chunks = client.generate(
            self._prompts[index].text,
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=TEMPERATURE,
            seed=SEED + index,
            ignore_eos=True,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                token_ids += chunk.token_ids
                usage = chunk.usage
                screen.add(index, pieces(chunk.text, chunk.text_lengths, chunk.is_draft))
        assert usage is not None, "the last chunk has the usage"
        return tuple(token_ids), usage


def pieces(text: str, lengths: Sequence[int], is_draft: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """Yields the text that became certain with each token, and whether that token was drafted and accepted."""
    start = 0
    for length, is_accepted in zip(lengths, is_draft, strict=True):
        if length:
            yield text[start : start + length], is_accepted
        start += length


def report(console: Console, drafted: DemoRun, undrafted: DemoRun) -> int:
    """Prints both runs side by side; returns 1 if their tokens differ."""
    table = Table(title="The same prompts, seeds and target")
    runs = (drafted, undrafted)
    for heading in ("", *(run.title for run in runs)):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("tokens", *(f"{run.num_tokens}" for run in runs))
    table.add_row("tokens per second", *(f"{run.tokens_per_second:.1f}" for run in runs))
    table.add_row("mean accept length", *(f"{run.mean_accept_length:.2f}" for run in runs))
    table.add_row(
        "steps, mean time", *(f"{run.times.num_steps:.0f}, {1e3 * run.times.mean_step_s:.1f} ms" for run in runs)
    )
    table.add_row("bubble in all", *(f"{1e3 * run.times.bubble_s:.0f} ms" for run in runs))
    table.add_row("overlap efficiency", *(f"{run.times.overlap_efficiency:.3f}" for run in runs))
    console.print(table)
    ratio = drafted.tokens_per_second / undrafted.tokens_per_second
    console.print(f"Drafting is {ratio:.2f} times as fast as no drafting here.", highlight=False)
    difference = first_difference(drafted, undrafted)
    if difference is None:
        count = f"{drafted.num_tokens} tokens of {len(drafted.token_ids)} prompts"
        console.print(f"Token ids with and without drafting: the same, all {count}.", highlight=False)
        return 0
    prompt, token = difference
    text = f"Token ids with and without drafting DIFFER, first at token {token} of prompt {prompt + 1}."
    console.print(Text(text, style="bold red"))
    return 1


def first_difference(drafted: DemoRun, undrafted: DemoRun) -> tuple[int, int] | None:
    """Prompt and token index of the first token id that differs; None when all are the same."""
    for prompt, (ones, others) in enumerate(zip(drafted.token_ids, undrafted.token_ids, strict=True)):
        if ones != others:
            different = (index for index, pair in enumerate(zip(ones, others, strict=False)) if pair[0] != pair[1])
            return prompt, next(different, min(len(ones), len(others)))
    return None
