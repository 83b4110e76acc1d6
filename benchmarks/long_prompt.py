"""The effect of a long prompt on others' tokens: a running stream while a prompt of 4,000 tokens comes in.

    python benchmarks/long_prompt.py --json benchmarks/results/long_prompt_cpu.json \
        --picture benchmarks/results/long_prompt_cpu.png

A prompt is taken in by chunks, in steps that take turns with decoding. For each size of the chunks a stream runs
alone for a while, then together with the long prompt until that has its first token; the last size takes the whole
prompt at once. The bundled models were trained for 1,024 tokens: copies with a larger `max_position_embeddings` take
as long for a step as any model of their sizes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from array import array
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.load_report import Percentiles
from slipstream.benchmarks.models import (
    EAGLE3,
    NONE,
    STANDALONE,
    DeviceOption,
    Eagle3Option,
    JsonOption,
    Models,
    StandaloneOption,
    TargetOption,
    draft_of,
)
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

TEMPERATURE = 0.8
STREAM_PROMPT = list(range(100, 132))
WARM_TOKENS = 32
TIMEOUT_S = 60.0


# Without slots, so that the command line can read the defaults from the class.
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement."""

    algorithm: str = STANDALONE
    prompt_tokens: int = 4000
    chunk_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 4096)
    repeats: int = 2
    quiet_s: float = 1.5
    """The time in which the stream runs alone, in each repeat."""
    stream_tokens: int = 3000
    """The length of the stream, which is left before its end."""
    slots: int = 4
    context_tokens: int = 8192
    seed: int = 1


