"""The gRPC services of a worker: `Worker`, which hands to the thread that owns the device, and `Recorder`."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from slipstream.common.errors import FailedPreconditionError, SlipstreamError
from slipstream.common.wire.command_socket import CommandReceiver, serve_on_event_loop
from slipstream.common.wire.events import Site
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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator
    from typing import Unpack

    from grpc.aio import ServicerContext

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import Attachment, StepTokens
    from slipstream.services.worker.device_thread import DeviceThread
    from slipstream.services.worker.engine import Engine

logger = logging.getLogger(__name__)

RECORDER = trace_pb2.DESCRIPTOR.services_by_name["Recorder"].full_name
STUCK_AFTER_S = 120.0
"""The thread that owns the device hangs if it takes longer for a piece of work: twice the longest wait in one."""
ATTACH_STUCK_AFTER_S = 300.0
"""The same for Attach, which warms up and captures graphs: the scheduler waits as long."""
DETACH_INTERVAL_S = 0.005
"""Between two looks at whether the stream has come past the last use of a draft's memory."""
T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")


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
        step_tokens = await self._on_device_thread(self._attach, attachment)
        return attached_to_pb(step_tokens, self._commands.ending)

    async def AttachDraft(self, request: pb.AttachDraftRequest, context: ServicerContext) -> pb.AttachDraftResponse:
        await self._by_pieces(self._engine.attach_draft(region_from_pb(request)))
        return pb.AttachDraftResponse()

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
        if epoch is None:
            raise FailedPreconditionError("not attached")
        self._has_stream = True
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
        """Carries out a command that comes by the socket, on the thread that reads it."""
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

    def _attach(self, attachment: Attachment) -> StepTokens | None:
        # Set here, as a caller may wait behind other work, or be gone before this is done.
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
    """Serves `Recorder`: what this worker's host did in its last steps."""

    def __init__(self, log: EventLog, device: Device) -> None:
        self._log = log
        self._device = device

    async def ReadRecords(self, request: trace_pb2.ReadRecordsRequest, context: Any) -> trace_pb2.ReadRecordsResponse:
        records = tuple(self._log.since(request.from_step))
        clock = None
        try:
            # Not on the thread that owns the device: steps are enqueued there.
            clock = await asyncio.to_thread(self._device.sample_clock)
        except SlipstreamError as error:
            logger.warning("the clock of the stamps cannot be read: %s", error)
        return HostRecords(self._log.epoch, records, clock).to_pb()
