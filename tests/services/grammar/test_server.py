"""A grammar worker as a process: what it is asked for at its start, and by whom it may be attached."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from slipstream.common.errors import FailedPreconditionError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.step import GRAMMAR_PROTOCOL_VERSION, PROTOCOL_VERSION
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc

pytestmark = pytest.mark.timeout(120)
METRICS_HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A stub of the process."""
    folder: Path = tmp_path_factory.mktemp("grammar")
    address = f"unix:{folder}/grammar.sock"
    options = ("--listen", address, "--metrics-host", METRICS_HOST, "--metrics-port", "0", "--log-level", "WARNING")
    with (
        subprocess.Popen((sys.executable, "-P", "-m", "slipstream.services.grammar_main", *options)) as process,
        grpc.insecure_channel(address) as channel,
    ):
        try:
            yield pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        finally:
            process.terminate()


def describe(worker: Any) -> pb.DescribeResponse:
    """What the worker says of itself, once it serves."""
    described: pb.DescribeResponse = worker.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=60)
    return described


def test_metrics_are_served_at_the_address_that_is_asked_for(worker: Any) -> None:
    described = describe(worker)
    socket.create_connection((METRICS_HOST, described.metrics_port)).close()
    # Another process may listen on the same port of 127.0.0.1.
    sockets = psutil.Process(described.pid).net_connections("tcp")
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {METRICS_HOST}


def test_a_process_that_was_started_since_the_last_description_is_not_attached(worker: Any) -> None:
    described = describe(worker)
    for version, message in (
        (GRAMMAR_PROTOCOL_VERSION, "is meant, and this is process"),
        # Commands of version 4 have a grammar's text.
        (PROTOCOL_VERSION, "protocol version: scheduler has 4, this worker has 5"),
    ):
        request = pb.AttachRequest(protocol_version=version, epoch=1, pid=described.pid + 1)
        with pytest.raises(grpc.RpcError) as caught:
            worker.Attach(request, timeout=60)
        error = error_from_rpc(caught.value)
        assert isinstance(error, FailedPreconditionError)
        assert message in str(error)
    assert describe(worker).last_epoch == 0
