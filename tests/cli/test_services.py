"""The real services, through the command line: up, status, generate."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.client import Client
from tests.harness.planted_faults import PlantedFaults
from tests.harness.running import Running, leftovers, running, running_up, slipstream, status, until
from tests.harness.waiting import block_until

MODULES = {
    *("slipstream.gateway.main", "slipstream.scheduler.main"),
    *(f"slipstream.services.{worker}_main" for worker in ("verify", "draft", "grammar")),
}
"""The modules that an `up`'s services run."""


def test_status_shows_every_service(server: str, up: Running) -> None:
    names = {"gateway", "scheduler", "draft", "verify", "grammar"}
    shown: dict[str, Any] = {"services": []}

    def is_complete() -> bool:
        # The grammar worker is attached beside the steps.
        found = slipstream("status", "--server", server, "--json")
        assert found.returncode == 0
        shown.update(json.loads(found.stdout))
        return {service["name"] for service in shown["services"]} == names

    until(is_complete, up)
    assert shown["healthy"]
    assert {service["pid"] for service in shown["services"]} == {child.pid for child in up.children()}
    assert all(service["health"] == "SERVING" and service["metrics_port"] for service in shown["services"])
    table = slipstream("status", "--server", server)
    assert table.returncode == 0
    assert "SERVING" in table.stdout


@pytest.mark.usefixtures("up")
def test_metrics_and_logs_are_as_an_operator_wants_them(state_dir: Path, metrics_port: int) -> None:
    ports = {service["name"]: service["metrics_port"] for service in status(state_dir)["services"]}
    names = ("scheduler", "verify", "draft", "gateway", "door", "grammar")
    assert ports == {name: metrics_port + number for number, name in enumerate(names) if name != "door"}
    for name in ports:
        lines = [json.loads(line) for line in (state_dir / f"{name}.log").read_text().splitlines()]
        assert {line["service"] for line in lines} == {name}


def test_generate_streams_text_and_reports(server: str) -> None:
    options = ("generate", "--server", server, "--max-new-tokens", "24", "--temperature", "0.8", "--seed", "7")
    plain = slipstream(*options, "def add(a, b):\n")
    assert plain.returncode == 0, plain.stderr
    report = json.loads(slipstream(*options, "--json", "-", stdin="def add(a, b):\n").stdout.splitlines()[-1])
    assert plain.stdout.rstrip("\n") == report["text"].rstrip("\n")
    assert len(report["token_ids"]) <= 24
    assert report["finish_reason"] in ("stop", "length")
    assert report["total_draft_tokens"] > report["total_accepted_tokens"] > 0
    assert 1 < report["mean_accept_length"] <= 5


def test_a_bad_parameter_is_one_line_that_names_it(server: str) -> None:
    found = slipstream("generate", "--server", server, "--top-p", "1.5", "x")
    assert found.returncode == 2
    assert found.stderr == "slipstream: error: --top-p: got 1.5, accepted: above 0 to 1\n"


def test_an_interrupt_cancels_the_job(held_server: str) -> None:
    options = ("--max-new-tokens", "100", "--job-id", "interrupted")
    with running("generate", "--server", held_server, *options, "import os\n") as generate:
        until(lambda: bool(generate.output()), generate)
        generate.signal(signal.SIGINT)
        assert generate.end() == 130
        assert "Traceback" not in generate.errors()
    with Client(held_server) as client:
        block_until(lambda: client.get_job("interrupted").is_over)
        assert client.get_job("interrupted").abort_cause == "disconnected"


def test_a_second_up_is_refused_and_the_first_serves_on(server: str, state_dir: Path, tmp_path: Path) -> None:
    same_dir = slipstream("up", "--state-dir", str(state_dir), "--listen", "127.0.0.1:0")
    assert (same_dir.returncode, "--state-dir: got" in same_dir.stderr) == (2, True)
    same_port = slipstream("up", "--state-dir", str(tmp_path / "other"), "--listen", server)
    assert (same_port.returncode, "--listen: got" in same_port.stderr) == (2, True)
    assert slipstream("status", "--server", server).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gateway", "scheduler", "draft"])
