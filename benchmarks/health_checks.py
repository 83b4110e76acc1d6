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

HEALTH_INTERVAL_S = 0.01


class HealthChecks:
    """Checks the health of a server again and again, in a process of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        """Begins to check."""
        self._pipe.send(True)

    def end(self) -> tuple[list[float], list[str]]:
        """Stops, and returns the milliseconds that each check took, and answers other than SERVING."""
        self._pipe.send(False)
        found: tuple[list[float], list[str]] = self._pipe.recv()
        return found


@contextmanager
def health_checks(address: str) -> Iterator[HealthChecks]:
    """Starts the process, and ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_check_health, args=(address, theirs), daemon=True)
    process.start()
    try:
        yield HealthChecks(ours)
    finally:
        ours.close()
        process.terminate()
        process.join()


def _check_health(address: str, pipe: Connection) -> None:
    with grpc.insecure_channel(address, options=proxy_options(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while pipe.recv():
            took_ms: list[float] = []
            refused: list[str] = []
            while not pipe.poll(HEALTH_INTERVAL_S):
                begun = time.monotonic()
                try:
                    if stub.Check(health_pb2.HealthCheckRequest()).status != health_pb2.HealthCheckResponse.SERVING:
                        refused.append("NOT_SERVING")
                except grpc.RpcError as error:
                    refused.append(error.code().name)
                took_ms.append(1e3 * (time.monotonic() - begun))
            pipe.recv()
            pipe.send((took_ms, refused))
