"""The effect of a long prompt on others' tokens: a running stream while a prompt of 4,000 tokens is taken in."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from slipstream.benchmarks.models import STANDALONE, with_context
from slipstream.benchmarks.runner import Row, Scenario, Table, benchmark, host, run, write_json
from slipstream.benchmarks.stack import LOG_DIR, Served, Stack
from slipstream.benchmarks.streams import streaming
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.load_generator import percentiles
from slipstream.cli.load_requests import request
from slipstream.client import AsyncClient
from slipstream.common.settings import Settings

STEP_TOKENS: tuple[int | str, ...] = ("auto", 32, 64, 128, 256, 512, 4096)
"""Tokens of a step: `--max-batched-tokens`."""
STREAM_PROMPT = list(range(100, 132))
STREAM_TOKENS = 3000
"""The length of the stream, which is left before its end."""
CONTEXT_TOKENS = 8192
TEMPERATURE = 0.8
WARM_UP_TOKENS = 32
POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a measurement."""

    prompt_tokens: int = 4000
    repeats: int = 2
    """Long prompts for each size of the steps."""
    quiet_s: float = 1.5
    """The time in which the stream runs alone, in each repeat."""
    seed: int = 1


async def _sample(plan: Plan, served: Served, _: Scenario) -> AsyncIterator[Row]:
    quiet_s: list[float] = []
    together_s: list[float] = []
    first_token_s: list[float] = []
    messages: list[tuple[float, int]] = []
    async with AsyncClient(served.address) as client:
        vocab_size = (await client.server_info()).vocab_size
        prompt = [100 + number * 7919 % (vocab_size - 100) for number in range(plan.prompt_tokens)]
        alone_s = await _first_token_s(client, prompt)
        for seed in range(plan.seed, plan.seed + plan.repeats):
            stream = request(STREAM_PROMPT, STREAM_TOKENS, TEMPERATURE, seed)
            async with streaming(client, [stream], warm_up_tokens=WARM_UP_TOKENS) as streams:
                (arrivals,) = streams.arrivals
                started = time.monotonic()
                await asyncio.sleep(plan.quiet_s)
                sent = time.monotonic()
                first_token_s.append(await _first_token_s(client, prompt))
                ended = time.monotonic()
                # The prompt also held up the message that was awaited when its first token arrived.
                while arrivals[-1][0] < ended:
                    await asyncio.sleep(POLL_S)
                    streams.check_running()
            pairs = list(pairwise(at for at, _ in arrivals))
            quiet_s += [at - before for before, at in pairs if started <= before and at < sent]
            together_s += [at - before for before, at in pairs if sent <= at and before < ended]
            messages = messages or [(round(at - sent, 4), count) for at, count in arrivals]
    yield {
        # Between messages of the stream: when it runs alone, and while the long prompt is taken in.
        "quiet_message_gap_ms": percentiles(quiet_s),
        "message_gap_ms": percentiles(together_s),
        # Of the long prompt: beside the stream in each repeat, and when nothing else runs.
        "first_token_s": first_token_s,
        "first_token_alone_s": alone_s,
        # Of the first repeat's stream: seconds since the long prompt was sent, and number of tokens.
        "messages": messages,
    }


async def _first_token_s(client: AsyncClient, prompt: list[int]) -> float:
    sent = time.monotonic()
    async for _ in client.generate(prompt, max_new_tokens=1, ignore_eos=True):
        pass
    return time.monotonic() - sent


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures the effect of a long prompt on a running stream: starts a scheduler for each size of the steps."""
    # Without a prefix cache: the same prompt is sent each time.
    options = {"slots": 4, "context_tokens": CONTEXT_TOKENS, "no_prefix_cache": True}
    sizes = [{"max_batched_tokens": tokens} for tokens in STEP_TOKENS]
    scenarios = [Scenario(about=size, draft=STANDALONE, options={**size, **options}) for size in sizes]
    table = Table(None)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        target, draft = (with_context(path, CONTEXT_TOKENS, Path(folder)) for path in (target_dir(), standalone_dir()))
        async with Stack(LOG_DIR / "long_prompt") as stack:
            await stack.models(STANDALONE, target=target, drafts={STANDALONE: draft})
            await run(stack, scenarios, partial(_sample, plan), table)
    write_json({"host": host(), "temperature": TEMPERATURE, "plan": asdict(plan), "results": table.rows}, file)
