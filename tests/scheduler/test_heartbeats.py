"""Tests the scheduler's metrics of whether a worker is up, with real gRPC between the two."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from slipstream.common.wire.step import Role
from slipstream.scheduler.link import Heartbeats, LinkThread
from tests.harness.grpc_server import running_server
from tests.harness.waiting import until

INTERVAL_S = 0.05


class Watched:
    """The heartbeats of one draft service."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/draft.sock"
        self._registry = CollectorRegistry()
        self._thread = LinkThread()
        self.heartbeats = Heartbeats(
            self._registry, {Role.DRAFT: lambda: self.address}, self._thread, interval_s=INTERVAL_S
        )

    @property
    def is_up(self) -> bool:
        """As scraped."""
        return self._value("slipstream_worker_up") == 1

    @property
    def age_s(self) -> float:
        """As scraped."""
        return self._value("slipstream_worker_heartbeat_age_seconds")

    def close(self) -> None:
        """Ends all of it, and nothing is left of it on the event loop."""
        self.heartbeats.close()
        assert not asyncio.all_tasks(self._thread.loop)
        self._thread.close()

    def _value(self, name: str) -> float:
        value = self._registry.get_sample_value(name, {"service": "draft"})
        assert value is not None
        return value


@contextmanager
def watching(folder: Path) -> Iterator[Watched]:
    """Heartbeats until the block ends."""
    watched = Watched(folder)
    watched.heartbeats.start()
    try:
        yield watched
    finally:
        watched.close()


async def test_a_worker_comes_goes_and_comes_back(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        assert not watched.is_up
        for _ in range(2):
            async with running_server(address=watched.address):
                await until(lambda: watched.is_up)
                assert watched.age_s < 10
            await until(lambda: not watched.is_up)
            before = watched.age_s
            await until(lambda before=before: watched.age_s > before)  # type: ignore[misc]


async def test_checks_go_on_after_one_that_fails_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(tmp_path) as watched:
        async with running_server(address=watched.address):
            await until(lambda: watched.is_up)
            monkeypatch.setattr(health_pb2, "HealthCheckRequest", lambda: 1 // 0)
            await until(lambda: not watched.is_up)
            monkeypatch.undo()
            await until(lambda: watched.is_up)


async def test_a_worker_that_answers_but_does_not_serve_is_alive_and_not_up(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        async with running_server(address=watched.address) as server:
            await until(lambda: watched.is_up)
            server.set_serving(False)
            await until(lambda: not watched.is_up)
            # It goes on to answer: the age falls back again and again.
            await until(lambda: watched.age_s > INTERVAL_S / 2)
            await until(lambda: watched.age_s < INTERVAL_S / 2)


async def test_one_that_never_was_there_is_as_old_as_the_scheduler(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        await until(lambda: watched.age_s > 4 * INTERVAL_S)
        assert not watched.is_up


async def test_heartbeats_follow_a_draft_that_was_swapped(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        async with running_server(address=watched.address):
            await until(lambda: watched.is_up)
            watched.address = f"unix:{tmp_path}/other.sock"
            await until(lambda: not watched.is_up)
            async with running_server(address=watched.address):
                await until(lambda: watched.is_up)
                watched.address = ""
                await until(lambda: not watched.is_up)
                assert watched.age_s < 1


async def test_closing_does_not_wait_for_an_answer(tmp_path: Path) -> None:
    """The socket accepts connections, but nothing answers on it."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/draft.sock")
        silent.listen()
        with watching(tmp_path) as watched:
            await until(lambda: watched.age_s > 2 * INTERVAL_S)
            assert not watched.is_up
