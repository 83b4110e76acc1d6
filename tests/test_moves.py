"""Two whole servers whose processes are killed at random moments, and streams that go on at whichever serves."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.client import AsyncClient, Client
from slipstream.common.wire.job import OutputChunk
from tests.harness.generation_server import text_of, tokens_of
from tests.harness.running import Running, free_ports, running_up
from tests.harness.waiting import block_until

NUM_KILLS = 30
NUM_SERVERS = 2
WHOLE = 0.25
"""Share of the kills that end all of a server's processes."""
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "class Queue:", "max_new_tokens": 200, "ignore_eos": True},
    {"prompt": "def parse(text):", "max_new_tokens": 160, "temperature": 0.9, "seed": 3, "n": 2, "ignore_eos": True},
    {"prompt": "import os\n", "max_new_tokens": 200, "temperature": 1.0, "top_p": 0.9, "seed": 4, "ignore_eos": True},
    {"prompt": "for i in range(", "max_new_tokens": 160, "frequency_penalty": 0.5, "ignore_eos": True},
)
NUM_STOPPED = 2
"""The last of them, which get a stop string that their outputs have late."""


def late_stop(text: str) -> str:
    """A part of a text that is not complete before four fifths of it."""
    parts = (text[start : start + 6] for start in range(len(text) * 4 // 5, len(text) - 6))
    return next(part for part in parts if text.index(part) >= len(text) * 4 // 5)


async def outputs_of(
    client: AsyncClient, requests: Sequence[dict[str, Any]], on_begun: Callable[[], None] = lambda: None
) -> list[Any]:
    """Tokens, text and end of each sample of all requests, which run together; calls back when all have begun."""
    num_begun = 0

    async def output_of(request: dict[str, Any]) -> list[tuple[list[int], str, Any]]:
        nonlocal num_begun
        chunks: list[OutputChunk] = []
        async for chunk in client.generate(**request):
            num_begun += not chunks
            if not chunks and num_begun == len(requests):
                on_begun()
            chunks.append(chunk)
        samples = [[one for one in chunks if one.sample_index == index] for index in range(request.get("n", 1))]
        return [
            (tokens_of(sample), text_of(sample), next(one.finish_reason for one in sample if one.finish_reason))
            for sample in samples
        ]

    return await asyncio.gather(*map(output_of, requests))


class Fleet:
    """Two servers, each at an address of its own, where it serves again after it was killed."""

    def __init__(self, directory: Path, held: ExitStack) -> None:
        port = free_ports(NUM_SERVERS)
        self.addresses = [f"127.0.0.1:{port + index}" for index in range(NUM_SERVERS)]
        self.killed: list[str] = []
        self._directory = directory
        self._held = held
        self._servers: list[Running] = [self._start(index) for index in range(NUM_SERVERS)]

    def kill(self, index: int, rng: random.Random) -> None:
        """Kills one process of a server, or all."""
        up = self._servers[index]
        services = [one for one in up.children() if any(word.startswith("slipstream.") for word in one.cmdline())]
        if rng.random() > WHOLE:
            victim = rng.choice(services)
            name = next(word for word in victim.cmdline() if word.startswith("slipstream."))
            victim.kill()
            self.killed.append(name)
            return
        up.signal(signal.SIGKILL)
        for one in services:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.killed.append("all")

    def serve_again(self, index: int) -> None:
        """Blocks until a server serves again; starts it if all of it was killed."""
        if self._servers[index].has_ended:
            (self._directory / str(index) / "server").unlink(missing_ok=True)
            self._servers[index] = self._start(index)
        with Client(self.addresses[index]) as client:
            block_until(lambda: client.is_serving(timeout_s=1.0))

    def _start(self, index: int) -> Running:
        options = ("--listen", self.addresses[index], "--metrics-port", "0", "--device", "cpu", "--threads", "1")
        limits = ("--max-restarts", "1000", "--max-lost-epochs", "1000")
        return self._held.enter_context(running_up(self._directory / str(index), *options, *limits))


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_streams_have_the_tokens_of_one_server_whatever_is_killed(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with ExitStack() as held:
        fleet = await asyncio.to_thread(Fleet, tmp_path, held)
        async with AsyncClient(fleet.addresses[0]) as client:
            plain = await outputs_of(client, REQUESTS)
            stops = [{}] * (len(REQUESTS) - NUM_STOPPED) + [
                {"stop": late_stop(one[0][1])} for one in plain[-NUM_STOPPED:]
            ]
            requests = [request | stop for request, stop in zip(REQUESTS, stops, strict=True)]
            expected = await outputs_of(client, requests)
        assert [one[0][2] for one in expected] == ["length", "length", "stop", "stop"]
        for number in range(NUM_KILLS):
            victim = number % NUM_SERVERS
            addresses = [fleet.addresses[victim], fleet.addresses[1 - victim]]
            async with AsyncClient(addresses) as client:
                kill = partial(fleet.kill, victim, rng)
                begun = partial(asyncio.get_running_loop().call_later, rng.random() * 0.5, kill)
                assert await outputs_of(client, requests, begun) == expected, f"seed {seed}, kills {fleet.killed}"
            await asyncio.to_thread(fleet.serve_again, victim)
        print(fleet.killed)
