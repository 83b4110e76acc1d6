"""SMG in front of two trios: by the script, and one of them is killed under load; by the compose files."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import ProxyHandler, build_opener

import httpx
import openai
import psutil
import pytest
import typer.main
from smg.router_args import RouterArgs

from slipstream.cli.main import app
from slipstream.client import AsyncClient
from tests.harness.certificates import Certificates
from tests.harness.compose_files import load
from tests.harness.generation_server import text_of
from tests.harness.running import COMMAND
from tests.harness.smg import until_healthy

SERVE = Path(__file__).parents[2] / "deploy" / "smg" / "serve"
NUM_CLIENTS = 4
NUM_TOKENS = 16
LOAD_S = 5.0
"""Time of load after one trio is gone."""


def free_ports(num: int, *, step: int = 1) -> int:
    """The first of some free ports."""
    while True:
        first = int.from_bytes(os.urandom(2)) % 20_000 + 10_000
        with ExitStack() as held:
            try:
                for number in range(num):
                    held.enter_context(socket.create_server(("127.0.0.1", first + step * number)))
            except OSError:
                continue
            return first


def all_ports() -> dict[str, int]:
    """The script's variables with free ports."""
    names = ("OPENAI_PORT", "SMG_METRICS_PORT", "FIRST_PORT", "FIRST_METRICS_PORT")
    return dict(zip(names, map(free_ports, (1, 1, 2, 15)), strict=True))


@contextmanager
def serving(state_dir: Path, ports: dict[str, int], *options: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script with two trios on the CPU; it ends in order with the context."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"SLIPSTREAM": " ".join(COMMAND), "STATE_DIR": str(state_dir), "PATH": path}
    settings |= {name: str(port) for name, port in ports.items()} | more
    command = [SERVE, "--device", "cpu", "--slots", "4", *options]
    with subprocess.Popen(command, env=os.environ | settings, start_new_session=True) as script:
        children: set[psutil.Process] = set()
        try:
            try:
                yield script
            finally:
                children = set(psutil.Process(script.pid).children(recursive=True))
            script.terminate()
            assert script.wait(60) == 0
        finally:
            script.kill()
            for child in children:
                if child.is_running():
                    child.kill()
        assert not any(child.is_running() for child in children)


async def until_served(address: str) -> None:
    """Returns when a trio has had a request since it started."""
    async with AsyncClient(address) as client:
        while not (await client.list_jobs(page_size=1)).jobs:
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_a_trio_is_about_to_start_again_ends_all(number: signal.Signals, tmp_path: Path) -> None:
    """The stand-in for a trio ends at once when it is started first, and else stays."""
    trio = f"mkdir {tmp_path}/begun 2> /dev/null && exit 1; exec sleep 60"
    programs = {"slipstream": trio, "smg": "exec sleep 60"}
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o700)
    settings = {name.upper(): str(tmp_path / name) for name in programs} | {"STATE_DIR": str(tmp_path), "TRIOS": "1"}
    command = ["env", "--default-signal=HUP", SERVE]  # under nohup it would be ignored
    with subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True) as script:
        try:
            assert script.stderr is not None
            assert "trio 0 ended and is started again" in script.stderr.readline()
            children = psutil.Process(script.pid).children(recursive=True)
            script.send_signal(number)
            assert script.wait(60) == 0
            assert not any(child.is_running() for child in children)
        finally:
            script.kill()