@dataclass(slots=True)
class Gaps:
    """For each message of the stream: seconds since the one before, and tokens."""

    gaps: list[tuple[float, int]] = field(default_factory=list)

    def inter_token_ms(self) -> Percentiles:
        """Between tokens; those of one message share the time since the one before."""
        return Percentiles.of_seconds(gap / count for gap, count in self.gaps for _ in range(count))

    def message_gap_ms(self) -> Percentiles:
        """Between messages."""
        return Percentiles.of_seconds(gap for gap, _ in self.gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """The result for one size of the chunks."""

    chunk_tokens: int
    quiet_inter_token_ms: Percentiles
    inter_token_ms: Percentiles
    """While the long prompt comes in; so below."""
    quiet_message_gap_ms: Percentiles
    message_gap_ms: Percentiles
    gap_ratio_p50: float
    """With the long prompt over without, of the gaps between messages."""
    gap_ratio_p99: float
    inter_token_ratio_p50: float
    inter_token_ratio_p99: float
    first_token_s: list[float]
    """Of the long prompt, beside the stream, in each repeat."""
    first_token_alone_s: float
    """Of the long prompt when nothing else runs."""
    messages: list[tuple[float, int]]
    """Of the first repeat's stream: seconds since the long prompt was sent, and tokens."""


class Reader:
    """Follows one stream and notes the arrival of its messages."""

    def __init__(self) -> None:
        self.times_s = array("d")
        """The arrival of each message with tokens, in seconds of `time.monotonic`."""
        self.counts = array("I")
        """The number of tokens in it."""
        self._is_warm = asyncio.Event()
        self._came = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def reading(
        cls, client: AsyncClient, prompt: list[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> AsyncIterator[Reader]:
        """Reads for as long as the context, which begins when tokens flow. Raises if the stream ends before."""
        reader = cls()
        task = asyncio.create_task(reader._read(client, prompt, max_new_tokens, temperature, seed))
        warm = asyncio.create_task(reader._is_warm.wait())
        try:
            await asyncio.wait((task, warm), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not reader._is_warm.is_set():
                raise RuntimeError("the stream did not begin")
            yield reader
            if task.done():
                task.result()
                raise RuntimeError("the stream ended before the measurement did")
        finally:
            for each in (task, warm):
                each.cancel()
            await asyncio.gather(task, warm, return_exceptions=True)

    def gaps_within(self, start_s: float, end_s: float) -> Iterator[tuple[float, int]]:
        """For each message that came in this time, like the one before: seconds since that one, and its tokens."""
        return ((at - before, count) for before, at, count in self._messages() if start_s <= before and at < end_s)

    def gaps_across(self, start_s: float, end_s: float) -> Iterator[tuple[float, int]]:
        """For each message that was awaited in a part of this time: seconds since the one before, and its tokens."""
        return ((at - before, count) for before, at, count in self._messages() if start_s <= at and before < end_s)

    async def next_message(self) -> None:
        """Returns when another message has come. Raises TimeoutError."""
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), TIMEOUT_S)

    def _messages(self) -> Iterator[tuple[float, float, int]]:
        return zip(self.times_s, self.times_s[1:], self.counts[1:], strict=False)

    async def _read(
        self, client: AsyncClient, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
    ) -> None:
        chunks = client.generate(
            prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True
        )
        num_tokens = 0
        async for chunk in chunks:
            self.times_s.append(time.monotonic())
            self.counts.append(len(chunk.token_ids))
            self._came.set()
            num_tokens += len(chunk.token_ids)
            if num_tokens >= WARM_TOKENS:
                self._is_warm.set()


async def measure(models: Models, plan: Plan, device: str) -> list[ChunkSize]:
    """Starts the workers once, and a scheduler for each size of the chunks."""
    results = []
    with tempfile.TemporaryDirectory(prefix="slipstream-") as directory:
        async with Stack(LOG_DIR / "long_prompt", device=device) as stack:
            await stack.models(models.with_context(plan.context_tokens, Path(directory)))
            for chunk_tokens in plan.chunk_sizes:
                scheduler = stack.scheduler(
                    draft_of(plan.algorithm),
                    chunk_tokens=chunk_tokens,
                    slots=plan.slots,
                    context_tokens=plan.context_tokens,
                )
                async with scheduler as served, AsyncClient(served.address) as client:
                    results.append(await _measure(client, plan, chunk_tokens))
                print(line(results[-1]), flush=True)
    return results


async def _measure(client: AsyncClient, plan: Plan, chunk_tokens: int) -> ChunkSize:
    info = await client.server_info()
    prompt = [100 + number * 7919 % (info.vocab_size - 100) for number in range(plan.prompt_tokens)]
    alone_s = await _first_token_s(client, prompt)
    quiet, together = Gaps(), Gaps()
    first_token_s: list[float] = []
    messages: list[tuple[float, int]] = []
    for repeat in range(plan.repeats):
        stream = Reader.reading(
            client,
            STREAM_PROMPT,
            max_new_tokens=plan.stream_tokens,
            temperature=TEMPERATURE,
            seed=plan.seed + repeat,
        )
        async with stream as reader:
            started = time.monotonic()
            await asyncio.sleep(plan.quiet_s)
            sent = time.monotonic()
            first_token_s.append(await _first_token_s(client, prompt))
            ended = time.monotonic()
            # The prompt also held up the message that was awaited when its first token came.
            await reader.next_message()
            quiet.gaps += reader.gaps_within(started, sent)
            together.gaps += reader.gaps_across(sent, ended)
            if not messages:
                times = zip(reader.times_s, reader.counts, strict=True)
                messages = [(round(at - sent, 4), count) for at, count in times]
    return _result(chunk_tokens, quiet, together, first_token_s, alone_s, messages)


async def _first_token_s(client: AsyncClient, prompt: list[int]) -> float:
    sent = time.monotonic()
    async for _ in client.generate(prompt, max_new_tokens=1, ignore_eos=True):
        pass
    return time.monotonic() - sent


def _result(
    chunk_tokens: int,
    quiet: Gaps,
    together: Gaps,
    first_token_s: list[float],
    alone_s: float,
    messages: list[tuple[float, int]],
) -> ChunkSize:
    gaps = quiet.message_gap_ms(), together.message_gap_ms()
    tokens = quiet.inter_token_ms(), together.inter_token_ms()
    return ChunkSize(
        chunk_tokens=chunk_tokens,
        quiet_inter_token_ms=tokens[0],
        inter_token_ms=tokens[1],
        quiet_message_gap_ms=gaps[0],
        message_gap_ms=gaps[1],
        gap_ratio_p50=_ratio(gaps, "p50"),
        gap_ratio_p99=_ratio(gaps, "p99"),
        inter_token_ratio_p50=_ratio(tokens, "p50"),
        inter_token_ratio_p99=_ratio(tokens, "p99"),
        first_token_s=first_token_s,
        first_token_alone_s=alone_s,
        messages=messages,
    )


def _ratio(pair: tuple[Percentiles, Percentiles], percentile: str) -> float:
    quiet, together = (float(getattr(each, percentile)) for each in pair)
    return round(together / quiet, 3)


def line(result: ChunkSize) -> str:
    """A line for one size of the chunks."""
    quiet, together = result.quiet_message_gap_ms, result.message_gap_ms
    seconds = " and ".join(f"{each:.2f}" for each in result.first_token_s)
    return (
        f"chunks of {result.chunk_tokens:>4}: between messages {quiet.p50:.1f} / {quiet.p99:.1f} ms alone (p50 / p99), "
        f"{together.p50:.1f} / {together.p99:.1f} ms with the long prompt, ratio {result.gap_ratio_p50:.2f} / "
        f"{result.gap_ratio_p99:.2f}; between tokens {result.quiet_inter_token_ms.p50:.2f} and "
        f"{result.inter_token_ms.p50:.2f} ms (p50); its first token after {seconds} s, "
        f"{result.first_token_alone_s:.2f} s when nothing else runs"
    )


def main(
    device: DeviceOption = "cpu",
    target: TargetOption = None,
    standalone: StandaloneOption = None,
    eagle3: Eagle3Option = None,
    algorithm: Annotated[str, typer.Option(help=f"{NONE}, {STANDALONE} or {EAGLE3}.")] = Plan.algorithm,
    prompt_tokens: Annotated[int, typer.Option(help="Of the long prompt.")] = Plan.prompt_tokens,
    chunk_sizes: Annotated[str, typer.Option(help="Prompt tokens in a prefill step.")] = "32,64,128,256,512,4096",
    context_tokens: Annotated[int, typer.Option(help="Prompt and output together.")] = Plan.context_tokens,
    repeats: Annotated[int, typer.Option(help="Long prompts for each size.")] = Plan.repeats,
    seed: Annotated[int, typer.Option(help="Of what is sampled.")] = Plan.seed,
    json_file: JsonOption = None,
    picture: Annotated[Path | None, typer.Option(help="The file for a picture of it.")] = None,
) -> None:
    """Measures the effect of a long prompt on a running stream."""
    plan = Plan(
        algorithm=algorithm,
        prompt_tokens=prompt_tokens,
        chunk_sizes=tuple(map(int, chunk_sizes.split(","))),
        context_tokens=context_tokens,
        repeats=repeats,
        seed=seed,
    )
    models = Models.choose(target=target, standalone=standalone, eagle3=eagle3)
    print(f"{host(device)}; {device}; {models.target.name}, {algorithm}; T = {TEMPERATURE}, seed {seed}")
    results = asyncio.run(measure(models.with_drafts(algorithm), plan, device))
    written: dict[str, Any] = {
        "host": host(device),
        "device": device,
        "model": models.target.name,
        "temperature": TEMPERATURE,
        "plan": asdict(plan),
        "results": [asdict(result) for result in results],
    }
    write_json(written, json_file)
    if picture is not None:
        from slipstream.benchmarks.charts import draw_long_prompt

        draw_long_prompt(written, picture)


if __name__ == "__main__":
    typer.run(main)
