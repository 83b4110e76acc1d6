"""Servers as replicas of Ray Serve: what clients see, also of a replica that dies; and the file that starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import typer.main
import yaml

from slipstream.cli.main import app
from slipstream.client import AsyncClient
from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError
from slipstream.common.wire.job import JobState
from tests.harness.compose_files import DEPLOY
from tests.harness.generation_server import text_of, tokens_of
from tests.harness.running import free_ports

CONFIG: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / "config.yaml").read_text(encoding="utf-8"))
NODE = "127.0.0.2"
"""Ray takes another address of the host in place of 127.0.0.1."""
BIN = Path(sys.executable).parent
PORTS = (
    *("port", "ray-client-server-port", "dashboard-agent-grpc-port", "dashboard-agent-listen-port"),
    *("runtime-env-agent-port", "metrics-export-port"),
)
OPTIONS = "--include-dashboard false --include-log-monitor false --disable-usage-stats --num-cpus 4"
NUM_STREAMS = 8


def test_serve_starts_what_there_is() -> None:
    application, servicers = CONFIG["applications"][0], CONFIG["grpc_options"]["grpc_servicer_functions"]
    options = {parameter.name for parameter in typer.main.get_group(app).commands["up"].params}
    assert {name.replace("-", "_") for name in application["args"]} <= options
    for place in (application["import_path"], *servicers):
        module, _, function = place.replace(":", ".").rpartition(".")
        path = DEPLOY.parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
        assert f"def {function}(" in path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what Ray's own import says
async def test_a_caller_that_leaves_while_a_message_is_sent_ends_its_call() -> None:
    place, _, _ = CONFIG["applications"][0]["import_path"].partition(":")
    is_sending, is_cancelled = asyncio.Event(), asyncio.Event()

    async def stream(*_: object) -> AsyncIterator[bytes]:
        try:
            yield b""
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    class Context:
        async def write(self, _: bytes) -> None:
            is_sending.set()
            await asyncio.Event().wait()

    call = asyncio.create_task(import_module(place).cancelling(stream)(None, Context()))
    await is_sending.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert is_cancelled.is_set()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what Ray's own import says
def test_the_folder_of_a_killed_replica_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    app = import_module(CONFIG["applications"][0]["import_path"].partition(":")[0])
    own, killed, begun = app.new_folder({}), tmp_path / "slipstream-ray-killed", tmp_path / "slipstream-ray-begun"
    (killed / "sockets").mkdir(parents=True)
    begun.mkdir()
    for name in ("options.yaml", "replica.lock"):
        (killed / name).touch()  # no process has the lock
    app.remove_folders_of_the_killed()
    assert {*tmp_path.iterdir()} == {own, begun}


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Ray on this host with two replicas on the CPU. Yields the address of Serve's proxy, which may not serve yet."""
    first = free_ports(len(PORTS) + 2)
    *ports, grpc, http = range(first, first + len(PORTS) + 2)
    config = {
        "grpc_options": CONFIG["grpc_options"] | {"port": grpc},
        "http_options": {"host": NODE, "port": http},
        "applications": [application_for_this_host()],
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    given = [f"--{name}={port}" for name, port in zip(PORTS, ports, strict=True)]
    start = [
        BIN / "ray",
        "start",
        "--head",
        "--block",
        f"--node-ip-address={NODE}",
        f"--temp-dir={directory}/ray",
        *given,
    ]
    # Bounds for a host that is busy with other tests.
    more = {"RAY_raylet_start_wait_time_s": "120", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    more |= {"RAY_AUTH_MODE": "disabled", "TMPDIR": str(directory)}
    environment = os.environ | more | {"RAY_ADDRESS": f"{NODE}:{first}", "PATH": f"{BIN}:{os.environ['PATH']}"}
    commands = [
        [*start, *OPTIONS.split(), "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"],
        [BIN / "serve", "run", directory / "config.yaml"],
    ]
    processes = []
    try:
        for command in commands:
            with (directory / "log").open("ab") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            while len(processes) == 1 and "Ray runtime started" not in (directory / "log").read_text(encoding="utf-8"):
                time.sleep(0.1)
        yield f"127.0.0.1:{grpc}"
    finally:
        children = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process in processes:
            process.kill()  # nothing if it has ended
            process.wait()


def application_for_this_host() -> dict[str, Any]:
    """The application of config.yaml with the bundled model on the CPU, and with two replicas."""
    application = CONFIG["applications"][0]
    (deployment,) = application["deployments"]
    replicas = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}, "graceful_shutdown_timeout_s": 5}
    deployment = {name: value for name, value in deployment.items() if name != "autoscaling_config"} | replicas
    return application | {
        "args": {"metrics-port": 0, "device": "cpu", "slots": NUM_STREAMS},
        "deployments": [deployment],
    }


