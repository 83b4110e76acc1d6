"""A real Prometheus that scrapes the real services, with the project's own configuration pointed at other ports."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.benchmarks.dummy_worker import dummy_worker
from slipstream.benchmarks.stack import Stack, end, free_ports, words
from slipstream.bundled import standalone_dir, target_dir
from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "prometheus.yml"
START_TIMEOUT_S = 30.0
RETRY_S = 0.05
SERVICES = ("gateway", "scheduler", "draft", "verify", "grammar")
PROMPTS = ("def main():\n", "class Queue:\n", "import os\n", "for line in lines:\n")


class QueryError(Exception):
    """Prometheus refuses a query."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a result."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]
    """Time in seconds since 1970, and value; a single one for an instant."""


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        """Use `running_prometheus`."""
        self._url = f"http://127.0.0.1:{port}"

    async def query(self, expr: str) -> list[Series]:
        """The series of an expression, now. Raises QueryError."""
        result = await self._get("query", query=expr)
        return [Series(row["metric"], (_point(row["value"]),)) for row in result]

    async def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[Series]:
        """The same between two times. Raises QueryError."""
        result = await self._get("query_range", query=expr, start=str(start), end=str(end), step=f"{step_s:g}")
        return [Series(row["metric"], tuple(map(_point, row["values"]))) for row in result]

    async def is_ready(self) -> bool:
        """True if it answers queries."""
        try:
            await asyncio.to_thread(_fetch, f"{self._url}/-/ready")
        except urllib.error.URLError:
            return False
        return True

    async def _get(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            answer = json.loads(await asyncio.to_thread(_fetch, url))
        except urllib.error.HTTPError as error:
            raise QueryError(f"{parameters['query']}: {json.load(error)['error']}") from error
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


def find_prometheus() -> str | None:
    """The program, if it is installed."""
    return shutil.which("prometheus")


@asynccontextmanager
async def running_prometheus(
    folder: Path, metrics_ports: Mapping[str, int], *, interval_ms: int
) -> AsyncIterator[Prometheus]:
    """Scrapes the endpoint of each job and evaluates the rules at this interval, until the block ends.

    `folder` takes its data and its log. Raises RuntimeError when it does not start.
    """
    program = find_prometheus()
    if program is None:
        raise RuntimeError("prometheus is not installed")
    config = _write_config(folder, metrics_ports, interval_ms)
    (port,) = free_ports(1)
    options = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
    with (folder / "prometheus.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            program, *options, f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log
        )
        try:
            server = Prometheus(port)
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await server.is_ready():
                    if process.returncode is not None:
                        raise RuntimeError(f"prometheus ended with status {process.returncode}: see its log")
                    await asyncio.sleep(RETRY_S)
            yield server
        finally:
            await end(process)


@dataclass(frozen=True, slots=True)
class Observed:
    """Services with a Prometheus beside them."""

    address: str
    """The gateway's address."""
    metrics_ports: Mapping[str, int]
    """The metrics ports, by service."""
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
    """Runs the bundled models on the CPU until the block ends. `folder` takes logs and Prometheus' data.

    `dummy_ms`: dummy kernels of draft and verify, in place of the models.
    """
    ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
    async with Stack(folder / "logs") as stack:
        models = {"draft": standalone_dir(), "verify": target_dir()}
        starts = [
            stack.worker(role, model=model, metrics_port=ports[role])
            if dummy_ms is None
            else stack.worker(role, program=dummy_worker(role, length_ms), model=model, metrics_port=ports[role])
            for (role, model), length_ms in zip(models.items(), dummy_ms or (0.0, 0.0), strict=True)
        ]
        grammar = words(listen=stack.socket("grammar"), metrics_port=ports["grammar"])
        starts.append(stack.process("grammar", sys.executable, "-m", "slipstream.services.grammar_main", *grammar))
        await asyncio.gather(*starts)
        jobs = {f"slipstream-{service}": number for service, number in ports.items()}
        async with (
            stack.scheduler(
                "draft",
                run_ahead=run_ahead,
                slots=slots,
                metrics_port=ports["scheduler"],
                gateway_metrics_port=ports["gateway"],
                grammar=stack.socket("grammar"),
            ) as served,
            running_prometheus(folder / "prometheus", jobs, interval_ms=interval_ms) as prometheus,
        ):
            yield Observed(served.address, ports, prometheus)


@asynccontextmanager
async def busy(address: str, *, num_clients: int, max_new_tokens: int, regex: str | None = None) -> AsyncIterator[None]:
    """Has clients ask for one completion after the other, until the block ends. Raises the error of a client.

    `regex`: what the second client's completions have to match.
    """

    async def ask(client: AsyncClient, number: int) -> None:
        while True:
            # The first client leaves in the middle each time.
            limit = max_new_tokens if number else max_new_tokens // 2
            constrained = regex if number == 1 else None
            prompt, ignore_eos = PROMPTS[number % len(PROMPTS)], constrained is None
            options: RequestOptions = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos, "regex": constrained}
            stream = client.generate(prompt, **options)
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


def _write_config(folder: Path, metrics_ports: Mapping[str, int], interval_ms: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(_config(metrics_ports, interval_ms)), encoding="utf-8")
    return path


def _config(metrics_ports: Mapping[str, int], interval_ms: int) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{interval_ms}ms", "evaluation_interval": f"{interval_ms}ms"}
    config["rule_files"] = [str(CONFIG.parent / pattern) for pattern in config["rule_files"]]
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] in metrics_ports]
    for job in config["scrape_configs"]:
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{metrics_ports[job['job_name']]}"]
    return config


def _fetch(url: str) -> bytes:
    # Without the proxies of the environment: this is a process of this host.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
