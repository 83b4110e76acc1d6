"""The gateway as a process: what it imports, how soon it is there, and how it ends."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.bundled import target_dir
from slipstream.client import Client
from slipstream.common.errors import ConfigError, ConnectionLostError, ResourceExhaustedError, UnavailableError
from slipstream.gateway.config import GatewayConfig
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.gateway_processes import gateway_processes
from tests.harness.leaks import check_it_holds_no_more_than, held_by
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, serving
from tests.harness.tokenizers_by_kind import make_tokenizer
from tests.harness.waiting import block_until

READY_S = 5.0
"""Longest processor time until it serves, on a slow machine; a fast one takes half a second."""


def test_it_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import slipstream.gateway.server, slipstream.gateway.main; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_its_scheduler_is_at_a_unix_socket() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler: got '127\.0\.0\.1:50051', accepted: unix:PATH"):
        GatewayConfig(scheduler="127.0.0.1:50051")


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far: on a busy machine, the time on the clock is not its own."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_it_serves_soon_and_ends_with_a_signal(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    make_tokenizer("byte level").save_pretrained(tmp_path / "model")
    scheduler = ScriptedScheduler(replace(DESCRIPTION, tokenizer_path=str(tmp_path / "model")))
    with serving(scheduler, tmp_path) as behind:
        listen = f"unix:{tmp_path}/gateway.sock"
        options = ("--scheduler", behind, "--listen", listen, "--grace-s", "0.1")
        gateway = subprocess.Popen([sys.executable, "-m", "slipstream.gateway.main", *options])
        try:
            with Client(listen) as client:
                # Waits for the socket, and for the scheduler behind it.
                assert sum(len(chunk.token_ids) for chunk in client.generate([5, 6], max_new_tokens=6)) == 6
                assert _cpu_s(gateway.pid) < READY_S
                services = client.server_info().services
                assert [service.name for service in services][:2] == ["gateway", "scheduler"]
                assert services[0].pid == gateway.pid
                scheduler.pause_tokens = TOKENS_PER_STEP
                chunks = client.generate([5, 6], max_new_tokens=6, reconnect_s=0)
                next(chunks)
                gateway.send_signal(signal.SIGTERM)
                with pytest.raises(ConnectionLostError):
                    next(chunks)
            assert gateway.wait(20) == 0
        finally:
            gateway.kill()
            gateway.wait()


def test_health_fails_while_jobs_cannot_be_kept(tmp_path: Path) -> None:
    """In a process that may write no larger file, as on a disk that is full."""
    tmp_path.chmod(0o700)
    with gateway_processes(tmp_path, 1, "--state-dir", str(tmp_path)) as gateways:
        address, pid = gateways.addresses[0], gateways.pid(0)
        with Client(address) as client, grpc.insecure_channel(address) as channel:

            def health() -> int:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                return int(answer.status)

            client.create_job([5, 6], job_id="before", max_new_tokens=6)
            limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[1]))
            with pytest.raises((UnavailableError, ResourceExhaustedError)):
                client.create_job([5, 6], job_id="refused", max_new_tokens=6)
            assert health() == health_pb2.HealthCheckResponse.NOT_SERVING
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            block_until(lambda: health() == health_pb2.HealthCheckResponse.SERVING)
            assert client.create_job([5, 6], job_id="after", max_new_tokens=6).job_id == "after"


@pytest.mark.slow
def test_a_scheduler_that_comes_again_and_again_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with gateway_processes(tmp_path, 1) as gateways, Client(gateways.addresses[0]) as client:
        gateway = psutil.Process(gateways.pid(0))

        def serve_again(count: int) -> None:
            for number in range(count):
                if number % 2:
                    gateways.scheduler.break_streams()
                else:
                    gateways.scheduler.serve(replace(DESCRIPTION, tokenizer_path=str(target_dir())))
                # Answered by the scheduler that came.
                assert sum(len(chunk.token_ids) for chunk in client.generate([5, 6], max_new_tokens=6)) == 6

        serve_again(6)
        before = held_by(gateway)
        serve_again(20)
        check_it_holds_no_more_than(before, gateway)
