"""`slipstream up`: what it shows while services load, its end, faults of its services, several gateways, a boot."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from rich.console import Console

from slipstream.cli import display
from slipstream.cli import up as run
from slipstream.cli.display import StateLines
from slipstream.cli.service import ServiceState
from slipstream.cli.supervisor import Supervisor
from slipstream.client import AsyncClient, Client
from slipstream.common.errors import AddressInUseError, UnavailableError
from slipstream.common.rpc.listener import Listener
from slipstream.services.models.checkpoint import PROGRESS
from tests.harness.example_states import STATE
from tests.harness.planted_faults import PlantedFaults
from tests.harness.running import leftovers, running, running_up, status, until
from tests.harness.waiting import block_until, runs

UP = Path(__file__).parent.parent / "harness" / "up_on_fakes.py"


@contextmanager
def up_on_fakes(state_dir: Path, *options: str, stderr: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """Starts it, as the leader of a session; it is killed with the context, if it has not ended by then."""
    command = ("env", "--default-signal=INT,HUP", sys.executable, str(UP), str(state_dir), *options)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
    ) as up:
        try:
            yield up
        finally:
            up.kill()


def until_so(is_so: Callable[[], bool], up: subprocess.Popen[bytes]) -> None:
    """Returns when it is so; the command must live that long, and the test's timeout bounds it."""
    while not is_so():
        assert up.poll() is None
        time.sleep(0.02)


def has_stopped_its_service(state_dir: Path) -> bool:
    """True if it was asked to end once, and has."""
    return (state_dir / "journal").read_text().count("SIGTERM") == 1 and not (state_dir / "scheduler.sock").exists()


def fake_process(up: subprocess.Popen[bytes], name: str) -> psutil.Process:
    """The process of a fake service."""
    children = psutil.Process(up.pid).children()
    return next(child for child in children if any(f"/{name}.sock" in word for word in child.cmdline()))


