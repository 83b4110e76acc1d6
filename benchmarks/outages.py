"""Kills services under streaming clients: every job must end with its tokens, and none may fail.

`slipstream up` serves the bundled models on the CPU, and starts what dies again. Its bound on deaths in a minute is
lifted. Clients of the Python library stream jobs without a pause, half of them by Generate and half by CreateJob and
WatchJob; greedy ones and sampled ones take turns. The services are killed with SIGKILL in turns, each time when all
streams flow again and a random time has passed. A stream has recovered when its next token is there. Status 1 if a
client saw an error, a gap or a repetition, or other tokens than those of a run without kills.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from slipstream.benchmarks.models import DeviceOption, JsonOption  # noqa: TC001 - typer reads the annotations
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.stack import free_ports
from slipstream.cli.status import wait_until_serving
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVICES = ("gateway", "scheduler", "verify", "draft")
START_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 2.0
UNDER_WAY_S = 0.1
"""Messages that a client gets so soon after a kill were under way before it; no service starts as quickly."""

_UP = "from slipstream.cli.up import supervisor; from slipstream.cli.main import main; supervisor.DEATHS_WITHIN_S = 0.0"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run."""

    kills: int = 20
    """Number of kills of each service."""
    clients: int = 16
    max_new_tokens: int = 300
    seed: int = 1
    services: tuple[str, ...] = ("gateway", "scheduler")
    """Names of the services that are killed, in turns."""
    device: str = "cpu"
    """On a GPU in float32: tokens in bfloat16 depend on the batch."""


@dataclass(slots=True)
class Stream:
    """A client, and the time of its newest token."""

    index: int
    last_token_at: float = 0.0
    num_jobs: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The kills of a service. Times are seconds from a kill to the next token of a stream."""

    service: str
    kills: int
    p50_s: float
    """Median over all streams and kills."""
    worst_s: float


class Outages:
    """The clients of a server, and the kills."""

    def __init__(self, plan: Plan, address: str, up: psutil.Process) -> None:
        self._plan = plan
        self._address = address
        self._up = up
        self._rng = random.Random(plan.seed)
        self._expected: list[tuple[int, ...]] = []
        self._is_over = False
        self.streams = [Stream(index) for index in range(plan.clients)]

    async def run(self) -> list[Recovery]:
        """Kills by turns, and returns how the streams recovered. `streams` then have what clients saw."""
        async with AsyncClient(self._address) as client:
            jobs = (self._tokens(client, stream, "undisturbed") for stream in self.streams)
            self._expected = await asyncio.gather(*jobs)
        clients = [asyncio.create_task(self._follow(stream)) for stream in self.streams]
        seconds: dict[str, list[float]] = {service: [] for service in self._plan.services}
        for number, service in product(range(self._plan.kills), self._plan.services):
            await asyncio.sleep(self._rng.uniform(0.1, LONGEST_PAUSE_S))
            killed_at = time.monotonic()
            self._kill(service)
            seconds[service] += await self._recovered(killed_at)
            print(f"{service} {number + 1}: all streams flow after {seconds[service][-1]:.2f} s", flush=True)
        self._is_over = True
        await asyncio.gather(*clients)
        return [
            Recovery(service, self._plan.kills, round(statistics.median(times), 2), round(max(times), 2))
            for service, times in seconds.items()
        ]

    async def _recovered(self, killed_at: float) -> list[float]:
        """Waits until each stream has a token that came after the kill; returns the times that it took, ascending."""
        found: dict[int, float] = {}
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            while len(found) < len(self.streams):
                await asyncio.sleep(0.002)
                for stream in self.streams:
                    if stream.last_token_at > killed_at + UNDER_WAY_S:
                        found.setdefault(stream.index, stream.last_token_at - killed_at)
                    elif stream.errors:
                        found.setdefault(stream.index, RECOVERY_TIMEOUT_S)
        return sorted(found.values())

    def _kill(self, service: str) -> None:
        for child in self._up.children():
            if any(word.endswith(f".{service}.main") for word in child.cmdline()):
                child.send_signal(signal.SIGKILL)
                return
        raise RuntimeError(f"there is no {service} to kill")

    async def _follow(self, stream: Stream) -> None:
        """Streams jobs, one after the other."""
        async with AsyncClient(self._address) as client:
            while not self._is_over and not stream.errors:
                name = f"client-{stream.index}-job-{stream.num_jobs}"
                try:
                    tokens = await self._tokens(client, stream, name)
                except Exception as error:
                    stream.errors.append(f"{name}: {error!r}")
                else:
                    stream.num_jobs += 1
                    if tokens != self._expected[stream.index]:
                        stream.errors.append(f"{name}: other tokens than without a kill")

    async def _tokens(self, client: AsyncClient, stream: Stream, name: str) -> tuple[int, ...]:
        is_sampled, is_watched = stream.index % 2 == 1, stream.index % 4 >= 2
        prompt, job_id = f"Chapter {stream.index}. In the beginning", f"{name}-{stream.index}"
        temperature, most = (0.8 if is_sampled else 0.0), self._plan.max_new_tokens
        if is_watched:
            await client.create_job(
                prompt, job_id=job_id, max_new_tokens=most, temperature=temperature, seed=7, ignore_eos=True
            )
            chunks = client.watch_job(job_id)
        else:
            chunks = client.generate(
                prompt, job_id=job_id, max_new_tokens=most, temperature=temperature, seed=7, ignore_eos=True
            )
        tokens: list[int] = []
        async for chunk in chunks:
            stream.last_token_at = time.monotonic()
            tokens += chunk.token_ids
        return tuple(tokens)


@asynccontextmanager
async def serving(slots: int, device: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Runs `slipstream up` on the bundled models; yields the address and the process."""
    with TemporaryDirectory(prefix="slipstream-") as directory:
        port = free_ports(1)[0]
        address, log = f"127.0.0.1:{port}", Path(directory) / "up.log"
        dtype = () if device == "cpu" else ("--dtype", "float32")
        options = ("up", "--device", device, *dtype, "--listen", address, "--state-dir", directory)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", f"{_UP}; main()", *options, "--slots", str(slots), "--metrics-port", "0"),
                stdout=output,
                stderr=output,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await wait_until_serving(address)
            yield address, psutil.Process(process.pid)
        except BaseException:
            print(log.read_text(encoding="utf-8"), file=sys.stderr)
            raise
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()


