"""The effect of a long prompt on others' tokens: a running stream while a prompt of 4,000 tokens comes in.

A prompt is taken in by chunks, in steps that decode beside. For each size of these steps, that which verify measures
first, a stream runs alone for a while, then together with the long prompt until that has its first token; the last size
takes the whole prompt at once. The bundled models were trained for 1,024 tokens: copies with a larger
`max_position_embeddings` take as long for a step as any model of their sizes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import typer

from slipstream.benchmarks.load_report import Percentiles
from slipstream.benchmarks.models import STANDALONE, JsonOption, Models, with_context
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.cancellation import background
from slipstream.client import AsyncClient

STEP_TOKENS: tuple[int | str, ...] = ("auto", 32, 64, 128, 256, 512, 4096)
"""Tokens of a step: `--max-batched-tokens`."""
REPEATS = 2
"""Long prompts for each size."""
SEED = 1
PROMPT_TOKENS = 4000
STREAM_PROMPT = list(range(100, 132))
STREAM_TOKENS = 3000
"""The length of the stream, which is left before its end."""
CONTEXT_TOKENS = 8192
TEMPERATURE = 0.8
QUIET_S = 1.5
"""The time in which the stream runs alone, in each repeat."""
WARM_TOKENS = 32
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The result for one size of the steps."""

    max_batched_tokens: int | str
    quiet_message_gap_ms: Percentiles
    """Between messages of the stream when it runs alone."""
    message_gap_ms: Percentiles
    """The same while the long prompt comes in."""
    first_token_s: list[float]
    """Time to the first token of the long prompt beside the stream, in each repeat."""
    first_token_alone_s: float
    """Time to the first token of the long prompt when nothing else runs."""
    messages: list[tuple[float, int]]
    """Messages of the first repeat's stream: seconds since the long prompt was sent, and number of tokens."""


class Reader:
    """Follows one stream and notes the arrival of its messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[float, int]] = []
        """The arrival of each message, in seconds of `time.monotonic`, and its tokens."""
        self._came = asyncio.Event()

    async def read(self, client: AsyncClient, seed: int) -> None:
        """Reads the stream to its end."""
        chunks = client.generate(
            STREAM_PROMPT, max_new_tokens=STREAM_TOKENS, temperature=TEMPERATURE, seed=seed, ignore_eos=True
        )
        async for chunk in chunks:
            self.messages.append((time.monotonic(), len(chunk.token_ids)))
            self._came.set()

    async def next_message(self) -> None:
        """Returns when another message has come. Raises TimeoutError."""
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), TIMEOUT_S)

    async def warm_up(self) -> None:
        """Returns when WARM_TOKENS have come. Raises TimeoutError."""
        while sum(count for _, count in self.messages) < WARM_TOKENS:
            await self.next_message()


async def _measure_all() -> list[StepSize]:
    """Starts the workers once, and a scheduler for each size of the steps."""
    results = []
    with tempfile.TemporaryDirectory(prefix="slipstream-") as directory:
        target, draft = (
            with_context(path, CONTEXT_TOKENS, Path(directory)) for path in (target_dir(), standalone_dir())
        )
        async with Stack(LOG_DIR / "long_prompt") as stack:
            await stack.models(Models(target=target, drafts={STANDALONE: draft}))
            for step_tokens in STEP_TOKENS:
                scheduler = stack.scheduler(
                    STANDALONE,
                    max_batched_tokens=step_tokens,
                    slots=4,
                    context_tokens=CONTEXT_TOKENS,
                    no_prefix_cache=True,  # the same prompt comes each time
                )
                async with scheduler as served, AsyncClient(served.address) as client:
                    results.append(await _measure(client, step_tokens, range(SEED, SEED + REPEATS)))
                gaps = results[-1].quiet_message_gap_ms.p50, results[-1].message_gap_ms.p50
                print(f"{step_tokens} tokens a step: {gaps[0]:.1f} ms between messages, then {gaps[1]:.1f}", flush=True)
    return results


async def _measure(client: AsyncClient, step_tokens: int | str, seeds: range) -> StepSize:
    info = await client.server_info()
    prompt = [100 + number * 7919 % (info.vocab_size - 100) for number in range(PROMPT_TOKENS)]
    alone_s = await _first_token_s(client, prompt)
    quiet_s: list[float] = []
    together_s: list[float] = []
    first_token_s: list[float] = []
    messages: list[tuple[float, int]] = []
    for seed in seeds:
        reader = Reader()
        async with background(reader.read(client, seed)) as (reading,):
            await reader.warm_up()
            started = time.monotonic()
            await asyncio.sleep(QUIET_S)
            sent = time.monotonic()
            first_token_s.append(await _first_token_s(client, prompt))
            ended = time.monotonic()
            # The prompt also held up the message that was awaited when its first token came.
            await reader.next_message()
            if reading.done():
                raise RuntimeError("the stream ended before the measurement did")
        pairs = list(pairwise(at for at, _ in reader.messages))
        quiet_s += [at - before for before, at in pairs if started <= before and at < sent]
        together_s += [at - before for before, at in pairs if sent <= at and before < ended]
        messages = messages or [(round(at - sent, 4), count) for at, count in reader.messages]
    return StepSize(
        max_batched_tokens=step_tokens,
        quiet_message_gap_ms=Percentiles.of_seconds(quiet_s),
        message_gap_ms=Percentiles.of_seconds(together_s),
        first_token_s=first_token_s,
        first_token_alone_s=alone_s,
        messages=messages,
    )


async def _first_token_s(client: AsyncClient, prompt: list[int]) -> float:
    sent = time.monotonic()
    async for _ in client.generate(prompt, max_new_tokens=1, ignore_eos=True):
        pass
    return time.monotonic() - sent


def main(
    json_file: JsonOption = None,
) -> None:
    """Measures the effect of a long prompt on a running stream."""
    results = asyncio.run(_measure_all())
    written = {
        "host": host(),
        "temperature": TEMPERATURE,
        "plan": {"prompt_tokens": PROMPT_TOKENS, "repeats": REPEATS, "quiet_s": QUIET_S, "seed": SEED},
        "results": [asdict(result) for result in results],
    }
    write_json(written, json_file)


if __name__ == "__main__":
    typer.run(main)
