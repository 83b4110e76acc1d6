"""A worker with a real engine behind gRPC in this process, and what a test sees of its inside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from slipstream.common.wire.worker import WorkerDescription
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.services.models.paged_kv import PagedKV
from slipstream.services.worker.engine import Engine, RoleEngine
from slipstream.services.worker.server import DeviceThread, WorkerServicer
from tests.harness.grpc_server import running_server
from tests.harness.waiting import block_until
from tests.harness.workers import LocalWorker

SETTLE_TIMEOUT_S = 20.0


class ServedWorker:
    """The worker, as its process has it: an event loop, a device thread, a stream."""

    def __init__(self, worker: LocalWorker, device_thread: DeviceThread, channel: Any) -> None:
        """Use `serving`."""
        self._worker = worker
        self._device_thread = device_thread
        self.channel: Any = channel
        self.stub: Any = pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]

    @property
    def description(self) -> WorkerDescription:
        """The worker's description of itself."""
        return self._worker.describe()

    @property
    def failures(self) -> list[BaseException]:
        """The errors that broke its stream; a real worker's process would have ended."""
        return self._worker.failures

    @property
    def engine(self) -> Engine:
        """The device side."""
        return self._worker.engine

    def on_device_thread(self, work: Callable[[], None]) -> None:
        """Does the work there, behind all that was handed to it so far."""
        self._device_thread.submit(work).result(timeout=SETTLE_TIMEOUT_S)

    def settle(self) -> None:
        """Returns when all is done that the device thread was given so far."""
        self.on_device_thread(lambda: None)

    def until_free(self) -> None:
        """Returns when the end of a stream has been seen, and no epoch is open."""

        def is_free() -> bool:
            self.settle()
            return self.engine.epoch is None

        block_until(is_free)


@contextmanager
def serving(role: RoleEngine, folder: Path) -> Iterator[ServedWorker]:
    """Serves a worker at a Unix socket in `folder`, on an event loop of its own."""
    worker = LocalWorker(role)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    with DeviceThread() as device_thread:
        service = WorkerServicer(worker.engine, device_thread)
        added = ("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, service)
        context = running_server(added, address=f"unix:{folder}/worker.sock")
        try:
            server = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(SETTLE_TIMEOUT_S)
            with grpc.insecure_channel(server.address) as channel:
                yield ServedWorker(worker, device_thread, channel)
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(SETTLE_TIMEOUT_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        device_thread.submit(worker.engine.close).result(timeout=SETTLE_TIMEOUT_S)
    worker.close()


def kv_cache(role: RoleEngine) -> PagedKV:
    """The open epoch's pages, wherever the role keeps them."""
    todo: list[object] = [role]
    for holder in todo:
        if isinstance(holder, PagedKV):
            return holder
        if type(holder).__module__.startswith("slipstream.services."):
            todo += getattr(holder, "__dict__", {}).values()
    raise AssertionError("no epoch is open")
