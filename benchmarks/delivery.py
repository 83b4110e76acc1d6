"""From publish to client: how late tokens arrive, and the CPU time that scheduler and gateway take for them.

An 8B shape with random weights, an EAGLE-3 head, acceptance by chance (3.5 tokens a step, K = 4). Clients are processes
of their own on the same host; each message names the time when its newest token was on the server's host.

    python benchmarks/delivery.py --device cpu --shape bundled --batches 8 --gateways 1 --seconds 1

runs the bundled models on a CPU, as a test of the script: jobs of their context do not last for longer windows.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import random
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.decode import SEED, TEMPERATURE
from slipstream.benchmarks.models import ACCEPT_LENGTH, EAGLE3, NUM_DRAFT_TOKENS, DeviceOption, JsonOption, Setup
from slipstream.benchmarks.result_files import host, write_rows
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.stream_window import START_TIMEOUT_S, CpuClock, StepSums, with_draft
from slipstream.client import AsyncClient
from slipstream.common.host import STEP_LOOP
from slipstream.common.rpc.keepalive import Keepalive
from slipstream.common.rpc.scrape import scrape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import SpawnProcess
    from multiprocessing.queues import Queue

STREAMS_PER_CLIENT = 16
"""A client that has more of them would measure itself."""
PROMPT_TOKENS = 128
MAX_NEW_TOKENS = 1900
WARM_UP_TOKENS = 16

Receipts = list[tuple[int, int]]
"""For each message with tokens: when it was received, and when its newest token was published, in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A window in which a batch of requests streamed."""

    shape: str
    batch: int
    gateways: int
    journal: str
    """Mode of the gateway's journal."""
    num_steps: int
    step_ms: float
    messages_per_step: float
    """Messages that a stream gets for a step; 1 is a message with each."""
    publish_to_client_p50_ms: float
    publish_to_client_p99_ms: float
    cpu_ms: dict[str, float]
    """CPU time a step, by process, and of the thread that decides the steps."""
    host: str


async def _follow(address: str, seeds: list[int], max_new_tokens: int, results: Queue[Any], stop: Any) -> None:
    receipts: Receipts = []
    counts = dict.fromkeys(seeds, 0)
    is_warm = False

    async def stream(client: AsyncClient, seed: int) -> None:
        nonlocal is_warm
        rng = random.Random(seed)
        prompt = [rng.randrange(256, 4096) for _ in range(PROMPT_TOKENS)]
        chunks = client.generate(
            prompt, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True
        )
        async for chunk in chunks:
            if chunk.token_ids:
                receipts.append((time.monotonic_ns(), chunk.published_ns))
                counts[seed] += len(chunk.token_ids)
            if not is_warm and min(counts.values()) >= WARM_UP_TOKENS:
                is_warm = True
                results.put("warm")

    async with AsyncExitStack() as held:
        # Each stream has a connection of its own: gRPC shares one where the settings are the same.
        clients = [
            await held.enter_async_context(AsyncClient(address, keepalive=Keepalive(interval_ms=10_000 + seed)))
            for seed in seeds
        ]
        streams = [asyncio.create_task(stream(*one)) for one in zip(clients, seeds, strict=True)]
        stopped = asyncio.create_task(asyncio.to_thread(stop.wait))
        await asyncio.wait([stopped, *streams], return_when=asyncio.FIRST_COMPLETED)
        early = [repr(task.exception() or "its last token came") for task in streams if task.done()]
        for task in streams:
            task.cancel()
        results.put(RuntimeError(f"streams ended within the window: {early}") if early else receipts)
        await asyncio.gather(*streams, return_exceptions=True)
        stop.set()


def _client(address: str, seeds: list[int], max_new_tokens: int, results: Queue[Any], stop: Any) -> None:
    asyncio.run(_follow(address, seeds, max_new_tokens, results, stop))


