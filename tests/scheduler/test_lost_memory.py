"""A worker that is lost gives its memory back, each time: mappings, descriptors, and nothing kept by an error."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.cpu.shared_file import DIRECTORY, PREFIX
from slipstream.common.errors import UnavailableError
from slipstream.common.wire.step import Role, StepCommand
from slipstream.scheduler import loop
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.link import Link, failure_of
from slipstream.scheduler.session import WorkerSession
from tests.harness.local_epoch import PATIENCE_MS
from tests.harness.waiting import TIMEOUT_S, until
from tests.harness.worker_processes import Client
from tests.harness.workers import LocalWorker, describe
from tests.scheduler.test_loop import make_job

NUM_LOSSES = 10


class Connection:
    """A link to a worker of this process that can be cut, and made anew."""

    def __init__(self, worker: LocalWorker) -> None:
        self._worker = worker
        self.failure: UnavailableError | None = None
        self.has_refused = False

    def __getattr__(self, name: str) -> Any:
        """The rest is the worker's."""
        return getattr(self._worker, name)

    def send(self, command: StepCommand) -> None:
        """See `Link.send`."""
        if self.failure is not None:
            raise failure_of(cast("Link", self))
        self._worker.send(command)


class Cut:
    """A session over workers of this process."""

    def __init__(self) -> None:
        self.client = Client()
        self.connections: dict[Role, Connection] = {}
        dummies = (DummyVerify(describe(Role.VERIFY), 0.0), DummyDraft(describe(Role.DRAFT), 0.0))
        self._workers = {one.description.role: LocalWorker(one) for one in dummies}
        sizes = {"context_tokens": 256, "slots": 2, "fixed_draft_tokens": 2}
        config = SchedulerConfig(verify="unix:/v", draft="unix:/d", draft_timeout_ms=PATIENCE_MS, **sizes)  # type: ignore[arg-type]
        self._session = WorkerSession(
            config,
            HostDevice(),
            self.client.queue,
            registry=CollectorRegistry(),
            listener=self.client.listener(),
            sink=self.client.put,
            make_link=self._connect,
        )
        self.client.drafts = self._session.drafts
        self._session.start()

    def close(self) -> None:
        """Ends it."""
        self.client.queue.stop()
        self._session.join()
        for worker in self._workers.values():
            worker.close()

    def cut(self, role: Role) -> None:
        """A worker is lost; its link cannot be used any more."""
        self.connections[role].failure = UnavailableError(f"the {role.value} service is lost")
        self.client.queue.wake()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Verify does nothing until the block ends, so that no sequence ends."""
        go_on = threading.Event()
        self._workers[Role.VERIFY].stream.enqueue(lambda: go_on.wait() and None)
        try:
            yield
        finally:
            go_on.set()

    def _connect(self, role: Role, _: str) -> Link:
        self.connections[role] = Connection(self._workers[role])
        return cast("Link", self.connections[role])


@pytest.fixture
async def session() -> Any:
    """Both workers attached."""
    with ExitStack() as held:
        made = Cut()
        held.callback(made.close)
        await made.client.served()
        yield made


@pytest.fixture
def no_collector() -> Iterator[None]:
    """As in the scheduler's process, whose collector looks at nothing while it works."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> tuple[int, int]:
    """Mappings of shared memory, and open descriptors."""
    mappings = Path("/proc/self/maps").read_text(encoding="utf-8").count(str(DIRECTORY / PREFIX))
    return mappings, len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.parametrize("role", [Role.VERIFY, Role.DRAFT])
async def test_losses_give_everything_back(session: Cut, no_collector: None, role: Role) -> None:
    client = session.client
    found = []
    for number in range(NUM_LOSSES + 1):
        await asyncio.gather(client.run(make_job(max_new_tokens=20), make_job(max_new_tokens=10)))
        found.append(held())
        if number < NUM_LOSSES:
            client.attached.clear() if role is Role.VERIFY else None
            session.cut(role)
            await until(lambda: client.draft_state != "attached" or role is Role.VERIFY)
            await client.served()
    assert max(found[1:]) <= found[0], found
    assert client.num_epochs == (NUM_LOSSES + 1 if role is Role.VERIFY else 1)


async def test_a_lost_epoch_is_gone_at_once(session: Cut, no_collector: None) -> None:
    """With its sequences, pages and prefix cache: nothing of it waits for the collector."""
    client = session.client
    with session.held_up():
        running = asyncio.create_task(client.run(make_job(max_new_tokens=200)))
        await until(lambda: client.epoch is not None and client.epoch.batch.num_running > 0)
        assert client.epoch is not None
        lost = weakref.ref(client.epoch)
        client.attached.clear()
        session.cut(Role.VERIFY)
    with pytest.raises(UnavailableError):
        await running
    del running
    await client.served()
    await until(lambda: lost() is None)


async def test_an_idle_scheduler_is_woken_when_verify_is_lost(session: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_S", 2 * TIMEOUT_S)
    for _ in range(3):
        session.client.queue.wake()  # from a sleep that began before
        await until(lambda: bool(session.client.queue._changed._waiters))  # type: ignore[attr-defined]
        num_epochs = session.client.num_epochs
        session.cut(Role.VERIFY)
        await until(lambda: session.client.num_epochs > num_epochs)  # noqa: B023
        await session.client.served()
