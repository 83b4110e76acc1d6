"""`slipstream status`, once and with --watch: of servers that say what they like, and of real ones."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from slipstream.cli import status as status_module
from slipstream.cli.process import ServiceReport
from slipstream.cli.status import Look, Reading, ServerStatus, fetch_status, frame, print_lines
from slipstream.cli.supervisor import Supervisor
from slipstream.client import AsyncClient, Client
from slipstream.common.errors import UnavailableError
from slipstream.common.rpc.metrics import Scrape, joined, make_registry
from slipstream.common.wire.server import ServerState, ServiceState
from slipstream.gateway.metrics import RequestMetrics
from slipstream.scheduler.metrics import (
    DECODE,
    DRAFT_TO_VERIFY,
    PREFILL,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    StepMetrics,
    StepTiming,
)
from tests.cli.conftest import MakeCommand, ServeState
from tests.harness.example_states import STATE
from tests.harness.grpc_server import unserved_address
from tests.harness.running import COMMAND, Running, running, running_up, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def far(tmp_path: Path) -> str:
    """The address of a socket whose folder is not on this host."""
    return f"unix:{tmp_path}/none/far.sock"


async def test_each_service_is_asked(serve_state: ServeState, fake_service: MakeCommand, far: str) -> None:
    async with Supervisor(ready_timeout_s=20, drain_timeout_s=5) as supervisor:
        ready = fake_service("ready")
        supervisor.start(ready)
        await supervisor.wait_ready()
        address = await serve_state(
            ServiceState(name="ready", address=ready.address, pid=1),
            ServiceState(name="gone", address=ready.address + ".gone", pid=2),
            ServiceState(name="far", address=far, pid=3),
        )
        status = await fetch_status(address)
    assert status.health == {"ready": "SERVING", "gone": "UNREACHABLE", "far": "ELSEWHERE"}
    assert not status.is_healthy
    assert json.loads(json.dumps(status.as_json()))["services"][1]["health"] == "UNREACHABLE"


async def test_a_cancellation_that_arrives_with_the_answer_ends_it(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be Ctrl-C of a watcher, which then would go on."""

    async def server_info(_: AsyncClient) -> ServerState:
        task.cancel()
        return STATE

    monkeypatch.setattr(AsyncClient, "server_info", server_info)
    task = asyncio.create_task(fetch_status(far))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_cannot_be_asked_from_here_is_not_held_against_it(serve_state: ServeState, far: str) -> None:
    address = await serve_state(ServiceState(name="far", address=far, pid=3))
    assert (await fetch_status(address)).is_healthy


async def test_a_server_of_another_user_is_not_held_against_it(
    serve_state: ServeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_dir(_: Path) -> bool:
        raise PermissionError("a folder of another user")

    address = await serve_state(ServiceState(name="verify", address="unix:/home/other/sockets/verify.sock", pid=3))
    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert (await fetch_status(address)).health == {"verify": "ELSEWHERE"}


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (("", 0.0, ""), "algorithm standalone, up to 4 draft tokens a step, host fences"),
        (
            ("attached", 11.7, ""),
            "algorithm standalone, up to 4 draft tokens a step, draft attached for 12 s, host fences",
        ),
        (("resting", 11.7, ""), "up to 4 draft tokens a step, draft attached for 12 s, resting now, host fences"),
        (("catching up", 0.2, ""), "draft catching up for 0 s, host fences"),
        (("missing", 200.0, "it died"), "without a draft for 3 min (it died), host fences"),
    ],
)
async def test_the_state_of_the_draft_is_said(
    serve_state: ServeState, draft: tuple[str, float, str], words: str
) -> None:
    status = await fetch_status(await serve_state())
    state, seconds, problem = draft
    changed = replace(status.state, draft_state=state, draft_state_seconds=seconds, draft_problem=problem)
    assert replace(status, state=changed).describe().endswith(words)


async def test_memory_that_a_draft_saves_is_said(serve_state: ServeState, far: str) -> None:
    draft = ServiceState(name="draft", address=far, pid=3, shared_weight_bytes=5 * 2**19)
    status = await fetch_status(await serve_state(draft))
    assert "draft borrows 2.5 MiB of the target's weights" in status.describe()
    assert status.as_json()["services"][0]["shared_weight_bytes"] == 5 * 2**19


