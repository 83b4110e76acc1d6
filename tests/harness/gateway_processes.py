"""Several gateways of one server, in processes of their own, over a scripted scheduler in this one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from slipstream.bundled import target_dir
from slipstream.cli.health import wait_until_serving
from slipstream.common.rpc.listener import Listener
from slipstream.gateway.config import gateway_name, shard_of
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, serving

TIMEOUT_S = 60.0


class GatewayProcesses:
    """Gateways, each with an address for clients of its own, so that a test can choose where a call arrives."""

    def __init__(
        self,
        directory: Path,
        scheduler: ScriptedScheduler,
        behind: str,
        addresses: list[str],
        *options: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`behind`: the scheduler's address. `addresses` may be one and the same for all, `environment` is this
        process's if it is not given."""
        self.addresses = addresses
        self.scheduler = scheduler
        self.private = [f"unix:{directory}/private/{gateway_name(index)}.sock" for index in range(len(addresses))]
        self._directory = directory
        self._behind = behind
        self._more_options = options
        self._environment = environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *indices: int) -> None:
        """Starts gateways; `serve` waits for them."""
        options = ("--gateways", str(len(self.addresses)), "--scheduler", self._behind, "--vllm-engine")
        for index in indices:
            with (self._directory / f"gateway-{index}.log").open("ab") as log:
                self._processes[index] = subprocess.Popen(
                    (
                        *(sys.executable, "-m", "slipstream.gateway.main", "--listen", self.addresses[index]),
                        *("--gateway-index", str(index), "--private-listen", self.private[index], *options),
                        *self._more_options,
                    ),
                    env=self._environment,
                    stdout=log,
                    stderr=log,
                )

    async def serve(self, *indices: int) -> None:
        """Returns when these gateways serve."""
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(wait_until_serving(self.private[index]) for index in indices))

    def kill(self, index: int) -> None:
        """Kills a gateway."""
        self._processes[index].kill()
        self._processes[index].wait()

    def pid(self, index: int) -> int:
        """Process id of a gateway."""
        return self._processes[index].pid

    def wait(self, index: int) -> int:
        """Waits for the end of a gateway; returns its exit status."""
        return self._processes[index].wait(TIMEOUT_S)

    def send_signal(self, index: int, number: signal.Signals) -> None:
        """Sends a gateway a signal."""
        self._processes[index].send_signal(number)

    def stop(self) -> list[int]:
        """Ends all as `up` does: at once, and each may finish its work. Returns their exit statuses."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        return [process.wait(TIMEOUT_S) for process in self._processes.values()]

    def close(self) -> None:
        """Kills all that run."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def job_of(self, index: int, name: str = "job") -> str:
        """A job's id whose home is this gateway."""
        return next(
            job_id for job_id in (f"{name}-{number}" for number in range(1000)) if self.home_of(job_id) == index
        )

    def home_of(self, job_id: str) -> int:
        """The gateway that the job is at home at."""
        return shard_of(job_id, len(self.addresses))


@contextmanager
def gateway_processes(
    directory: Path,
    count: int,
    *options: str,
    is_port_shared: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[GatewayProcesses]:
    """Starts gateways; they serve when the context begins."""
    tiny = replace(DESCRIPTION, tokenizer_path=str(target_dir()))
    scheduler = ScriptedScheduler(tiny)
    with ExitStack() as held:
        ports = 1 if is_port_shared else count
        claims = [held.enter_context(Listener.claim("127.0.0.1:0", is_shared=True)) for _ in range(ports)]
        addresses = [claim.address for claim in claims] * (count // ports)
        if count == 1:
            # One alone does not share its port with this process.
            addresses = [f"unix:{directory}/clients.sock"]
        behind = held.enter_context(serving(scheduler, directory))
        gateways = GatewayProcesses(directory, scheduler, behind, addresses, *options, environment=environment)
        held.callback(gateways.stop)
        gateways.start(*range(count))
        asyncio.run(gateways.serve(*range(count)))
        yield gateways