def test_up_starts_a_dead_service_again(tmp_path: Path, name: str) -> None:
    def services() -> dict[str, int]:
        return {service["name"]: service["pid"] for service in status(tmp_path)["services"]}

    with running_up(tmp_path) as up:
        before, server = services(), (tmp_path / "server").read_text()
        os.kill(before[name], signal.SIGKILL)
        until(lambda: up.errors().count(f"{name}: ready") == 2, up)
        until(lambda: slipstream("status", "--server", server).returncode == 0, up)
        # A draft is listed once it takes part, a moment after it is ready.
        until(lambda: services().keys() == before.keys(), up)
        after = services()
        assert [each for each in after if after[each] != before[each]] == [name]
        found = slipstream("generate", "--server", server, "--max-new-tokens", "8", "def add(a, b):\n")
        assert found.returncode == 0, found.stderr
        assert f"{name} was killed by SIGKILL and is started again" in up.errors()
        assert "Slipstream" in up.output()  # the table from when it was ready
        children = up.children()
        up.signal(signal.SIGINT)
        assert up.end() == 0
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not leftovers(tmp_path)


def test_a_proxy_of_the_environment_is_not_asked(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert slipstream("status", "--server", server).returncode == 0
    assert slipstream("generate", "--server", server, "--max-new-tokens", "2", "x").returncode == 0
    trace = slipstream("trace", "--server", server, "--wait-s", "0.1", str(tmp_path / "out.json"))
    assert "no step was complete within 0.1 s" in trace.stderr


@contextmanager
def loading_up(state_dir: Path) -> Iterator[tuple[Running, dict[str, psutil.Process]]]:
    """An `up` that is never ready, whose workers load their models or have them, and its services by module."""
    faults = PlantedFaults(state_dir / "record", "scheduler.before_attach:hang@1")
    children: dict[str, psutil.Process] = {}
    command = ("up", "--state-dir", str(state_dir), "--listen", "127.0.0.1:0")

    def are_there() -> bool:
        with suppress(psutil.NoSuchProcess):
            named = ((word, child) for child in up.children() for word in child.cmdline() if word in MODULES)
            children.update(named)
        have_begun = all(list(state_dir.glob(f"sockets/{worker}*.lock")) for worker in ("verify", "draft"))
        return have_begun and children.keys() == MODULES

    with running(*command, environment=faults.environment) as up:
        until(are_there, up)
        yield up, children
    assert not psutil.wait_procs(children.values(), timeout=60)[1]


def test_up_ends_when_a_service_dies_while_it_loads(tmp_path: Path) -> None:
    with loading_up(tmp_path) as (up, children):
        children["slipstream.scheduler.main"].kill()
        assert up.end() == 1
        assert "scheduler was killed by SIGKILL before it was ready" in up.errors()
    assert not leftovers(tmp_path)


@pytest.mark.slow
def test_services_die_with_a_killed_up_and_the_next_one_drains(tmp_path: Path) -> None:
    with loading_up(tmp_path) as (up, _):
        up.signal(signal.SIGKILL)
        up.end()
    with running_up(tmp_path) as up:
        assert status(tmp_path)["healthy"]
        children = up.children()
        assert len(children) == 5
        server = (tmp_path / "server").read_text()
        # A request that runs when the first signal comes is finished.
        with running("generate", "--server", server, "--max-new-tokens", "400", "--ignore-eos", "x") as job:
            until(lambda: bool(job.output()), job)
            up.signal(signal.SIGTERM)
            assert job.end() == 0, job.errors()
        assert up.end() == 0
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not leftovers(tmp_path)


def test_the_first_interrupt_stops_and_the_second_does_not_wait(tmp_path: Path) -> None:
    with loading_up(tmp_path) as (up, children):
        children["slipstream.gateway.main"].suspend()
        up.signal(signal.SIGINT)
        until(lambda: "gateway: stopping" in up.errors(), up)
        up.signal(signal.SIGINT)
        assert up.end() == 130
    assert not leftovers(tmp_path)
