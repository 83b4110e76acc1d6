"""Health checks from a process of its own, which no load of the benchmark delays."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.rpc.address import proxy_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

TIMEOUT_S = 10.0


class HealthChecks:
    """Checks the health of a server again and again, in a process of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        """Begins to check."""
        self._pipe.send(True)

    def end(self) -> tuple[list[float], set[str]]:
        """Stops, and returns the milliseconds that each check took, and all answers; an RPC error by its code."""
        self._pipe.send(False)
        found: tuple[list[float], set[str]] = self._pipe.recv()
        return found


@contextmanager
def health_checks(address: str, *, interval_s: float = 0.01) -> Iterator[HealthChecks]:
    """Starts the process, and ends it. It waits `interval_s` between two checks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_check_health, args=(address, interval_s, theirs), daemon=True)
    process.start()
    try:
        yield HealthChecks(ours)
    finally:
        ours.close()
        process.terminate()
        process.join()


def _check_health(address: str, interval_s: float, pipe: Connection) -> None:
    with grpc.insecure_channel(address, options=proxy_options(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while pipe.recv():
            took_ms: list[float] = []
            statuses: set[str] = set()
            while not pipe.poll(interval_s):
                begun = time.monotonic()
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                    statuses.add(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
                except grpc.RpcError as error:
                    statuses.add(error.code().name)
                took_ms.append(1e3 * (time.monotonic() - begun))
            pipe.recv()
            pipe.send((took_ms, statuses))
