"""A worker as a process: load, serve, and end when told to, or when the device is broken.

Its gRPC services are `Worker`, which hands to the thread that owns the device, and `Recorder`. That thread does its
pieces of work, and between them the commands of the steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, TypeVarTuple

import torch
from prometheus_client.registry import Collector

from slipstream.common.device.choose import choose_device
from slipstream.common.device.cpu.device import worker_threads
from slipstream.common.errors import FailedPreconditionError, SlipstreamError
from slipstream.common.host import yield_to_streams
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.metrics import BUILD_INFO, HOST_STALL_SECONDS, RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals, raise_failure
from slipstream.common.wire.command_socket import MAX_COMMAND_BYTES, CommandReceiver, serve_on_event_loop
from slipstream.common.wire.events import WORKER_STALLS, Site, StreamName, make_log_directory, open_event_log
from slipstream.common.wire.trace import HostRecords
from slipstream.common.wire.worker import (
    attached_to_pb,
    attachment_from_pb,
    command_from_pb,
    description_to_pb,
    region_from_pb,
)
from slipstream.protos import trace_pb2, trace_pb2_grpc
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.services.worker.engine import Engine
from slipstream.services.worker.rank_metrics import RankMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator
    from concurrent.futures import Future
    from typing import Unpack

    from grpc.aio import ServicerContext
    from prometheus_client import CollectorRegistry

    from slipstream.common.device.interface import Device
    from slipstream.common.rpc.listener import Listener
    from slipstream.common.rpc.metrics import MetricFamily
    from slipstream.common.wire.command_socket import CommandReader
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.step import Role, StepCommand
    from slipstream.common.wire.worker import Attachment, Measurements
    from slipstream.services.worker.config import WorkerConfig
    from slipstream.services.worker.crew import Crew
    from slipstream.services.worker.engine import RoleEngine

    MakeRole = Callable[[WorkerConfig, Device, int], RoleEngine]

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.2
"""An Execute call never ends by itself; what it was sent is finished after it, by the engine."""
SWITCH_INTERVAL_S = 0.0005
"""The stream's thread computes in Python, too; a command must not wait 5 ms for its turn."""
STUCK_AFTER_S = 120.0
"""The thread that owns the device hangs if it takes longer for a piece of work: twice the longest wait in one."""
ATTACH_STUCK_AFTER_S = 300.0
"""The same for Attach, which warms up and captures graphs: the scheduler waits as long."""
DETACH_INTERVAL_S = 0.005
"""Seconds between polls of whether the stream has done the last use of a draft's memory."""
NUM_CALLS = 5
"""How many of a hanging thread's last calls are named."""
RECORDER = trace_pb2.DESCRIPTOR.services_by_name["Recorder"].full_name
_Ts = TypeVarTuple("_Ts")
P = ParamSpec("P")
T = TypeVar("T")