class Clients:
    """Processes that stream requests until they are told to stop."""

    def __init__(self, address: str, batch: int, max_new_tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._results: Queue[Any] = context.Queue()
        self._stop = context.Event()
        seeds = range(SEED, SEED + batch)
        groups = [list(seeds[start : start + STREAMS_PER_CLIENT]) for start in range(0, batch, STREAMS_PER_CLIENT)]
        self._processes: list[SpawnProcess] = [
            context.Process(target=_client, args=(address, group, max_new_tokens, self._results, self._stop))
            for group in groups
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """The processes run for as long as the context; at its beginning all streams have tokens."""
        for process in self._processes:
            process.start()
        try:
            for _ in self._processes:
                self._next()
            yield
        finally:
            self._stop.set()
            for process in self._processes:
                process.join(START_TIMEOUT_S)

    def stop(self) -> Receipts:
        """Ends the streams and returns what all of them received."""
        self._stop.set()
        return [receipt for _ in self._processes for receipt in self._next()]

    def _next(self) -> Any:
        try:
            found = self._results.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"a client said nothing for {START_TIMEOUT_S:.0f} s") from None
        if isinstance(found, Exception):
            raise found
        return found


async def measure(
    stack: Stack, setup: Setup, device: str, batch: int, gateways: int, journal: str, seconds: float
) -> Measurement:
    """Streams a batch of requests and measures for `seconds` while all of them run."""
    scheduler: dict[str, Any] = {
        "slots": batch,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "context_tokens": PROMPT_TOKENS + MAX_NEW_TOKENS if device == "cuda" else setup.context_tokens,
        "queue": batch,
        "journal": journal,
        **({"gateways": gateways} if gateways > 1 else {}),
    }
    async with stack.scheduler("draft", **scheduler) as served:
        async with AsyncClient(served.address) as client:
            info = await with_draft(client)
        max_new_tokens = info.context_tokens - PROMPT_TOKENS
        clients = Clients(served.address, batch, max_new_tokens)
        cpu = CpuClock({f"{service.name}": service.pid for service in info.services})
        with clients.running():
            before, cpu_before, begun_ns = await scrape(served.metrics_port), cpu.read(), time.monotonic_ns()
            await asyncio.sleep(seconds)
            ended_ns, cpu_after, after = time.monotonic_ns(), cpu.read(), await scrape(served.metrics_port)
            receipts = clients.stop()
    sums = StepSums.of(after.since(before))
    late_ms = [1e-6 * (received - sent) for received, sent in receipts if begun_ns <= sent and received <= ended_ns]
    return Measurement(
        shape=setup.name,
        batch=batch,
        gateways=gateways,
        journal=journal,
        num_steps=sums.num_steps,
        step_ms=sums.mean_ms(sums.step_s),
        messages_per_step=len(late_ms) / sums.num_steps / batch,
        publish_to_client_p50_ms=median(late_ms),
        publish_to_client_p99_ms=quantiles(late_ms, n=100)[98],
        cpu_ms={name: sums.mean_ms(cpu_after[name] - cpu_before[name]) for name in cpu_before},
        host=host(device),
    )


def main(
    device: DeviceOption = "cuda",
    shape: Annotated[str, typer.Option(help="A shape, or bundled.")] = "llama-3.1-8b",
    batches: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "64,256",
    gateways: Annotated[str, typer.Option(help="For each of these batches, gateways on the port.")] = "1,8",
    journals: Annotated[str, typer.Option(help="Modes of the journal.")] = "off,process",
    seconds: Annotated[float, typer.Option(help="Length of a window.")] = 3.0,
    json_file: JsonOption = None,
) -> None:
    """Measures delivery."""
    setup = Setup.named(shape)
    measurements: list[Measurement] = []

    async def run() -> None:
        async with Stack(device=device) as stack:
            models: dict[str, Any] = {"load_format": setup.load_format}
            await asyncio.gather(
                stack.worker("verify", model=setup.target, simulate_accept_length=ACCEPT_LENGTH, **models),
                stack.worker("draft", model=setup.draft, target=setup.target, algorithm=EAGLE3, **models),
            )
            pairs = zip(map(int, batches.split(",")), map(int, gateways.split(",")), strict=True)
            for (batch, num_gateways), journal in product(pairs, journals.split(",")):
                measurements.append(await measure(stack, setup, device, batch, num_gateways, journal, seconds))
                write_rows(measurements, json_file)
                print(_line(measurements[-1]), flush=True)

    asyncio.run(run())


def _line(m: Measurement) -> str:
    cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in m.cpu_ms.items() if name in (STEP_LOOP, "scheduler", "gateway"))
    late = f"p50 {m.publish_to_client_p50_ms:.2f}, p99 {m.publish_to_client_p99_ms:.2f} ms"
    messages = f"{m.messages_per_step:.2f} messages a step and stream"
    return (
        f"{m.shape}, batch {m.batch}, {m.gateways} gateways, journal {m.journal}: step {m.step_ms:.2f} ms, "
        f"publish to client {late}, {messages}, CPU ms a step: {cpu}"
    )


if __name__ == "__main__":
    typer.run(main)
