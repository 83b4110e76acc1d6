"""The numbers between two readings, and how they are shown: without any server."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client import generate_latest
from rich.console import Console

from slipstream.cli.status import Look, Reading, ServerStatus, Watcher, frame, print_lines
from slipstream.common.errors import UnavailableError
from slipstream.common.rpc.metrics import Scrape, joined, make_registry
from slipstream.common.wire.server import ServiceState
from slipstream.gateway.metrics import RequestMetrics
from slipstream.scheduler.telemetry.step_metrics import (
    DECODE,
    DRAFT_TO_VERIFY,
    PREFILL,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    StepMetrics,
    StepTiming,
)
from tests.harness.example_states import STATE

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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
            self.steps.drafted(np.array([0, 2, 1, 1], np.int32), np.full(4, fill_value=True), 2)
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


def worked(server: Server | None = None) -> Look:
    """A look at a server that worked for two seconds."""
    server = server or Server()
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

    watcher = Watcher(read)
    found = [await watcher.look() for _ in range(len(script))]
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
    assert row(look, "runs").startswith("[bold]target[/]; algorithm standalone, 2 draft tokens a step, host fences")
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
