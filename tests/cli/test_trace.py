"""`slipstream trace` beside the real services, and what it says when there is nothing to trace."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.trace import fetch_requests
from slipstream.client import Client
from slipstream.common.wire.server import ServiceState
from tests.harness.grpc_server import running_server, unserved_address
from tests.harness.running import running, slipstream, until
from tests.harness.trace_format import check, slices_by_thread

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import ServeState
    from tests.harness.running import Running

pytestmark = pytest.mark.timeout(120)


def generate_until_the_end(trace: Running, address: str) -> None:
    """Has the server run short requests for as long as the command waits for steps."""
    with Client(address) as client:
        while not trace.has_ended:
            list(client.generate("class Queue:", ignore_eos=True, max_new_tokens=4))


@pytest.mark.usefixtures("up")
def test_a_trace_of_a_running_server(state_dir: Path, tmp_path: Path) -> None:
    server, out = ("--state-dir", str(state_dir)), tmp_path / "out.json"
    nothing = slipstream("trace", *server, "--wait-s", "0.1", str(out))
    address = (state_dir / "server").read_text()
    with running("trace", *server, "--steps", "20", "--wait-s", "30", str(out)) as trace:
        generate_until_the_end(trace, address)
        assert trace.end() == 0, trace.errors()
        assert trace.errors().startswith("steps ")
        assert f"(one clock) are in {out}: open it in " in trace.errors()
    with running("trace", *server, "--steps", "10", "--wait-s", "30", "-") as to_standard_output:
        generate_until_the_end(to_standard_output, address)
        assert to_standard_output.end() == 0, to_standard_output.errors()
        piped = json.loads(to_standard_output.output())
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert nothing.stderr == "slipstream: error: no step was complete within 0.1 s: ask while requests run\n"
    written = json.loads(out.read_text(encoding="utf-8"))
    for content, num_steps in ((written, 20), (piped, 10)):
        check(content)
        assert content["otherData"]["steps"] == num_steps
        threads = slices_by_thread(content)
        assert {process for process, _ in threads} == {1, 2, 3, 4}
        kernels = [e for e in threads[3, 32] if e["cat"] == "kernel"]
        first = kernels[0]["args"]["step"]
        assert [e["args"]["step"] for e in kernels] == list(range(first, first + num_steps))
    assert list(tmp_path.glob(".*")) == []
    threads = slices_by_thread(written)
    requests = [e for (process, _), slices in threads.items() if process == 4 for e in slices]
    assert {e["name"] for e in requests} == {"tokenise", "submit", "first token"}
    prefills = [e for e in threads[3, 32] if e["name"].startswith("verify prefill")]
    begin, end = threads[1, 12][0]["ts"], threads[3, 32][-1]["ts"]
    waits = [(e["ts"], e["ts"] + e["dur"]) for e in requests if e["name"] == "first token"]
    inside = [(submitted, sent) for submitted, sent in waits if begin <= submitted and sent <= end]
    assert inside
    for submitted, sent in inside:
        # On one clock: the work on a request's prompt begins after it was submitted, before its first token is sent.
        assert any(submitted < e["ts"] < sent for e in prefills)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", ["0", "-1", "1001"])
def test_a_number_of_steps_out_of_range(tmp_path: Path, steps: str) -> None:
    found = slipstream("trace", "--steps", steps, str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"slipstream: error: --steps: got {steps}, accepted: 1 to 1000\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wait", ["0", "-1", "nan", "inf", "61"])
def test_a_wait_out_of_range(tmp_path: Path, wait: str) -> None:
    found = slipstream("trace", "--wait-s", wait, str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("slipstream: error: --wait-s: got ")


def test_a_file_that_cannot_be_written_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "missing" / "out.json", tmp_path / "file" / "out.json"):
        found = slipstream("trace", str(out))
        assert (found.returncode, found.stdout) == (2, "")
        assert found.stderr.startswith(f"slipstream: error: OUT: got '{out}', accepted: a file that this user can ")
        assert found.stderr.count("\n") == 1


def test_no_server_at_the_address(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("what was there before")
    with unserved_address() as address:
        found = slipstream("trace", "--server", address, str(out))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"slipstream: error: no answer from a server at {address}: ")
    assert found.stderr.count("\n") == 1
    assert out.read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_no_up_in_the_directory(tmp_path: Path) -> None:
    found = slipstream("trace", "--state-dir", str(tmp_path / "state"), str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (1, "")
    assert "no `slipstream up` is ready" in found.stderr


async def test_a_gateway_that_does_not_answer_has_no_row(
    serve_state: ServeState, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    address = await serve_state()
    gateways = [
        ServiceState(name="gateway-0", address=address, pid=1),
        ServiceState(name="gateway-1", address=f"unix:{tmp_path}/none/gateway.sock", pid=0),
    ]
    assert await fetch_requests(address, gateways, {}) == ()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("no times of requests from gateway-0: ")
    assert second.startswith("no times of requests from gateway-1: ")


async def test_a_scheduler_that_cannot_be_traced(serve_state: ServeState, tmp_path: Path) -> None:
    async with running_server() as scheduler:
        address = await serve_state(ServiceState(name="scheduler", address=scheduler.address, pid=1))
        found = await asyncio.to_thread(slipstream, "trace", "--server", address, str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"slipstream: error: the scheduler at {scheduler.address} is too old to be traced\n"


async def test_a_scheduler_that_cannot_be_reached_from_here(serve_state: ServeState, tmp_path: Path) -> None:
    scheduler = f"unix:{tmp_path}/none/scheduler.sock"
    address = await serve_state(ServiceState(name="scheduler", address=scheduler, pid=1))
    found = await asyncio.to_thread(slipstream, "trace", "--server", address, str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (1, "")
    assert f"no trace from the scheduler at {scheduler}: " in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.usefixtures("up")
def test_ctrl_c_ends_the_wait_and_leaves_nothing(state_dir: Path, tmp_path: Path) -> None:
    with running("trace", "--state-dir", str(state_dir), "--wait-s", "60", str(tmp_path / "out.json")) as trace:
        until(lambda: any(tmp_path.iterdir()), trace)
        trace.signal(signal.SIGINT)
        assert trace.end() != 0
        assert "Traceback" not in trace.errors()
    assert list(tmp_path.iterdir()) == []