async def run_worker(
    role: Role,
    config: WorkerConfig,
    listener: Listener,
    metrics_port: int | None,
    metrics_host: str,
    make_role: MakeRole,
    *,
    crew: Crew | None = None,
) -> int:
    """Serves until a signal; returns the exit status. `make_role` loads the model, on the device thread.

    `crew`: the other ranks of a target that has several.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = choose_device(config.device)
    if device.has_stream_threads:
        yield_to_streams()
    torch.set_num_threads(config.threads or worker_threads())
    registry = make_registry()
    if crew is not None:
        registry.register(RankMetrics(crew.reports))
    broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port, metrics_host))
        # Closed in the opposite order: the thread releases what the stream waits for, and the stream writes the log.
        make_log_directory(config.access_log_dir)
        log = open_event_log(config.access_log_dir, StreamName(role.value), os.getpid())
        held.callback(log.close)
        stream = device.create_stream(role.value, _reporter(broken))
        held.callback(stream.close)
        device_thread = held.enter_context(DeviceThread(stream.bind_thread))
        loop = asyncio.get_running_loop()
        role_engine = await loop.run_in_executor(device_thread, make_role, config, device, port)
        engine = Engine(
            role_engine,
            device,
            stream,
            log,
            refuses_waits=config.debug_sync,
            on_stuck=end_at_once,
            free_elsewhere=lambda: None if crew is None else crew.least_free,
        )
        _describe(registry, device, engine)
        collection, commands = IdleCollection(), CommandReceiver()
        servicer = WorkerServicer(
            engine,
            device_thread,
            commands=commands,
            acknowledge_done=config.acknowledge_done,
            on_command=collection.worked,
        )
        server = GrpcServer(
            listener,
            metrics=RpcMetrics(registry),
            find_fault=servicer.find_fault,
            max_receive_bytes=MAX_COMMAND_BYTES,
        )
        server.add_service("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, servicer)
        recorder = RecorderServicer(log, device, crew if device.has_stream_threads else None)
        server.add_service(RECORDER, trace_pb2_grpc.add_RecorderServicer_to_server, recorder)
        await server.start()
        held.callback(commands.close)
        if not config.acknowledge_done:
            commands.listen(server.address)
        held.enter_context(collection.in_charge())
        collecting = asyncio.create_task(collection.run())
        collecting.add_done_callback(raise_failure)
        held.callback(collecting.cancel)
        server.set_serving(True)
        logger.info("serving %s at %s", engine.description.model, server.address)
        broken.add_done_callback(lambda _: signals.request())
        await signals.wait()
        # A broken stream finishes no step: the scheduler learns of it when its call ends.
        await server.stop(0 if broken.done() else STOP_GRACE_S)
        await loop.run_in_executor(device_thread, engine.close)
        if broken.done():
            context = {"epoch": engine.last_epoch, "step": engine.last_step}
            logger.error("the %s stream is broken", role.value, exc_info=broken.result(), extra=context)
            return 1
    return 0


def end_at_once(engine: Engine, unmet: str) -> NoReturn:
    """Ends this process, whose stream waits for `unmet` and does not end; freeing anything would wait for it, too."""
    context = {"epoch": engine.last_epoch, "step": engine.last_step}
    logger.error(
        "the %s stream waits for what does not happen, nor can be released, as when the process is gone that was to "
        "signal it (%s): this process ends at once, freeing nothing, and must be started again",
        engine.description.role.value,
        unmet,
        extra=context,
    )
    logging.shutdown()
    os._exit(1)


def _describe(registry: CollectorRegistry, device: Device, engine: Engine) -> None:
    worker = engine.description
    ordered_with = (device.fence_kind, "on" if worker.under_mps else "off", worker.algorithm)
    labels = (version("slipstream-serve"), worker.model, worker.device, *ordered_with)
    BUILD_INFO.gauge(registry).labels(worker.role.value, *labels).set(1)
    registry.register(_Stalls(engine.log, (*ordered_with, worker.role.value)))


class _Stalls(Collector):
    """The time that threads were blocked, read from the events at each scrape."""

    def __init__(self, log: EventLog, labels: tuple[str, ...]) -> None:
        """`labels`: fence, MPS, algorithm and service."""
        self._log = log
        self._labels = labels

    def collect(self) -> Iterator[MetricFamily]:
        family = HOST_STALL_SECONDS.family()
        for site in WORKER_STALLS:
            family.add_metric((*self._labels, site.name.lower()), self._log.stalled_ns[site] / 1e9)
        yield family


def _reporter(broken: asyncio.Future[BaseException]) -> Callable[[BaseException], None]:
    loop = asyncio.get_running_loop()

    def keep_first(error: BaseException) -> None:
        if not broken.done():
            broken.set_result(error)

    def report(error: BaseException) -> None:
        loop.call_soon_threadsafe(keep_first, error)

    return report


class WorkerServicer(pb_grpc.WorkerServicer):
    """Serves `Worker`. All device work runs on `device_thread`, in the order in which it arrives."""

    def __init__(
        self,
        engine: Engine,
        device_thread: DeviceThread,
        *,
        commands: CommandReceiver | None = None,
        acknowledge_done: bool = False,
        stuck_after_s: float = STUCK_AFTER_S,
        on_command: Callable[[], None] = lambda: None,
    ) -> None:
        """`commands`: listens at the socket for commands; None: there is no such socket.

        `acknowledge_done`: acknowledge a step when its work is done instead of when it is enqueued. `on_command` is
        called for each.
        """
        self._engine = engine
        self._device_thread = device_thread
        self._commands = commands or CommandReceiver()
        self._acknowledge_done = acknowledge_done
        self._on_command = on_command
        self._stuck_after_s = stuck_after_s
        self._has_stream = self._is_attaching = False
        self._had_stream = False
        """Whether the open epoch has had its stream, whose end ends it."""

    def find_fault(self) -> str:
        """Says so if the device's thread hangs; else it is empty."""
        busy_s = self._device_thread.busy_s
        if busy_s <= (ATTACH_STUCK_AFTER_S if self._is_attaching else self._stuck_after_s):
            return ""
        return (
            f"the thread that owns the device has been at the same work for {busy_s:.0f} s: {self._device_thread.place}"
        )

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext) -> pb.DescribeResponse:
        return description_to_pb(replace(self._engine.describe(), has_scheduler=self._has_stream))

    async def Attach(self, request: pb.AttachRequest, context: ServicerContext) -> pb.AttachResponse:
        attachment = attachment_from_pb(request)
        if self._has_stream:
            raise FailedPreconditionError("another scheduler has the Execute stream of this worker")
        self._commands.forget()
        measured = await self._on_device_thread(self._attach, attachment)
        self._had_stream = False
        return attached_to_pb(measured, self._commands.ending)

    async def AttachDraft(self, request: pb.AttachDraftRequest, context: ServicerContext) -> pb.AttachDraftResponse:
        await self._by_pieces(self._engine.attach_region(region_from_pb(request)))
        return pb.AttachDraftResponse()

    async def AttachGrammar(
        self, request: pb.AttachGrammarRequest, context: ServicerContext
    ) -> pb.AttachGrammarResponse:
        await self._by_pieces(self._engine.attach_region(region_from_pb(request)))
        return pb.AttachGrammarResponse()

    async def ReleaseDraft(self, request: pb.ReleaseDraftRequest, context: ServicerContext) -> pb.ReleaseDraftResponse:
        await self._on_device_thread(self._engine.release_draft, request.epoch, request.attachment)
        return pb.ReleaseDraftResponse()

    async def DetachDraft(self, request: pb.DetachDraftRequest, context: ServicerContext) -> pb.DetachDraftResponse:
        await self._by_pieces(self._engine.detach_draft(request.epoch, request.attachment), DETACH_INTERVAL_S)
        return pb.DetachDraftResponse()

    async def Execute(
        self, requests: AsyncIterator[pb.StepCommand], context: ServicerContext
    ) -> AsyncIterator[pb.StepAck]:
        """See worker.proto. The end of the stream ends the epoch."""
        if self._has_stream:
            raise FailedPreconditionError("another scheduler has the Execute stream of this worker")
        epoch = self._engine.epoch
        if epoch is None or self._had_stream:
            raise FailedPreconditionError("not attached")
        self._has_stream = self._had_stream = True
        outgoing: asyncio.Queue[pb.StepAck | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(sent: pb.StepAck | Exception) -> None:
            loop.call_soon_threadsafe(outgoing.put_nowait, sent)

        serve = serve_on_event_loop if self._engine.enqueues_at_once else self._device_thread.serve
        reading = asyncio.create_task(self._read(requests, outgoing))
        try:
            with self._commands.epoch(serve, partial(self._take, put), put):
                while (sent := await outgoing.get()) is not None:
                    if isinstance(sent, Exception):
                        try:
                            raise sent
                        finally:
                            del sent  # it refers to this frame: the cycle would keep the epoch
                    yield sent
        finally:
            # Not awaited: this may run while the call is torn down. The device thread does it before any new Attach.
            reading.cancel()
            self._has_stream = False
            self._device_thread.submit(self._engine.abandon, epoch)

    async def _read(
        self, requests: AsyncIterator[pb.StepCommand], outgoing: asyncio.Queue[pb.StepAck | Exception | None]
    ) -> None:
        """Carries out the commands of the stream itself; its end, or an error, is the last thing that goes out."""
        try:
            async for message in requests:
                if self._engine.enqueues_at_once:
                    command = self._enqueue(message)
                else:
                    command = await self._on_device_thread(self._enqueue, message)
                if command.wants_acknowledgement:
                    if self._acknowledge_done:
                        await self._on_device_thread(self._engine.synchronize)
                    outgoing.put_nowait(_acknowledgement(command))
        except Exception as error:
            outgoing.put_nowait(error)
        else:
            outgoing.put_nowait(None)

    def _take(self, put: Callable[[pb.StepAck], object], message: pb.StepCommand) -> None:
        """Carries out a command that arrived by the socket, on the thread that reads it."""
        command = self._enqueue(message)
        if command.wants_acknowledgement:
            put(_acknowledgement(command))

    def _enqueue(self, message: pb.StepCommand) -> StepCommand:
        received_ns = time.monotonic_ns()
        self._on_command()
        command = command_from_pb(message)
        self._engine.log.add(Site.RECEIVE, command.step, received_ns, time.monotonic_ns())
        self._engine.enqueue(command)
        return command

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        await self._on_device_thread(self._engine.drain, request.epoch)
        return pb.DrainResponse()

    def _attach(self, attachment: Attachment) -> Measurements | None:
        # Set here, as a caller may wait after other work, or be gone before this is done.
        self._is_attaching = True
        try:
            # An epoch that is open and has no stream lost its scheduler between Attach and Execute.
            self._engine.abandon(self._engine.epoch)
            return self._engine.attach(attachment)
        finally:
            self._is_attaching = False

    async def _by_pieces(self, work: Generator[None, None, None], interval_s: float = 0.0) -> None:
        """Has the device thread do work piece by piece, so that steps are enqueued in between."""
        try:
            while True:
                if not await self._on_device_thread(_advance, work):
                    return
                await asyncio.sleep(interval_s)
        finally:
            # Where the caller is gone, the rest is not done. Not awaited: this may run while the call is torn down.
            self._device_thread.submit(work.close)

    async def _on_device_thread(self, function: Callable[[Unpack[_Ts]], T], *arguments: *_Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device_thread, function, *arguments)


def _acknowledgement(command: StepCommand) -> pb.StepAck:
    return pb.StepAck(epoch=command.epoch, step=command.step)


def _advance(work: Generator[None, None, None]) -> bool:
    """Does the next piece. False at the end."""
    for _ in work:
        return True
    return False


class RecorderServicer(trace_pb2_grpc.RecorderServicer):
    """Serves `Recorder`: what this worker's host did in its last steps, and what the other ranks' did."""

    def __init__(self, log: EventLog, device: Device, crew: Crew | None = None) -> None:
        """`crew`: the other ranks, where their work is recorded; on a GPU it is in graphs, which are not stamped."""
        self._log = log
        self._device = device
        self._crew = crew

    async def ReadRecords(self, request: trace_pb2.ReadRecordsRequest, context: Any) -> trace_pb2.ReadRecordsResponse:
        records = tuple(self._log.since(request.from_step))
        clock = None
        try:
            # Not on the thread that owns the device: steps are enqueued there.
            clock = await asyncio.to_thread(self._device.sample_clock)
        except SlipstreamError as error:
            logger.warning("the clock of the stamps cannot be read: %s", error)
        ranks = () if self._crew is None else await asyncio.to_thread(self._crew.read_records, request.from_step)
        return HostRecords(self._log.epoch, records, clock, ranks).to_pb()


class DeviceThread(ThreadPoolExecutor):
    """The one thread that owns the device. Knows how long its piece of work has taken so far.

    While it has none, it reads commands.
    """

    def __init__(self, initializer: Callable[[], None] = lambda: None) -> None:
        super().__init__(1, "device", initializer)
        self._begun_at = math.inf
        self._ident = 0
        self._has_work = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends the wait for commands; negative when it is closed."""
        self._interrupting = threading.Lock()

    @property
    def place(self) -> str:
        """The last calls that its piece of work is in."""
        stack = traceback.walk_stack(sys._current_frames().get(self._ident))
        calls = [f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})" for frame, line in stack]
        return " in ".join(calls[:NUM_CALLS])

    @property
    def busy_s(self) -> float:
        """Time since the piece of work began; 0 without one."""
        return max(0.0, time.monotonic() - self._begun_at)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        submitted = super().submit(self._timed(partial(fn, *args, **kwargs)))
        self._interrupt()
        return submitted

    def serve(self, reader: CommandReader) -> Callable[[], None]:
        """See `Serve`: reads here, between pieces of work."""
        is_over = threading.Event()

        def stop() -> None:
            is_over.set()
            self._interrupt()

        ThreadPoolExecutor.submit(self, self._serve, reader, is_over)
        return stop

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        self._interrupt()
        if wait:
            super().shutdown(wait=True)
            with self._interrupting:
                if self._has_work >= 0:
                    os.close(self._has_work)
                self._has_work = -1

    def _interrupt(self) -> None:
        """Ends a wait for commands."""
        with self._interrupting:
            if self._has_work >= 0:
                os.eventfd_write(self._has_work, 1)

    def _serve(self, reader: CommandReader, is_over: threading.Event) -> None:
        wait, read = select.poll(), self._timed(reader.read)
        wait.register(self._has_work, select.POLLIN)
        wait.register(reader, select.POLLIN)
        while not is_over.is_set():
            ready = dict(wait.poll())
            # Commands first: a Drain that arrived after them finishes them, too.
            if reader.fileno() in ready and not read():
                break
            if self._has_work in ready:
                os.eventfd_read(self._has_work)
                with suppress(RuntimeError):  # shut down
                    # After the work that has arrived.
                    ThreadPoolExecutor.submit(self, self._serve, reader, is_over)
                    return
                break
        reader.close()

    def _timed(self, work: Callable[[], T]) -> Callable[[], T]:
        def timed() -> T:
            self._begun_at, self._ident = time.monotonic(), threading.get_ident()
            try:
                return work()
            finally:
                self._begun_at = math.inf

        return timed
