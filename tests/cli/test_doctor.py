"""`slipstream doctor`: the whole of it on the CPU, and each check where something is wrong."""

from __future__ import annotations

import json
import resource
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from slipstream import bundled
from slipstream.cli import doctor as checks
from slipstream.cli import hand_over
from slipstream.cli.doctor import (
    Verdict,
    check_descriptors,
    check_models,
    check_namespaces,
    check_port,
    check_shm,
    check_state_dir,
    run_doctor,
)
from slipstream.cli.hand_over import TIMED, HandOver, measure
from slipstream.cli.models import ModelChoice
from slipstream.common.device.choose import cuda_obstacle
from slipstream.common.errors import FailedPreconditionError
from slipstream.services.models.config import FAMILIES
from tests.harness.running import free_ports, slipstream

pytestmark = pytest.mark.timeout(120)

BUNDLED = ModelChoice(target=bundled.target_dir(), draft=bundled.standalone_dir(), algorithm="standalone")


@pytest.fixture(autouse=True, scope="module")
def resource_tracker_of_this_process() -> None:
    """Starts the helper of `multiprocessing`, which stays until this process ends, before children are counted."""
    resource_tracker.ensure_running()


def examined(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and the findings by name."""
    found = slipstream("doctor", "--json", *arguments, timeout_s=100)
    report = json.loads(found.stdout)
    assert report["ok"] is (found.returncode == 0)
    return found.returncode, {finding["name"]: finding for finding in report["findings"]}


@pytest.mark.slow
def test_two_processes_hand_over_on_the_cpu(tmp_path: Path) -> None:
    first = free_ports(7)
    ports = ("--listen", f"127.0.0.1:{first}", "--metrics-port", str(first + 1))
    arguments = ("--device", "cpu", "--state-dir", str(tmp_path / "state"), *ports)
    _, findings = examined(*arguments)
    for name in ("shared memory of two processes", "hand-over between two processes", "target model", "draft model"):
        assert findings[name]["verdict"] == "ok", findings[name]
    assert "host fence" in findings["hand-over between two processes"]["detail"]
    assert {"overlap, kernels of 1 ms a step", "overlap, kernels of 5 ms a step"} <= set(findings)
    assert findings["port for clients"]["verdict"] == "ok"
    for service, number in {"scheduler": 1, "verify": 2, "draft": 3, "gateway": 4, "grammar": 6}.items():
        assert findings[f"port for metrics of {service}"]["detail"] == f"127.0.0.1:{first + number} is free"
    assert not (tmp_path / "state").exists()


@pytest.fixture
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the two processes, which take seconds."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "")  # is restored with it
    monkeypatch.setattr(checks, "check_sharing_on_cpu", lambda: iter(()))


@pytest.mark.usefixtures("nothing_shared")
async def test_what_is_wrong_comes_with_a_remedy_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        assert await run_doctor(BUNDLED, "cpu", taken, 0, tmp_path / "state", as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    for name in (f"✗ state directory {tmp_path}/state: ", f"✗ port for clients: {taken}: "):
        (index,) = [number for number, line in enumerate(lines) if line.startswith(name)]
        assert lines[index + 1].startswith("    → ")
    assert lines[-1] == "This host cannot serve as it is."


@pytest.mark.usefixtures("nothing_shared", "up")
async def test_ports_of_a_running_server_are_no_fault(
    server: str, metrics_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_doctor(BUNDLED, "cpu", server, metrics_port, tmp_path / "state", as_json=True) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    names = [
        f"port for {what}"
        for what in ("clients", *(f"metrics of {name}" for name in ("scheduler", "gateway", "grammar")))
    ]
    assert [findings[name]["verdict"] for name in names] == ["note"] * 4
    assert findings[names[1]]["detail"] == f"a service's metrics are at 127.0.0.1:{metrics_port} already"


class AnswersInBytes(BaseHTTPRequestHandler):
    """Has no text."""

    def do_GET(self) -> None:
        """Answers with bytes that are no UTF-8."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"\xff\xfe")


@pytest.mark.parametrize("handler", [BaseHTTPRequestHandler, AnswersInBytes])
async def test_a_port_of_another_program_is_taken(handler: type[BaseHTTPRequestHandler]) -> None:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = await check_port("metrics of verify", f"127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert found.verdict is Verdict.FAILED


@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.skipif(cuda_obstacle() is None, reason="there is a GPU")
async def test_a_gpu_that_is_asked_for_and_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_doctor(BUNDLED, "cuda", f"127.0.0.1:{free_ports(1)}", 0, tmp_path, as_json=True) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["CUDA"]["verdict"] == "failed"
    assert findings["CUDA"]["remedy"] == cuda_obstacle()
    assert "hand-over between two processes" not in findings


@pytest.mark.slow
def test_every_hand_over_is_timed() -> None:
    found = measure("cpu", "auto", {})
    assert (found.fence_kind, found.under_mps) == ("host", False)
    assert len(found.times_us) == TIMED
    assert 0 < min(found.times_us) <= found.p50_us <= found.p99_us


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "run_peer", print)  # ends without an answer
    with pytest.raises(FailedPreconditionError, match="ended by itself"):
        measure("cpu", "auto", {})


@pytest.mark.slow
def test_what_a_process_cannot_do_is_the_error() -> None:
    with pytest.raises(FailedPreconditionError, match="TypeError: str expected"):
        measure("cpu", "auto", {"SLIPSTREAM": 1})  # type: ignore[dict-item]


def test_overlap_loses_two_hand_overs_a_step() -> None:
    found = HandOver("host", under_mps=False, times_us=(100.0, 125.0, 150.0))
    assert found.overlap(1.0) == pytest.approx(1 / 1.25)
    assert found.overlap(5.0) == pytest.approx(5 / 5.25)


def test_shared_memory_by_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_shm(tmp_path / "nothing").verdict is Verdict.FAILED
    for least, enough, verdict in ((0, 0, Verdict.OK), (0, 1 << 60, Verdict.NOTE), (1 << 60, 1 << 60, Verdict.FAILED)):
        monkeypatch.setattr(checks, "FEWEST_SHM_BYTES", least)
        monkeypatch.setattr(checks, "ENOUGH_SHM_BYTES", enough)
        found = check_shm(tmp_path)
        assert found.verdict is verdict
        assert bool(found.remedy) is (verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("soft", "verdict"),
    [(100, Verdict.FAILED), (1024, Verdict.NOTE), (65536, Verdict.OK), (resource.RLIM_INFINITY, Verdict.OK)],
)
def test_descriptors(soft: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    assert check_descriptors().verdict is verdict


def test_namespaces_of_a_container_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pid:[" in check_namespaces().detail
    monkeypatch.setattr(checks, "_FIRST_NAMESPACES", {"pid": "pid:[1]", "ipc": "ipc:[1]"})
    assert check_namespaces().verdict is Verdict.NOTE


def test_a_state_directory_with_too_long_a_name(tmp_path: Path) -> None:
    assert check_state_dir(tmp_path / ("x" * 100)).verdict is Verdict.FAILED
    (tmp_path / "own").mkdir(mode=0o700)
    assert check_state_dir(tmp_path / "own").verdict is Verdict.OK
    (tmp_path / "file").touch()
    assert check_state_dir(tmp_path / "file" / "below").verdict is Verdict.FAILED


async def test_an_address_that_is_nobodys_here() -> None:
    found = await check_port("clients", "192.0.2.1:50051")
    assert found.verdict is Verdict.FAILED
    assert "192.0.2.1:50051" in found.detail


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    models = replace(BUNDLED, draft=tmp_path)
    target, draft = check_models(models)
    assert target.verdict is Verdict.OK
    assert draft.verdict is Verdict.FAILED
    got, supported = draft.detail.split(", supported: ")
    assert got == f"{tmp_path}: config.json: architectures: got ['MambaForCausalLM']"
    assert all(architecture in supported for architecture in FAMILIES)
    head = ModelChoice(target=bundled.target_dir(), draft=bundled.eagle3_dir(), algorithm="eagle3")
    assert [finding.verdict for finding in check_models(head)] == [Verdict.OK, Verdict.OK]