def test_it_starts_a_dead_gateway_again_and_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemd hears once that the server serves."""
    errors, name = tmp_path / "errors", f"slipstream-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with (
        errors.open("wb") as file,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        up_on_fakes(tmp_path, stderr=file.fileno()) as up,
    ):
        systemd.bind(f"\0{name}")
        assert systemd.recv(100) == b"READY=1"
        assert (tmp_path / "server").exists()
        dead = fake_process(up, "gateway")
        dead.kill()
        until_so(lambda: errors.read_text().count("gateway: ready") == 2, up)
        assert fake_process(up, "gateway").pid != dead.pid
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    assert "gateway was killed by SIGKILL and is started again; its log is now" in errors.read_text()
    assert has_stopped_its_service(tmp_path)
    assert not (tmp_path / "gateway.sock").exists()


def test_it_ends_in_order_when_its_terminal_is_gone(tmp_path: Path) -> None:
    terminal, side = os.openpty()
    with up_on_fakes(tmp_path, "--terminal", os.ttyname(side)) as up:
        until_so((tmp_path / "server").exists, up)
        os.close(side)
        os.close(terminal)
        assert up.wait(60) == 0
    assert has_stopped_its_service(tmp_path)


def test_it_ends_in_order_when_the_reader_of_its_output_is_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with up_on_fakes(tmp_path, stderr=writer) as up:
        os.close(writer)
        until_so((tmp_path / "server").exists, up)
        os.close(reader)
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    assert has_stopped_its_service(tmp_path)


def test_it_fails_with_the_message_of_a_draft_that_cannot_be_served(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("wb") as file, up_on_fakes(tmp_path, "--draft", "/", stderr=file.fileno()) as up:
        assert up.wait(60) == 1
    assert "draft ended with exit status 2 before it was ready; the end of its log" in errors.read_text()
    assert errors.read_text().count("fake service cannot load its model") == 1
    assert not (tmp_path / "scheduler.sock").exists()


def test_it_serves_on_without_a_draft_that_cannot_be_served_any_more(tmp_path: Path) -> None:
    errors, broken = tmp_path / "errors", tmp_path / "broken"
    options = ("--draft", str(broken), "--max-restarts", "1")
    with errors.open("wb") as file, up_on_fakes(tmp_path, *options, stderr=file.fileno()) as up:
        until_so((tmp_path / "server").exists, up)
        broken.touch()
        until_so(lambda: "is not tried again: the others serve without it" in errors.read_text(), up)
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    assert has_stopped_its_service(tmp_path)


@pytest.fixture
def pipes(mps_dir: Path) -> Path:
    """Directory of the MPS daemon."""
    return mps_dir / "pipe"


def told(pipes: Path) -> list[str]:
    """The commands that the daemon was given, by their first words."""
    journal = pipes / "journal"
    return [line.split()[0] for line in journal.read_text().splitlines()] if journal.exists() else []


def daemon_processes(pipes: Path) -> list[psutil.Process]:
    """The daemon, and its server."""
    return [psutil.Process(int((pipes / name).read_text())) for name in ("control", "server_process")]


def test_a_signal_while_the_mps_daemon_starts_ends_both(
    tmp_path: Path, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "waits at start_server")
    with up_on_fakes(tmp_path, "--mps") as up:
        until_so(lambda: "start_server" in told(pipes), up)
        processes = psutil.Process(up.pid).children(recursive=True)
        assert len(processes) == 3  # the daemon, its server, and who says "start_server"
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
    assert told(pipes) == ["start_server", "quit"]
    block_until(lambda: not any(map(runs, processes)))


def test_a_signal_while_the_mps_daemon_quits_hides_no_error(
    tmp_path: Path, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "waits at quit")
    errors = tmp_path / "errors"
    with errors.open("wb") as file, up_on_fakes(tmp_path, "--mps", stderr=file.fileno()) as up:
        until_so((tmp_path / "server").exists, up)
        processes = daemon_processes(pipes)
        fake_process(up, "scheduler").kill()
        until_so(lambda: "quit" in told(pipes), up)
        up.send_signal(signal.SIGTERM)
        until_so(lambda: "stopping" in errors.read_text(), up)
        (pipes / "go").touch()
        assert up.wait(60) == 1
    assert "scheduler was killed by SIGKILL" in errors.read_text()
    block_until(lambda: not any(map(runs, processes)))


LOADING, READY, DIED = ServiceState.LOADING, ServiceState.READY, ServiceState.DIED


def test_a_service_that_fails_as_it_starts_again_and_again_is_shown_once() -> None:
    output = io.StringIO()
    lines = StateLines(Console(file=output))
    for state in (LOADING, DIED, LOADING, DIED, LOADING, READY, DIED, LOADING, READY):
        lines.on_change("draft", state)
    shown = [line.split()[1] for line in output.getvalue().splitlines()]
    assert shown == ["loading", "died", "ready", "died", "loading", "ready"]


def test_services_that_are_loading_are_said_with_the_end_of_their_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    output, now = io.StringIO(), [100.0]
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = StateLines(Console(file=output, width=200))
    for name, state in (("draft", LOADING), ("verify", LOADING), ("verify", READY), ("gateway", LOADING)):
        lines.on_change(name, state)
    now[0] += 10.2
    logs = {"draft": "[info] 3 of 20", "spare": f"[info] {PROGRESS}" % (55, 3.14)}
    lines.on_change("spare", LOADING)
    lines.say_progress(lambda name: logs.get(name, ""))
    assert output.getvalue().splitlines()[-3:] == [
        "draft: still loading after 10 s: [info] 3 of 20",
        "gateway: still loading after 10 s",
        f"spare: still loading after 0 s: [{'#' * 16}{'.' * 14}] 55 % of the weights, 3.1 GB/s",
    ]


@pytest.mark.parametrize(
    ("state", "problem", "reason"),
    [
        ("attached", "", ""),
        ("resting", "", ""),
        ("", "", ""),
        ("catching up", "", "it is still loading"),
        ("missing", "it has another vocabulary", "it has another vocabulary"),
    ],
)
def test_why_a_draft_does_not_take_part(state: str, problem: str, reason: str) -> None:
    assert run._why_without_draft(replace(STATE, draft_state=state, draft_problem=problem)) == reason


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_it_is_ready_once_a_draft_that_loads_slowly_takes_part(tmp_path: Path) -> None:
    """The scheduler waits for it before verify plans memory and captures graphs, and says so."""
    faults, state_dir = PlantedFaults(tmp_path / "record", "draft.before_ready:stop@1"), tmp_path / "state"
    options = ("--device", "cpu", "--metrics-port", "0", "--fixed-draft-tokens", "4")
    arguments = ("up", "--state-dir", str(state_dir), "--listen", "127.0.0.1:0", *options)
    with running(*arguments, environment=faults.environment) as up:
        log = state_dir / "scheduler.log"
        until(lambda: faults.have_failed and log.exists() and "waiting for the draft at" in log.read_text(), up)
        assert not (state_dir / "server").exists()
        draft = next(child for child in up.children() if any("/draft.sock" in word for word in child.cmdline()))
        until(lambda: draft.status() == psutil.STATUS_STOPPED, up)
        draft.resume()
        until((state_dir / "server").exists, up)
        found = status(state_dir)
        assert (found["algorithm"], found["draft_state"]) == ("standalone", "attached")
        assert "requests are served without it" not in up.errors()
        up.signal(signal.SIGINT)
        assert up.end() == 0


@pytest.mark.parametrize(
    ("states", "last_end", "num_looks"),
    [
        (["missing", "catching up", "attached", "attached"], "", 3),
        (["", "attached"], "", 1),
        (["missing", "attached"], "was killed by SIGKILL", 1),
        (["missing"] * 100, "", 6),
    ],
)
async def test_a_draft_is_waited_for_unless_it_failed_or_takes_long(
    monkeypatch: pytest.MonkeyPatch, states: list[str], last_end: str, num_looks: int
) -> None:
    monkeypatch.setattr(run, "_DRAFT_POLL_S", 0.0)
    looks: list[str] = []

    async def fetch_status(server: str) -> Any:
        looks.append(server)
        return SimpleNamespace(state=SimpleNamespace(draft_state=states[len(looks) - 1]))

    monkeypatch.setattr(run, "fetch_status", fetch_status)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: float(len(looks))))
    draft = SimpleNamespace(command=SimpleNamespace(is_optional=True), last_end=last_end)
    supervisor = cast("Supervisor", SimpleNamespace(services=lambda: [draft]))
    status = await run._with_draft("here", supervisor)
    assert len(looks) == num_looks
    assert status.state.draft_state == states[num_looks - 1]


def _gateways(server: str) -> dict[str, ServiceState]:
    with Client(server) as client:
        return {service.name: service for service in client.server_info().services if "gateway" in service.name}


@pytest.mark.slow
def test_gateways_serve_one_port_and_come_back(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with running_up(state_dir, "--gateways", "2", "--device", "cpu", "--slots", "4", "--threads", "1") as up:
        server = (state_dir / "server").read_text()
        before = _gateways(server)
        assert before.keys() == {"gateway-0", "gateway-1"}
        assert len({gateway.metrics_port for gateway in before.values()}) == 2
        with pytest.raises(AddressInUseError), Listener.claim(server, is_shared=True):
            pass
        os.kill(before["gateway-1"].pid, signal.SIGKILL)
        until(lambda: _is_back(server, before["gateway-1"]), up)
        created = [_create(server, f"job-{number}") for number in range(8)]
        for number in range(8):
            with Client(server) as client:
                # By another connection, which another gateway may have taken.
                tokens = [token for chunk in client.watch_job(f"job-{number}") for token in chunk.token_ids]
                assert len(tokens) == 5
                assert client.get_job(f"job-{number}").attempt == created[number]
        shown = status(state_dir)
        assert shown["healthy"]
        names = [service["name"] for service in shown["services"]]
        assert names == ["gateway-0", "gateway-1", "scheduler", "verify", "draft", "grammar"]
        assert _gateways(server)["gateway-0"].pid == before["gateway-0"].pid
        up.signal(signal.SIGTERM)
        assert up.end() == 0
    assert leftovers(state_dir) == []


def _is_back(server: str, before: ServiceState) -> bool:
    try:
        return all(_gateways(server)["gateway-1"].pid not in (0, before.pid) for _ in range(4))
    except UnavailableError:
        # The new one has no scheduler yet.
        return False


def _create(server: str, job_id: str) -> int:
    with Client(server) as client:
        return client.create_job("def f(", job_id=job_id, max_new_tokens=5, ignore_eos=True).attempt


NUM_TOKENS = 400


async def generate(server: str, at_token: int = -1, stop: int = 0) -> list[int]:
    """The tokens of a stream; the process `stop` is stopped once there are `at_token` of them."""
    tokens: list[int] = []
    async with AsyncClient(server) as client:
        stream = client.generate("def add(a, b):\n", max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        async for chunk in stream:
            tokens += chunk.token_ids
            if stop and len(tokens) >= at_token:
                os.kill(stop, signal.SIGSTOP)
                stop = 0
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gateway", "scheduler", "verify", "draft"])
async def test_a_stopped_service_is_replaced_while_a_client_streams_on(tmp_path: Path, name: str) -> None:
    with running_up(tmp_path, "--hang-timeout-s", "3") as up:
        server = (tmp_path / "server").read_text()
        expected = await generate(server)
        before = {service["name"]: service["pid"] for service in status(tmp_path)["services"]}
        assert await generate(server, at_token=50, stop=before[name]) == expected
        assert len(expected) == NUM_TOKENS
        # A stream may have ended before that, without the draft.
        line = f"{name} did not answer for 3 s and was killed and is started again"
        while line not in up.errors():
            assert not up.has_ended
            await generate(server)
        found = status(tmp_path)
        assert before[name] not in {service["pid"] for service in found["services"]}
        restarts = {service["name"]: service["num_restarts"] for service in found["supervised"]}
        assert restarts == {other: int(other == name) for other in before}


JOBS = {f"job-{number}": number for number in range(4)}
"""With their seeds."""
SAMPLING: dict[str, Any] = {"max_new_tokens": 600, "temperature": 0.8, "ignore_eos": True}
OPTIONS = ("--device", "cpu", "--journal", "power", "--metrics-port", "0")
UPTIME_S = 1


def after_boot() -> tuple[str, ...]:
    """The prefix of a command on a host that was booted UPTIME_S ago."""
    back_s = int(time.clock_gettime(time.CLOCK_BOOTTIME)) - UPTIME_S
    offsets = f"--monotonic=-{back_s}", f"--boottime=-{back_s}"
    return ("unshare", "--time", *offsets, "--fork", "--kill-child")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_unfinished_jobs_go_on_after_a_boot(tmp_path: Path) -> None:
    if subprocess.run((*after_boot(), "true"), capture_output=True, check=False).returncode:
        pytest.skip("this user may make no time namespace: that needs root, and `unshare` of util-linux 2.36")
    with running_up(tmp_path, *OPTIONS) as up, Client((tmp_path / "server").read_text()) as client:
        for name, seed in JOBS.items():
            client.create_job("class Graph:\n", job_id=name, seed=seed, **SAMPLING)
        created_at = time.monotonic()
        assert next(client.watch_job("job-3")).token_ids
        up.signal(signal.SIGKILL)
        up.end()
        (tmp_path / "server").unlink()
    while time.monotonic() < created_at + UPTIME_S + 2:
        time.sleep(0.05)  # until the jobs are older than the host of the next `up`
    with running_up(tmp_path, *OPTIONS, prefix=after_boot()) as up, Client((tmp_path / "server").read_text()) as client:
        for name, seed in JOBS.items():
            expected = client.generate("class Graph:\n", seed=seed, **SAMPLING)
            tokens = [token for chunk in client.watch_job(name) for token in chunk.token_ids]
            assert tokens == [token for chunk in expected for token in chunk.token_ids]
        for child in up.children():
            if "slipstream.cli.main" in child.cmdline():
                child.send_signal(signal.SIGTERM)
        assert up.end() == 0