async def test_restarts_are_shown_for_the_services_that_an_up_keeps(
    serve_state: ServeState, capsys: pytest.CaptureFixture[str], far: str
) -> None:
    def report(name: str, pid: int, state: str, last_end: str) -> ServiceReport:
        return ServiceReport(
            name=name, pid=pid, state=state, num_restarts=2, last_end=last_end, address=f"unix:/far/{name}.sock"
        )

    address = await serve_state(ServiceState(name="verify", address=far, pid=3))
    status = await fetch_status(address)
    reports = [report("verify", 3, "ready", "was killed by SIGKILL"), report("draft", 0, "died", "")]
    status.with_reports(reports).print()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    words = f"verify ELSEWHERE 3 2 (was killed by SIGKILL) {far} - -"
    assert words.split() in rows
    assert ["draft", "died", "-", "2", "unix:/far/draft.sock", "-", "-"] in rows
    supervised = json.loads(json.dumps(status.with_reports(reports).as_json()))["supervised"]
    assert [(each["name"], each["num_restarts"]) for each in supervised] == [("verify", 2), ("draft", 2)]
    assert status.with_reports([report("verify", 4, "ready", "")]) == status


INTERVAL = ("--interval-s", "0.2")
NUM_TOKENS = 100


def looks(watch: Running) -> list[dict[str, Any]]:
    """The whole lines that it printed until now."""
    return [json.loads(line) for line in watch.output().split("\n")[:-1]]


def test_it_watches_a_server_that_works(server: str) -> None:
    with running("status", "--watch", "--server", server, "--json", *INTERVAL) as watch:
        until(lambda: len(looks(watch)) > 1, watch)
        with Client(server) as client:
            list(client.generate("class Queue:", max_new_tokens=NUM_TOKENS, ignore_eos=True))

        def intervals() -> list[dict[str, Any]]:
            return [look["interval"] for look in looks(watch) if look["interval"]]

        def num_tokens() -> int:
            return round(sum(each["tokens_per_s"] * each["seconds"] for each in intervals()))

        until(lambda: num_tokens() >= NUM_TOKENS, watch)
        watch.signal(signal.SIGINT)
        assert watch.end() == 0
        assert watch.errors() == ""
        assert all(look["healthy"] for look in looks(watch))
        assert [service["health"] for service in looks(watch)[0]["services"]] == ["SERVING"] * 5
        worked = [each for each in intervals() if each["step_s"]]
        assert num_tokens() == NUM_TOKENS
        assert all(sum(each["bubbles_s"].values()) <= each["step_s"] for each in worked)
        assert all(each["overlap_efficiency"] <= 1 for each in worked)
        assert max(each["mean_accept_length"] or 0 for each in worked) > 1