async def measure(plan: Plan) -> tuple[list[Recovery], list[Stream]]:
    """Serves, kills, and returns the recoveries and what clients saw."""
    async with serving(plan.clients, plan.device) as (address, up):
        outages = Outages(plan, address, up)
        return await outages.run(), outages.streams


def main(
    kills: Annotated[int, typer.Option(help="Kills of each service.")] = Plan.kills,
    clients: Annotated[int, typer.Option(help="Clients that stream all the time.")] = Plan.clients,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = Plan.seed,
    services: Annotated[str, typer.Option(help="Those to kill, by commas.")] = ",".join(Plan.services),
    device: DeviceOption = Plan.device,
    json: JsonOption = None,
) -> None:
    """Kills services by turns, and prints how the streams recover."""
    plan = Plan(kills=kills, clients=clients, seed=seed, services=tuple(services.split(",")), device=device)
    if unknown := set(plan.services) - set(SERVICES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not one of {', '.join(SERVICES)}")
    print(f"{host(device)}; bundled models, {clients} clients, seed {seed}")
    recoveries, streams = asyncio.run(measure(plan))
    errors = [error for stream in streams for error in stream.errors]
    num_jobs = sum(stream.num_jobs for stream in streams)
    print("| killed | times | recovery p50 | worst |\n|---|---|---|---|")
    for row in recoveries:
        print(f"| {row.service} | {row.kills} | {row.p50_s:.2f} s | {row.worst_s:.2f} s |")
    print(f"{num_jobs} jobs with the tokens of a run without kills, {len(errors)} errors")
    print("\n".join(errors))
    rows = [asdict(row) for row in recoveries]
    write_json(
        {"host": host(device), "plan": asdict(plan), "recoveries": rows, "jobs": num_jobs, "errors": errors}, json
    )
    sys.exit(bool(errors))


if __name__ == "__main__":
    typer.run(main)
