"""The three services with a real Prometheus beside them, and clients that keep them busy."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.benchmarks.prometheus_server import running_prometheus
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import standalone_dir, target_dir
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping
    from pathlib import Path

    from slipstream.benchmarks.prometheus_server import Prometheus

SERVICES = ("scheduler", "draft", "verify")
PROMPTS = ("def main():\n", "class Queue:\n", "import os\n", "for line in lines:\n")


@dataclass(frozen=True, slots=True)
class Observed:
    """What runs."""

    address: str
    """Of the scheduler."""
    metrics_ports: Mapping[str, int]
    """By service."""
    prometheus: Prometheus


@asynccontextmanager
async def observed_stack(
    folder: Path,
    *,
    interval_ms: int,
    run_ahead: int = 1,
    slots: int = 8,
    dummy_ms: tuple[float, float] | None = None,
) -> AsyncIterator[Observed]:
    """The bundled models on the CPU, ready, until the block ends. `folder` takes logs and Prometheus' data.

    `dummy_ms`: lengths of dummy kernels in place of draft and verify.
    """
    port, *numbers = free_ports(1 + len(SERVICES))
    ports = dict(zip(SERVICES, numbers, strict=True))
    async with Stack(folder / "logs") as stack:

        def worker(role: str, model: Path, number: int) -> Coroutine[None, None, str]:
            options = ("--device", "cpu", "--model", str(model), "--metrics-port", str(ports[role]))
            return (
                stack.worker(role, *options)
                if dummy_ms is None
                else stack.dummy_worker(role, dummy_ms[number], *options)
            )

        addresses = await asyncio.gather(worker("verify", target_dir(), 1), worker("draft", standalone_dir(), 0))
        workers = ("--verify", addresses[0], "--draft", addresses[1])
        sizes = ("--run-ahead", str(run_ahead), "--slots", str(slots), "--device", "cpu")
        jobs = {f"slipstream-{service}": number for service, number in ports.items()}
        async with (
            stack.scheduler(*workers, *sizes, port=port, metrics_port=ports["scheduler"]) as address,
            running_prometheus(folder / "prometheus", jobs, interval_ms=interval_ms) as prometheus,
        ):
            yield Observed(address, ports, prometheus)


@asynccontextmanager
async def busy(address: str, *, num_clients: int, max_new_tokens: int) -> AsyncIterator[None]:
    """Clients that ask for one completion after the other, until the block ends. Raises what one of them raises."""

    async def ask(client: AsyncClient, number: int) -> None:
        while True:
            # Now and then one goes away in the middle.
            limit = max_new_tokens if number else max_new_tokens // 2
            stream = client.generate(PROMPTS[number % len(PROMPTS)], max_new_tokens=max_new_tokens, ignore_eos=True)
            num_tokens = 0
            async for chunk in stream:
                num_tokens += len(chunk.token_ids)
                if num_tokens > limit:
                    break
            await stream.aclose()

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client, number)) for number in range(num_clients)]
        yield
        for task in tasks:
            task.cancel()