def servers(directory: Path) -> dict[str, psutil.Process]:
    """The `slipstream up` of each replica that serves, by its address."""
    found = {}
    for file in directory.glob("slipstream-ray-*/server"):
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "up" in words and str(file.parent) in words:
                found[file.read_text(encoding="utf-8")] = process
    return found


async def until_two_serve(directory: Path) -> None:
    """Returns when both replicas have a server that serves; the test's timeout bounds it."""
    while len(await asyncio.to_thread(servers, directory)) != 2:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0.2)  # a look at all processes takes a while of a core


def requests() -> list[dict[str, Any]]:
    """Requests with different lengths and draws; long enough for a process to die beneath them."""
    return [
        {
            "prompt": f"class Queue{number}:",
            "max_new_tokens": 300 + number,
            "temperature": 0.9 * (number % 2),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(NUM_STREAMS)
    ]


async def outputs(client: AsyncClient, on_first_text: asyncio.Semaphore | None = None) -> list[tuple[list[int], str]]:
    """The tokens and the text of each request, all at the same time."""

    async def output(request: dict[str, Any]) -> tuple[list[int], str]:
        chunks = []
        async for chunk in client.generate(**request):
            if on_first_text is not None and not text_of(chunks) and chunk.text:
                on_first_text.release()
            chunks.append(chunk)
        return tokens_of(chunks), text_of(chunks)

    return await asyncio.gather(*map(output, requests()))


def replica_s_service(up: psutil.Process) -> list[psutil.Process]:
    """Only verify: `up` starts it again, and its server goes on."""
    return [child for child in up.children() if "slipstream.services.verify_main" in child.cmdline()]


def replica_s_server(up: psutil.Process) -> list[psutil.Process]:
    """`up` and its services; the actor stays, until Serve has found out."""
    return [up, *up.children(recursive=True)]


def replica_itself(up: psutil.Process) -> list[psutil.Process]:
    """The actor, with which its server dies."""
    parent = up.parent()
    assert parent is not None
    return [parent]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_what_a_dead_replica_streamed_goes_on_with_the_same_tokens() -> None:
    with TemporaryDirectory(prefix="r") as name, serving(Path(name)) as address:
        directory = Path(name)
        await until_two_serve(directory)
        async with AsyncClient([address]) as client:
            while not await client.is_serving(timeout_s=10):
                pass
            async with AsyncClient(next(iter(servers(directory)))) as one:
                expected = await outputs(one)
            assert await outputs(client) == expected
            await check_other_calls(client, directory)
            for victims in (replica_s_service, replica_s_server, replica_itself):
                have_begun = asyncio.Semaphore(0)
                streams = asyncio.create_task(outputs(client, have_begun))
                for _ in range(NUM_STREAMS):
                    await have_begun.acquire()
                before = servers(directory)
                for victim in victims(next(iter(before.values()))):
                    victim.kill()
                assert await streams == expected, victims.__name__
                await until_two_serve(directory)


async def check_other_calls(client: AsyncClient, directory: Path) -> None:
    """Checks that streams that are left end their jobs, and what is passed on and refused."""

    async def leave(number: int) -> None:
        stream = client.generate("def f():", job_id=f"left-{number}", max_new_tokens=1000, ignore_eos=True)
        async for chunk in stream:
            if chunk.text:
                break
        await stream.aclose()

    await asyncio.gather(*map(leave, range(NUM_STREAMS)))
    jobs = []
    for address in servers(directory):
        async with AsyncClient(address) as one:
            for job in [job for job in (await one.list_jobs()).jobs if job.job_id.startswith("left-")]:
                while (found := await one.get_job(job.job_id)).state is not JobState.ENDED:
                    pass
                jobs.append(found)
    assert len(jobs) == NUM_STREAMS
    assert max(job.num_tokens for job in jobs) < 1000
    assert b"".join(token for _, token in await client.tokenize("def f")) == b"def f"
    assert (await client.server_info()).model
    with pytest.raises(InvalidArgumentError, match="top_p"):
        _ = [chunk async for chunk in client.generate("a", top_p=3.0)]
    for call in (client.create_job("a"), client.get_job("a"), client.list_jobs(), client.cancel_job("a")):
        with pytest.raises(FailedPreconditionError, match="is not served by Ray Serve"):
            await call
    with pytest.raises(FailedPreconditionError, match="WatchJob is not served by Ray Serve"):
        _ = [chunk async for chunk in client.watch_job("a")]