@pytest.mark.slow
def test_it_follows_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with running("status", "--watch", "--state-dir", str(state_dir), "--json", *INTERVAL) as watch:

        def wait(is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            until(lambda: any(map(is_so, looks(watch))), watch)
            return next(filter(is_so, looks(watch)))

        assert "no `slipstream up` is ready" in wait(lambda look: True)["error"]
        with running_up(state_dir) as up:
            assert "answers since" in wait(lambda look: look["healthy"])["event"]
            up.signal(signal.SIGINT)
            assert up.end() == 0
        wait(lambda look: "no answer" in (look["event"] or "") and "no `slipstream up` is ready" in look["error"])
        seen = len(looks(watch))
        with running_up(state_dir):
            until(lambda: any(look["interval"] for look in looks(watch)[seen:]), watch)
            again = [look for look in looks(watch)[seen:] if look["healthy"]]
        assert "started anew" in again[0]["event"]
        assert again[0]["interval"] is None
        watch.signal(signal.SIGINT)
        assert watch.end() == 0
        assert watch.errors() == ""


def test_lines_elsewhere_and_one_table_on_a_terminal(server: str, state_dir: Path) -> None:
    with running("status", "--watch", "--server", server, *INTERVAL) as watch:
        until(lambda: "overlap" in watch.output(), watch)
        on_terminal, exit_status = watched_on_a_terminal("--state-dir", str(state_dir))
        watch.signal(signal.SIGTERM)
        assert watch.end() == 0
        assert watch.errors() == ""
        blocks = watch.output().rstrip("\n").split("\n\n")
    assert len(blocks) >= 2
    for block in blocks:
        assert "\x1b" not in block
        assert block.count("SERVING") == 5
    assert exit_status == 0
    assert on_terminal.count("scheduler") >= 2
    assert "\x1b[" in on_terminal


def watched_on_a_terminal(*options: str) -> tuple[str, int]:
    """Returns its output on a terminal until Ctrl-C, which comes when the first interval is there, and its status."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = (*COMMAND, "status", "--watch", *INTERVAL, *options)
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written, is_asked = b"", False
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody writes to it any more
            break
        if not is_asked and b"overlap" in written:
            process.send_signal(signal.SIGINT)
            is_asked = True
    os.close(ours)
    return written.decode(), process.wait()


def test_nobody_at_the_address_is_said_and_asked_again() -> None:
    with (
        unserved_address() as server,
        running("status", "--watch", "--server", server, *INTERVAL) as watch,
    ):
        until(lambda: watch.output().count(f"no answer from a server at {server}") >= 2, watch)
        watch.signal(signal.SIGINT)
        assert watch.end() == 0


AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1)))
MS = 1_000_000


class Server:
    """The real metrics of a scheduler and a gateway that a test tells what to count."""

    def __init__(self) -> None:
        self.registries: dict[str, CollectorRegistry] = {name: make_registry() for name in ("scheduler", "gateway")}
        self.requests = RequestMetrics(self.registries["gateway"], num_running=lambda: 2, num_waiting=lambda: 3)
        self.steps = StepMetrics(self.registries["scheduler"])
        self.steps.measure(fence="host", mps="no", algorithm="standalone")

    def read(self, at_s: float, *, pid: int = 7, gateway_pid: int = 6, health: str = "SERVING") -> Reading:
        """The server's state and metrics now."""
        pages = {name: Scrape.read(generate_latest(registry).decode()) for name, registry in self.registries.items()}
        status = server_status(pid=pid, gateway_pid=gateway_pid, health=health)
        return Reading(at_s=at_s, status=status, metrics=joined(pages))

    def work(self) -> None:
        """Ten decode steps of 5 ms, a prefill step, drafts, and two requests of which one ends."""
        bubbles = {VERIFY_TO_DRAFT: MS // 2, DRAFT_TO_VERIFY: MS // 4}
        for _ in range(10):
            self.steps.observe(
                lambda: StepTiming(
                    phase=DECODE, draft_ns=MS, verify_ns=13 * MS // 4, wall_ns=5 * MS, bubbles_ns=bubbles
                )
            )
            self.steps.decoded("", np.array([0, 2, 1, 1], np.uint32), np.full(4, 2, np.int32))
        self.steps.observe(
            lambda: StepTiming(
                phase=PREFILL, draft_ns=0, verify_ns=20 * MS, wall_ns=25 * MS, bubbles_ns={VERIFY_TO_VERIFY: 0}
            )
        )
        for _ in range(2):
            self.requests.started(prompt_tokens=8, queue_seconds=0, first_token_seconds=0.015)
        self.requests.went_on(40, 40 * 0.005)
        self.requests.generation_tokens.inc(42)
        self.requests.finished("length", 0.3)


def server_status(*, pid: int = 7, gateway_pid: int = 6, health: str = "SERVING") -> ServerStatus:
    """Status of a server with a gateway and a scheduler, which has this health."""
    services = (
        ServiceState(name="gateway", address="127.0.0.1:1", pid=gateway_pid),
        ServiceState(name="scheduler", address="unix:/run/scheduler.sock", pid=pid),
    )
    sizes = {"num_slots": 4, "num_pages": 40, "num_free_pages": 30, "queue_capacity": 5, "num_waiting": 3}
    state = replace(
        STATE, model="[bold]target[/]", num_preemptions=2, fence="host", epoch=1, services=services, **sizes
    )
    return ServerStatus(server="127.0.0.1:1", state=state, health={"gateway": "SERVING", "scheduler": health})


def worked() -> Look:
    """A look at a server that worked for two seconds."""
    server = Server()
    server.work()
    before = server.read(10.0)
    server.work()
    after = server.read(12.0)
    return Look(at=AT, reading=after, interval=after.since(before))


def text(look: Look, width: int = 100) -> str:
    """As it is printed."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(frame(look))
    return captured.get()


def row(look: Look, name: str) -> str:
    """The line that begins with this name, without it."""
    return next(line for line in text(look, 200).splitlines() if line.startswith(name)).removeprefix(name).strip()


def test_the_numbers_are_those_of_the_interval() -> None:
    found = worked().interval
    assert found is not None
    assert (found["seconds"], found["steps_per_s"], found["tokens_per_s"]) == (2.0, 5.5, 21.0)
    assert found["step_s"] == pytest.approx(0.075 / 11)
    assert found["bubbles_s"] == pytest.approx({"verify_to_draft": 0.005 / 11, "draft_to_verify": 0.0025 / 11})
    assert found["overlap_efficiency"] == pytest.approx(1 - 7.5 / 75)
    assert found["mean_accept_length"] == 2.0


def test_nothing_done_is_no_number() -> None:
    server = Server()
    later = server.read(2.0)
    found = later.since(server.read(1.0))
    assert found is not None
    assert found["overlap_efficiency"] is found["step_s"] is found["mean_accept_length"] is None
    assert "no steps" in text(Look(at=AT, reading=later, interval=found))


def test_another_process_is_not_subtracted() -> None:
    server = Server()
    before = server.read(1.0, pid=7)
    assert server.read(2.0, pid=8).since(before) is None
    assert server.read(2.0, gateway_pid=8).restarted(before) == ["gateway"]
    key = ("process_start_time_seconds", (("job", "scheduler"),))
    assert before.metrics is not None
    older = Scrape({**before.metrics.samples, key: before.metrics.samples[key] - 100})
    same_pid = Reading(at_s=0.5, status=before.status, metrics=older)
    assert before.restarted(same_pid) == ["scheduler"]
    assert before.since(same_pid) is None
    assert before.since(None) is None


def test_without_metrics_there_are_no_numbers_and_it_is_no_restart() -> None:
    full = Server().read(1.0)
    bare = Reading(at_s=2.0, status=server_status(), metrics=None, why_no_metrics="it serves no metrics")
    assert not bare.restarted(full)
    assert bare.since(full) is None
    look = Look(at=AT, reading=bare, error=bare.why_no_metrics)
    assert row(look, "error") == "it serves no metrics"
    assert row(look, "requests") == "2 of 4 running, 3 of 5 waiting"
    assert json.loads(json.dumps(look.as_json()))["error"] == "it serves no metrics"


async def test_what_happened_to_the_server_is_told() -> None:
    server = Server()
    first = server.read(1.0)
    status = first.status
    later_epoch = dataclasses.replace(status, state=dataclasses.replace(status.state, epoch=2))
    script: list[Reading | None] = [
        first,
        server.read(2.0),
        Reading(at_s=3.0, status=later_epoch, metrics=first.metrics),
        None,
        None,
        Reading(at_s=6.0, status=later_epoch, metrics=first.metrics),
        server.read(7.0, pid=8),
    ]

    async def read() -> Reading:
        reading = script.pop(0)
        if reading is None:
            raise UnavailableError("no answer")
        return reading

    watched = status_module.looks(read)
    found = [await anext(watched) for _ in range(len(script))]
    events = ["", "", "workers attached anew, epoch 2", "no answer since", "no answer since", "answers since"]
    for look, event in zip(found, [*events, "the scheduler was started anew"], strict=True):
        assert look.event.startswith(event)
        assert bool(look.event) == bool(event)
    assert "without an answer" in found[5].event
    assert [look.interval is not None for look in found] == [False, True, True, False, False, True, False]
    across = found[5].interval
    assert across is not None
    assert across["seconds"] == 3.0  # since the last that was read


def test_the_table_says_it_all() -> None:
    look = worked()
    assert row(look, "overlap") == "90.0% of the steps' time is work"
    assert row(look, "step") == "6.82 ms; 5.5 steps per second"
    assert row(look, "bubbles") == "verify_to_draft 0.455 ms (6.7%), draft_to_verify 0.227 ms (3.3%)"
    assert row(look, "accept") == "2.00 tokens a step"
    assert row(look, "tokens") == "21.0 per second"
    assert row(look, "requests") == "2 of 4 running, 3 of 5 waiting"
    assert row(look, "KV") == "10 of 40 pages, 25.0%; 2 preemptions"
    assert row(look, "runs").startswith(
        "[bold]target[/]; algorithm standalone, up to 2 draft tokens a step, host fences"
    )
    assert row(look, "scheduler").split() == ["SERVING", "pid", "7", "unix:/run/scheduler.sock"]
    assert row(look, "gateway").split() == ["SERVING", "pid", "6", "127.0.0.1:1"]


def test_a_look_is_one_json_object_without_nan() -> None:
    found = json.loads(json.dumps(worked().as_json(), allow_nan=False))
    assert found["time"] == "2026-01-02T03:04:05.000+01:00"
    assert found["interval"]["mean_accept_length"] == 2.0
    assert found["healthy"] is True
    gone = Look(at=AT, reading=None, error="nobody there", event="no answer since 03:04:05")
    assert json.loads(json.dumps(gone.as_json()))["error"] == "nobody there"


def test_lines_have_no_trailing_blanks_and_an_empty_line_behind_them() -> None:
    output = io.StringIO()
    console = Console(file=output, width=160, color_system=None)
    print_lines(console, worked())
    print_lines(console, Look(at=AT, reading=None, error="nobody [there]"))
    lines = output.getvalue().split("\n")
    assert all(line == line.rstrip() for line in lines)
    assert any(line.endswith("nobody [there]") for line in lines)
    assert lines.count("") == 3  # behind each of the two, and behind the last line's end


def test_everything_fits_a_small_terminal() -> None:
    assert len(text(worked(), width=80).splitlines()) <= 22


def test_it_starts_without_what_only_workers_need() -> None:
    code = "import sys, slipstream.cli.status; print('torch' in sys.modules)"
    found = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout == "False\n"
