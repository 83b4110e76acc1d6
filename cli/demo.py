"""`slipstream demo`: the bundled models with drafting and without, watched live and compared."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slipstream import bundled
from slipstream.cli.cancellation import StopSignals
from slipstream.cli.display import StateLines
from slipstream.cli.draft_swaps import swap_at
from slipstream.cli.models import ModelOptions
from slipstream.cli.status import read_server
from slipstream.cli.up import supervising
from slipstream.cli.up_config import UpConfig, free_address, gateway_commands, scheduler_command, worker_command
from slipstream.client import AsyncClient
from slipstream.common.wire.server import DraftSwap, SwapTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from slipstream.bundled import Prompt
    from slipstream.cli.supervisor import Supervisor
    from slipstream.client.requests import RequestOptions

PROMPT_STRIDE = 16
"""Stride through the bundled prompts; this one takes four of them."""
TURNS = 5
"""Passes with drafting and without, in turns. The median counts: what else runs may slow down a pass of either."""
MAX_NEW_TOKENS = 96
TEMPERATURE = 0.8
SEED = 1
"""Seed of the first prompt; each later prompt has the next seed."""
DTYPE = "float32"
"""In float32 drafting changes no token, on a GPU either; in bfloat16 it may change a near tie."""
DRAFTING, NO_DRAFTING = "drafting as many tokens as pay", "no drafting"
ACCEPTED_STYLE, OWN_STYLE, PROMPT_STYLE = "bold green", "yellow", "dim"
_ROWS_KEPT_FREE = 3
_COLUMNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """Figures of one pass: all prompts at once, with drafting or without."""

    title: str
    token_ids: tuple[tuple[int, ...], ...]
    """Token ids of each prompt's output."""
    seconds: float
    """From the first request to the last token."""
    interval: dict[str, Any]
    """Times of its steps, and the accept length, as in `Reading.since`."""

    @property
    def num_steps(self) -> float:
        """Number of steps."""
        return float(self.interval["steps_per_s"] * self.interval["seconds"])

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all outputs per second."""
        return self.num_tokens / self.seconds


async def run_demo(algorithm: str, device: str) -> int:
    """Runs the demo in a temporary state directory, on free ports, under MPS if possible; returns the exit status.

    It is 1 if drafting changed the tokens, and 130 after a signal. Raises SlipstreamError when a service dies for good.
    """
    hurry = asyncio.Event()
    status = await StopSignals(on_second=hurry.set).cancel(_serve(algorithm, device, hurry))
    return 130 if status is None else status


async def _serve(algorithm: str, device: str, hurry: asyncio.Event) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        models = ModelOptions(algorithm=algorithm).choose()
        config = UpConfig(models=models, device=device, dtype=DTYPE, state_dir=Path(folder), listen="127.0.0.1:0")
        async with supervising(config, StateLines(console).on_change, hurry) as supervisor:
            return await _Demo(console, supervisor).run(config)


class _Demo:
    def __init__(self, console: Console, supervisor: Supervisor) -> None:
        self._console = console
        self._supervisor = supervisor
        self._prompts = bundled.prompts()[::PROMPT_STRIDE]

    async def run(self, config: UpConfig) -> int:
        # A scheduler that starts before its draft would serve without one for a while.
        workers = (replace(worker_command(config, name), is_optional=False) for name in config.workers)
        self._supervisor.start(*workers)
        await self._supervisor.wait_ready()
        (gateway,) = gateway_commands(config, free_address(config.listen, field="listen"))
        self._supervisor.start(scheduler_command(config))
        self._supervisor.start(gateway)
        await self._supervisor.wait_ready()
        return await self._supervisor.while_alive(self._compare(config, gateway.address))

    async def _compare(self, config: UpConfig, server: str) -> int:
        runs: dict[str, list[DemoRun]] = {DRAFTING: [], NO_DRAFTING: []}
        drafts = {DRAFTING: config.socket(config.draft_instance), NO_DRAFTING: ""}
        titles, now = [DRAFTING, NO_DRAFTING], DRAFTING
        for turn in range(TURNS):
            for title in titles:
                if title != now:
                    swap = DraftSwap(address=drafts[title], terms=SwapTerms(judge_steps=0))
                    await swap_at(config.socket("scheduler"), swap)
                    now = title
                runs[title].append(await self._run_prompts(server, title, is_shown=not turn))
            titles.reverse()  # as a machine may become slower or faster meanwhile
        return report(self._console, *runs.values())

    async def _run_prompts(self, server: str, title: str, *, is_shown: bool) -> DemoRun:
        before = await read_server(server)
        state = before.status.state
        order = f"{state.fence} fences" + (", MPS" if state.under_mps else "")
        console = self._console if is_shown else Console(quiet=True)
        console.rule(f"{title} ({order})")
        console.print(legend(console))
        async with AsyncClient(server) as client:
            start = time.monotonic()
            with DemoScreen(console, self._prompts) as screen:
                outputs = (self._generate(client, index, screen) for index in range(len(self._prompts)))
                token_ids = await asyncio.gather(*outputs)
            seconds = time.monotonic() - start
        interval = (await read_server(server)).since(before)
        assert interval is not None, "the demo's own services have metrics"
        run = DemoRun(title=title, token_ids=tuple(token_ids), seconds=seconds, interval=interval)
        if not is_shown:
            self._console.print(f"again, {title}: {run.tokens_per_second:.1f} tokens per second", highlight=False)
        return run

    async def _generate(self, client: AsyncClient, index: int, screen: DemoScreen) -> tuple[int, ...]:
        token_ids: list[int] = []
        options: RequestOptions = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE, "ignore_eos": True}
        chunks = client.generate(self._prompts[index].text, **(options | {"seed": SEED + index}))
        async with aclosing(chunks):
            async for chunk in chunks:
                token_ids += chunk.token_ids
                screen.add(index, pieces(chunk.text, chunk.text_lengths, chunk.is_draft))
        return tuple(token_ids)


class DemoScreen:
    """Shows the outputs of several prompts: the end of each in a box, or each finished line with marks."""

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        """Begins with the prompts, which the outputs continue."""
        self._console = console
        self._titles = [f"{prompt.source}:{prompt.line}" for prompt in prompts]
        self._texts = [Text().append(prompt.text, PROMPT_STYLE) for prompt in prompts]
        self._lines = [prompt.text.rpartition("\n")[2] for prompt in prompts]
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=12)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        for index, title in enumerate(self._titles):
            self._print(index, f"continues {title}")
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for index, line in enumerate(self._lines):
            self._print(index, line)

    def add(self, index: int, pieces: Iterable[tuple[str, bool]]) -> None:
        """Appends text to a prompt's output, each piece with whether it was drafted and accepted."""
        for text, is_accepted in pieces:
            self._texts[index].append(text, ACCEPTED_STYLE if is_accepted else OWN_STYLE)
            marked = "«" + text.replace("\n", "»\n«") + "»" if is_accepted else text
            *done, self._lines[index] = (self._lines[index] + marked).replace("»«", "").replace("«»", "").split("\n")
            for line in done:
                self._print(index, line)

    def _print(self, index: int, line: str) -> None:
        if line.strip() and not self._console.is_terminal:
            self._console.print(f"[{index + 1}] {line}", highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Table:
        rows = [range(len(self._texts))[first : first + _COLUMNS] for first in range(0, len(self._texts), _COLUMNS)]
        width, height = self._console.width // _COLUMNS, (self._console.height - _ROWS_KEPT_FREE) // len(rows)
        table = Table.grid(expand=True)
        for row in rows:
            table.add_row(*(self._box(index, width, max(3, height)) for index in row))
        return table

    def _box(self, index: int, width: int, height: int) -> Panel:
        lines = self._texts[index].wrap(self._console, width - 4, tab_size=4)
        shown = Text("\n").join(lines[-(height - 2) :])
        return Panel(shown, title=self._titles[index], title_align="left", width=width, height=height)


def legend(console: Console) -> Text:
    """Explains the marks or the colours that a console shows."""
    if not console.is_terminal:
        return Text("[number of the prompt] «drafted and accepted», the target's own")
    styles = {"the prompt": PROMPT_STYLE, "drafted and accepted": ACCEPTED_STYLE, "the target's own": OWN_STYLE}
    return Text("  ").join(Text(text, style) for text, style in styles.items())


def pieces(text: str, lengths: Sequence[int], is_draft: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """Yields the text that became certain with each token, and whether that token was drafted and accepted."""
    start = 0
    for length, is_accepted in zip(lengths, is_draft, strict=True):
        if length:
            yield text[start : start + length], is_accepted
        start += length


_FIGURES: dict[str, Callable[[DemoRun], str]] = {
    "tokens": lambda run: f"{run.num_tokens}",
    "tokens per second": lambda run: f"{run.tokens_per_second:.1f}",
    "mean accept length": lambda run: f"{run.interval['mean_accept_length'] or 1:.2f}",
    "steps, mean time": lambda run: f"{run.num_steps:.0f}, {1e3 * run.interval['step_s']:.1f} ms",
    "bubble in all": lambda run: f"{1e3 * run.num_steps * sum(run.interval['bubbles_s'].values()):.0f} ms",
    "overlap efficiency": lambda run: f"{run.interval['overlap_efficiency']:.3f}",
}


def report(console: Console, drafted: Sequence[DemoRun], undrafted: Sequence[DemoRun]) -> int:
    """Prints the median of both kinds of runs, made in turns, side by side; returns 1 if any of their tokens differ."""
    medians = [sorted(runs, key=lambda run: run.tokens_per_second)[len(runs) // 2] for runs in (drafted, undrafted)]
    table = Table("", title="The same prompts, seeds and target")
    for run in medians:
        table.add_column(run.title, justify="right")
    for name, figure in _FIGURES.items():
        table.add_row(name, *map(figure, medians))
    console.print(table)
    both = zip(drafted, undrafted, strict=True)
    ratios = [with_draft.tokens_per_second / without.tokens_per_second for with_draft, without in both]
    turns = f"{len(ratios)} turns: {min(ratios):.2f} to {max(ratios):.2f}"
    console.print(f"Drafting is {median(ratios):.2f} times as fast as no drafting here ({turns}).", highlight=False)
    first, *others = (*drafted, *undrafted)
    difference = next(filter(None, (first_difference(first, other) for other in others)), None)
    if difference is None:
        count = f"{first.num_tokens} tokens of {len(first.token_ids)} prompts"
        console.print(f"Token ids with and without drafting: the same, all {count}.", highlight=False)
        return 0
    prompt, token = difference
    text = f"Token ids with and without drafting DIFFER, first at token {token} of prompt {prompt + 1}."
    console.print(Text(text, style="bold red"))
    return 1


def first_difference(one: DemoRun, other: DemoRun) -> tuple[int, int] | None:
    """Returns prompt and token index of the first token id that differs. None: all are equal."""
    for prompt, both in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        for token, (left, right) in enumerate(zip_longest(*both)):
            if left != right:
                return prompt, token
    return None