class Load:
    """Clients that send one request after the other."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.ended: list[tuple[float, str | None]] = []
        """Of each request: when it began, and its error."""
        self._client = client

    async def run(self) -> None:
        """Returns never."""
        while True:
            began_at, error = time.monotonic(), None
            try:
                found = await self._client.completions.create(
                    model="target",
                    prompt="import os\n",
                    max_tokens=16,
                    temperature=1.0,
                    extra_body={"ignore_eos": True},
                )
                assert found.usage is not None
                assert found.usage.completion_tokens == NUM_TOKENS
            except openai.APIError as failure:
                error = str(failure)
            self.ended.append((began_at, error))

    def since(self, began_at: float) -> list[str | None]:
        """The errors, or None, of the requests that began after that."""
        return [error for at, error in self.ended if at >= began_at]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_request_fails_after_smg_has_noticed_that_a_trio_is_gone(tmp_path: Path) -> None:
    ports = all_ports()
    openai_port = ports["OPENAI_PORT"]
    async with AsyncExitStack() as held:
        script = held.enter_context(serving(tmp_path, ports))
        await until_healthy(2, openai_port)
        url = f"http://127.0.0.1:{openai_port}/v1"
        load = Load(await held.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)))
        clients = [asyncio.ensure_future(load.run()) for _ in range(NUM_CLIENTS)]
        held.callback(lambda: [client.cancel() for client in clients])

        for trio in (0, 1):
            await until_served(f"127.0.0.1:{ports['FIRST_PORT'] + trio}")
        assert load.ended == [(at, None) for at, _ in load.ended]
        kill_trio(script, tmp_path / "trio-0")
        await until_healthy(1, openai_port)
        noticed_at = time.monotonic()
        await asyncio.sleep(LOAD_S)  # of load: the other serves on
        outcomes = load.since(noticed_at)
        assert len(outcomes) >= NUM_CLIENTS
        assert outcomes == [None] * len(outcomes)
        await until_healthy(2, openai_port)  # the script has started it again
        back_at = time.monotonic()
        await until_served(f"127.0.0.1:{ports['FIRST_PORT']}")
        assert load.since(back_at) == [None] * len(load.since(back_at))


Ask = Callable[[str], Awaitable[tuple[str, int, int]]]
"""Sends a prompt; returns the output's text, and the prompt's tokens and those of them that the cache had."""


async def hit_rate(ask: Ask, seed: int) -> float:
    """The part of the prompts' tokens that the prefix cache had, in conversations that take turns at random.

    Each begins with a text of its own, and goes on with all that was said and a new line.
    """
    random = Random(seed)
    texts = [
        "".join(f"def {name}_{random.randrange(1000)}(x):\n    return x + {random.randrange(100)}\n" for _ in range(14))
        for name in ("queue", "tree", "parser", "clock")
    ]
    num_tokens = num_cached = 0
    for turn in range(4):
        for number in random.sample(range(len(texts)), len(texts)):
            output, prompt_tokens, cached_tokens = await ask(texts[number])
            # A page is 16 tokens, and the last token of a prompt is always computed.
            assert turn == 0 or cached_tokens > 0.7 * prompt_tokens, (turn, number)
            num_tokens, num_cached = num_tokens + prompt_tokens, num_cached + cached_tokens
            texts[number] += f"{output}\n# and now with {random.randrange(100)}\n"
    return num_cached / num_tokens


async def stream(client: openai.AsyncOpenAI, number: int, has_begun: asyncio.Semaphore) -> str:
    """Returns why no more arrived: the finish reason, or the error's class."""
    reason = ""
    try:
        chunks = await client.completions.create(
            model="target",
            prompt=f"class Queue{number}:\n",
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            if not reason:
                has_begun.release()
                reason = "has begun"
            reason = (chunk.choices and chunk.choices[0].finish_reason) or reason
    except openai.APIError as error:
        reason = type(error).__name__
    return reason


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_conversation_goes_where_its_prefix_is_and_a_stream_ends_with_its_server(tmp_path: Path) -> None:
    """SMG has TLS and a key, its default policy, and a log of JSON only."""
    ports, files = all_ports(), Certificates(tmp_path)
    files.key.chmod(0o600)
    tls = f"--tls-cert-path {files.cert} --tls-key-path {files.key} --log-level info"
    # A server with few pages would get one in eight requests whose prefix is elsewhere.
    settings = {"SMG_OPTIONS": f"{tls} --worker-warmup-divert-every 0", "SMG_API_KEY": "secret"}
    url = f"https://127.0.0.1:{ports['OPENAI_PORT']}/v1"
    async with AsyncExitStack() as held:
        # A draft that is lost, as on a busy host, takes its part of the prefix cache away.
        script = held.enter_context(serving(tmp_path, ports, "--algorithm", "none", "--slots", "8", **settings))
        await until_healthy(2, ports["OPENAI_PORT"], files.ca)
        page = partial(asyncio.to_thread, metrics_of, ports["SMG_METRICS_PORT"])
        while (await page()).count('disposition="snapshot"') != 2:  # of the pages that each server has
            pass
        http = httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(files.ca)), trust_env=False)
        options: dict[str, Any] = {"base_url": url, "max_retries": 0, "http_client": http}
        client = await held.enter_async_context(openai.AsyncOpenAI(api_key="secret", **options))
        server = await held.enter_async_context(AsyncClient(f"127.0.0.1:{ports['FIRST_PORT']}"))
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(api_key="wrong", **options).completions.create(model="target", prompt="a")

        async def by_smg(prompt: str) -> tuple[str, int, int]:
            found = await client.completions.create(model="target", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            cached = found.usage.prompt_tokens_details.cached_tokens or 0
            return found.choices[0].text, found.usage.prompt_tokens, cached

        async def by_one_server(prompt: str) -> tuple[str, int, int]:
            chunks = [chunk async for chunk in server.generate(prompt, max_new_tokens=NUM_TOKENS)]
            usage = chunks[-1].job_usage
            assert usage is not None
            return text_of(chunks), usage.prompt_tokens, usage.cached_tokens

        assert await hit_rate(by_smg, seed=1) >= 0.9 * await hit_rate(by_one_server, seed=2)

        have_begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(stream(client, number, have_begun)) for number in range(8)]
        for _ in streams:
            await have_begun.acquire()
        active = re.findall(r'^smg_worker_requests_active\{worker="\S+:(\d+)"\} (\d+)$', await page(), re.MULTILINE)
        busiest, num_active = max(((int(port), int(num)) for port, num in active), key=itemgetter(1))
        kill_trio(script, tmp_path / f"trio-{busiest - ports['FIRST_PORT']}")
        ended = await asyncio.gather(*streams)
        assert sorted(ended) == ["APIError"] * num_active + ["length"] * (len(streams) - num_active)
        assert (await client.completions.create(model="target", prompt="a", max_tokens=4)).usage is not None
        assert "smg_worker_health{" in await page()
    lines = (tmp_path / "smg.log").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["level"] for line in lines} >= {"INFO"}


