"""Kills the gateway and the scheduler under streaming clients; clients must see no error and no other token.

Clients ask for the same request over and over; each output is compared with that of an undisturbed server. Meanwhile
the gateway or the scheduler is killed (SIGKILL) at random moments and started again by the supervisor of `slipstream
up`. The time to recover is from a kill until every client that streamed then has its next token. Status 1 if an output
differs or a client sees an error.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.models import DeviceOption, JsonOption  # noqa: TC001 - typer reads the annotations
from slipstream.benchmarks.result_files import host, write_json
from slipstream.bundled import prompts
from slipstream.cli.cancellation import background
from slipstream.cli.model_choice import ModelOptions
from slipstream.cli.up.config import UpConfig, free_address, gateway_command, scheduler_command, worker_command
from slipstream.cli.up.run import supervising
from slipstream.client import AsyncClient
from slipstream.common.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.up.supervisor import Supervisor

SERVICES = ("gateway", "scheduler")
NUM_CLIENTS, NUM_KILLS = 16, 20
MAX_NEW_TOKENS = 192
RECOVER_TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 2.0
"""Between a recovery and the next kill, at random."""


@dataclass(slots=True)
class RecoveryReport:
    """The outcome."""

    seed: int
    num_clients: int
    host: str
    recovered_s: dict[str, list[float]] = field(default_factory=dict)
    """By service: the time to recover from each kill."""
    num_outputs: int = 0
    """Outputs that were compared."""
    problems: list[str] = field(default_factory=list)


class _Client:
    """Asks for one request over and over."""

    def __init__(self, server: str, number: int, report: RecoveryReport) -> None:
        self.received_at = 0.0
        """When the last tokens came."""
        self._server = server
        self._number = number
        self._report = report
        self._expected: list[int] = []

    async def ask_once(self, client: AsyncClient) -> list[int]:
        """Returns the tokens of the request."""
        tokens: list[int] = []
        chunks = client.generate(
            prompts()[self._number].text,
            max_new_tokens=MAX_NEW_TOKENS,
            # Half of the requests are greedy.
            temperature=0.8 * (self._number % 2),
            seed=self._number,
            ignore_eos=True,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                tokens += chunk.token_ids
                self.received_at = time.monotonic()
        return tokens

    async def learn(self) -> None:
        """Notes the tokens of an undisturbed run."""
        async with AsyncClient(self._server) as client:
            self._expected = await self.ask_once(client)

    async def ask(self) -> None:
        """Compares the tokens of one request after the other, until it is cancelled."""
        async with AsyncClient(self._server) as client:
            while True:
                try:
                    tokens = await self.ask_once(client)
                except SlipstreamError as error:
                    self._report.problems.append(f"client {self._number}: {error!r}")
                    continue
                self._report.num_outputs += 1
                if tokens != self._expected:
                    self._report.problems.append(f"client {self._number}: other tokens")


async def recover(
    supervisor: Supervisor, server: str, report: RecoveryReport, *, num_kills: int, services: tuple[str, ...] = SERVICES
) -> None:
    """Kills each of the services so many times, in turns."""
    clients = [_Client(server, number, report) for number in range(report.num_clients)]
    await asyncio.gather(*(client.learn() for client in clients))
    rng = random.Random(report.seed)
    async with background(*(client.ask() for client in clients)) as asking:
        for service in [name for _ in range(num_kills) for name in services]:
            await asyncio.sleep(rng.uniform(0.2, LONGEST_PAUSE_S))
            killed_at = time.monotonic()
            os.kill(supervisor.pid(service), signal.SIGKILL)
            async with asyncio.timeout(RECOVER_TIMEOUT_S):
                while not all(client.received_at > killed_at + 0.05 for client in clients):
                    for ended in filter(asyncio.Task.done, asking):
                        ended.result()
                    await asyncio.sleep(0.005)
            took_s = max(client.received_at for client in clients) - killed_at
            report.recovered_s.setdefault(service, []).append(took_s)
            print(f"{service}: {took_s:.2f} s", flush=True)


async def run(device: str, seed: int, *, num_clients: int = NUM_CLIENTS, num_kills: int = NUM_KILLS) -> RecoveryReport:
    """Serves the bundled models as `slipstream up` does, and kills."""
    report = RecoveryReport(seed, num_clients, host(device))
    with TemporaryDirectory(prefix="slipstream-") as folder:
        models = ModelOptions(algorithm="standalone").choose()
        config = UpConfig(
            models=models,
            device=device,
            dtype="float32",
            state_dir=Path(folder),
            listen="127.0.0.1:0",
            log_level="DEBUG",
        )
        gateway = gateway_command(config, free_address(config.listen, field="listen"))
        # Kills in short order are meant here.
        quiet: dict[str, Any] = {
            "on_change": lambda _name, _state: None,
            "hurry": asyncio.Event(),
            "deaths_within_s": 0.0,
        }
        async with supervising(config, **quiet) as supervisor:
            supervisor.start(*(worker_command(config, name) for name in config.workers))
            supervisor.start(scheduler_command(config))
            supervisor.start(gateway)
            await supervisor.wait_ready()
            await supervisor.while_alive(recover(supervisor, gateway.address, report, num_kills=num_kills))
    return report


def main(
    device: DeviceOption = "cpu",
    kills: Annotated[int, typer.Option(help="Kills of each service.")] = NUM_KILLS,
    clients: Annotated[int, typer.Option(help="Streaming clients.")] = NUM_CLIENTS,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 1,
    json_file: JsonOption = None,
) -> None:
    """Measures recovery."""
    report = asyncio.run(run(device, seed, num_clients=clients, num_kills=kills))
    write_json(asdict(report), json_file)
    for service, times in report.recovered_s.items():
        print(f"{service}: {len(times)} kills, recovered after p50 {median(times):.2f} s, at most {max(times):.2f} s")
    print(f"{report.num_outputs} outputs compared, {len(report.problems)} problems", *report.problems, sep="\n")
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