def metrics_of(port: int) -> str:
    """A page of metrics."""
    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read(), "utf-8")


@pytest.mark.parametrize(
    "files", [["smg/compose.yaml", f"smg/compose.{kind}.yaml"] for kind in ("gpu", "cpu")], ids=str
)
def test_the_containers_are_started_as_they_can_be(files: list[str], tmp_path: Path) -> None:
    project = load(*files)
    (tmp_path / "compose.json").write_text(json.dumps(project))
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    subprocess.run((*check, tmp_path / "compose.json"), check=True, capture_output=True, timeout=60)
    trios = [project["services"][f"trio-{number}"] for number in (0, 1)]
    for trio in trios:
        command = typer.main.get_command(app)
        found = command.commands["up"].make_context("up", list(trio["command"][2:])).params  # type: ignore[attr-defined]
        assert trio["command"][:2] == ["slipstream", "up"]
        assert (found["vllm_engine"], found["insecure_public"], found["listen"]) == (True, True, "0.0.0.0:50051")
        assert "ports" not in trio
    smg = project["services"]["smg"]
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, exclude_host_port=False)
    assert smg["command"][:3] == ["python", "-m", "slipstream.deploy.smg.launch"]
    options = parser.parse_args(smg["command"][3:])
    assert options.worker_urls == ["grpc://trio-0:50051", "grpc://trio-1:50051"]
    assert (options.port, smg["ports"]) == (8000, ["127.0.0.1:8000:8000"])


def kill_trio(script: subprocess.Popen[Any], state_dir: Path) -> None:
    """Kills an `up` and all of its services at once."""
    up = next(
        child
        for child in psutil.Process(script.pid).children()
        if "up" in child.cmdline() and str(state_dir) in child.cmdline()
    )
    for process in [*up.children(recursive=True), up]:
        process.send_signal(signal.SIGKILL)
