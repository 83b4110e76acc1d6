"""The link from the scheduler to a worker: one long-lived stream, with commands and acknowledgements.

gRPC runs on an event loop and a thread of its own (`LinkThread`), apart from the gateways' one. Commands go by a socket
where the worker has one for them, else by the stream.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.errors import (
    CancelledError,
    ConnectionLostError,
    DeadlineExceededError,
    InvalidArgumentError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.address import CONNECT_TIMEOUT_S, SAME_HOST, UnixAddress, parse_address
from slipstream.common.rpc.logs import escaped
from slipstream.common.rpc.metrics import gauge
from slipstream.common.rpc.shutdown import end_at_once, on_failure
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.command_socket import CommandSender
from slipstream.common.wire.events import Site
from slipstream.common.wire.step import DRAFT_FENCES, FenceName, Role
from slipstream.common.wire.trace import HostRecords
from slipstream.common.wire.worker import (
    attachment_to_pb,
    command_to_pb,
    description_from_pb,
    measurements_from_pb,
    region_to_pb,
)
from slipstream.protos import trace_pb2, trace_pb2_grpc
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from concurrent.futures import Future

    from prometheus_client import CollectorRegistry

    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import Attachment, Measurements, OfferedRegion, WorkerDescription

T = TypeVar("T")

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 300.0
"""Attaching allocates the KV pages and warms up."""
CALL_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = {Role.VERIFY: 60.0, Role.DRAFT: 5.0, Role.GRAMMAR: 5.0}
"""A draft that drains has little left to do, and others wait for its end: the next draft, and the next epoch."""
RECORDS_TIMEOUT_S = 5.0
ROOM_INTERVAL_S = 0.002
"""Between two looks at whether a worker has room for more commands."""
HEARTBEAT_S, HEARTBEAT_TIMEOUT_S = 1.0, 1.0
"""Time from one health check of a worker to the next, and the most time for its answer."""

WORKER_UP = gauge(
    "slipstream_worker_up", "1 if the worker said in its last heartbeat that it serves, 0 if not.", "service"
)
HEARTBEAT_AGE = gauge(
    "slipstream_worker_heartbeat_age_seconds",
    "Time since a worker last answered the scheduler's health check, which is sent once a second; "
    "since the scheduler's start for one that never did.",
    "service",
)
SPECS = (WORKER_UP, HEARTBEAT_AGE)


class LinkThread:
    """The event loop of all links."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        on_failure(self.loop, end_at_once)
        self._thread = threading.Thread(target=self.loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[object, object, T]) -> T:
        """Runs a coroutine there and blocks until it is done. Raises what it raises, gRPC's errors as ours."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        except grpc.RpcError as error:
            raise _unavailable_if_cancelled(error_from_rpc(error)) from None
        except FutureCancelledError:
            raise UnavailableError("the connection was closed") from None

    def close(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Link:
    """The link to a worker service at an address. `send` is called on the loop's thread, the rest on any.

    One call at a time, but for `release_draft`, and for a `detach` that breaks the others off.
    """

    def __init__(self, role: Role, address: str, thread: LinkThread, *, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called on the links' thread when the worker is lost."""
        self.role = role
        self.address = address
        self.failure: SlipstreamError | None = None
        """The reason why the worker is lost; set at any time."""
        self.has_refused = False
        """True if the failure is that the worker refused a command."""
        self._on_failure = on_failure
        self._thread = thread
        self._epoch = self._described_pid = 0
        self._is_closed = False
        """True after `detach`."""
        self._acknowledged = self._num_sent = self._last_sent = 0
        self._changed = threading.Condition()
        self._outbox: asyncio.Queue[StepCommand | None] = asyncio.Queue()
        self._commands: CommandSender | None = None
        """None where commands go out by `Execute`."""
        self._channel: grpc.aio.Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def describe(self) -> WorkerDescription:
        """Asks the worker for its description. Raises UnavailableError if it is not there."""
        # Decoded on this thread, as other answers are: the links' thread has the other worker's, too.
        try:
            answer = self._call(lambda stub: stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S))
        except ConnectionLostError as error:
            raise UnavailableError(f"no {self.role.value} service answers at {self.address}: {error}") from None
        description = description_from_pb(answer)
        if description.role is not self.role:
            raise UnavailableError(f"{self.address} is a {description.role.value} service, not {self.role.value}")
        self._described_pid = description.pid
        names = ("device", "dtype", "model", "algorithm")
        printable: dict[str, Any] = {name: escaped(getattr(description, name)) for name in names}
        return replace(description, pid=_listening_pid(self.address) or description.pid, **printable)

    def attach(self, attachment: Attachment) -> Measurements | None:
        """Opens an epoch; returns what was measured, if asked to. Raises FailedPreconditionError and its kinds."""
        # Not to a process that was started since then: the memory is given back when the described one has ended.
        meant = replace(attachment, pid=self._described_pid)
        return measurements_from_pb(self._thread.call(self._attach(meant)))

    def attach_region(self, region: OfferedRegion) -> None:
        """Has verify map the memory of another worker, between its steps.

        Raises FailedPreconditionError (and its kinds).
        """
        request, is_grammars = region_to_pb(region), region.draft is None
        self._call(
            lambda stub: (stub.AttachGrammar if is_grammars else stub.AttachDraft)(request, timeout=ATTACH_TIMEOUT_S)
        )

    def prepare(self, grammar: str) -> None:
        """Has the grammar worker compile a grammar. Raises InvalidArgumentError, or UnavailableError."""
        self._call(lambda stub: stub.Prepare(pb.PrepareRequest(grammar=grammar), timeout=CALL_TIMEOUT_S))

    def release_draft(self, epoch: int, attachment: int) -> None:
        """Has verify wait for a lost draft no more, whatever that writes. Returns at once, and raises nothing."""
        request = pb.ReleaseDraftRequest(epoch=epoch, attachment=attachment)
        releasing = self._ask(lambda stub: stub.ReleaseDraft(request, timeout=CALL_TIMEOUT_S))
        # Verify that does not answer is found by its own steps.
        asyncio.run_coroutine_threadsafe(releasing, self._thread.loop)

    def detach_draft(self, epoch: int, attachment: int) -> None:
        """Has verify let go of a draft's memory; returns when it does not use it any more."""
        self._thread.call(self._detach_draft(epoch, attachment))

    def send(self, command: StepCommand) -> None:
        """Hands a command over and returns. Raises the link's failure."""
        if self.failure is not None:
            raise failure_of(self)
        self._num_sent, self._last_sent = self._num_sent + 1, command.step
        commands = self._commands
        if commands is None:
            self._thread.loop.call_soon_threadsafe(self._outbox.put_nowait, command)
            return
        commands.add(command)
        try:
            if commands.is_urgent and commands.flush():
                return
        except (ValueError, UnavailableError) as error:
            self._thread.call(self._lose(error))
            raise failure_of(self) from None
        self._thread.loop.call_soon_threadsafe(self._flush, commands)

    def wait_for_acknowledgement(self, step: int, timeout_s: float) -> bool:
        """Blocks until the worker has acknowledged `step`; False if the time is over. Raises the link's failure."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._acknowledged >= step or self.failure is not None, timeout_s)
        if self.failure is not None:
            raise failure_of(self)
        return arrived

    def read_records(self, from_step: int) -> HostRecords | None:
        """Reads the worker's records of steps from this one on; None if it has none. Called on any thread."""
        answer = self._thread.call(self._read_records(from_step))
        return None if answer is None else HostRecords.from_pb(answer)

    def detach(self, *, drain: bool) -> bool:
        """Ends the epoch; with `drain` the worker finishes what it was sent first. Returns True if it has."""
        return self._thread.call(self._detach(drain=drain))

    async def _connect(self) -> pb_grpc.WorkerStub:
        if self._is_closed:
            raise UnavailableError("the link is closed")
        if self._channel is None:
            # Watched by heartbeats of its own: a stopped peer shows in about two seconds.
            self._channel = grpc.aio.insecure_channel(self.address, options=SAME_HOST.options())
        return pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    async def _ask(self, call: Callable[[pb_grpc.WorkerStub], Awaitable[Any]]) -> Any:
        """Makes a call that has one answer."""
        return await call(await self._connect())

    def _call(self, call: Callable[[pb_grpc.WorkerStub], Awaitable[Any]]) -> Any:
        """Makes a call that has one answer from any other thread, which waits. Raises as `LinkThread.call`."""
        return self._thread.call(self._ask(call))

    async def _attach(self, attachment: Attachment) -> pb.AttachResponse:
        stub = await self._connect()
        if self.role is not Role.GRAMMAR:
            logger.info("the %s service prepares: memory, kernels, graphs", self.role.value)
        answer: pb.AttachResponse = await stub.Attach(attachment_to_pb(attachment), timeout=ATTACH_TIMEOUT_S)
        self._epoch = attachment.epoch
        self._outbox = asyncio.Queue()
        call = stub.Execute()
        await call.wait_for_connection()
        self._commands = CommandSender.beside(self.address, answer.command_socket)
        self._tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]
        return answer

    async def _detach_draft(self, epoch: int, attachment: int) -> None:
        if self._channel is not None:
            request = pb.DetachDraftRequest(epoch=epoch, attachment=attachment)
            await self._ask(lambda stub: stub.DetachDraft(request, timeout=CALL_TIMEOUT_S))

    async def _read_records(self, from_step: int) -> trace_pb2.ReadRecordsResponse | None:
        if self._channel is None:
            return None
        stub = trace_pb2_grpc.RecorderStub(self._channel)  # type: ignore[no-untyped-call]
        request = trace_pb2.ReadRecordsRequest(from_step=from_step)
        answer: trace_pb2.ReadRecordsResponse
        try:
            answer = await stub.ReadRecords(request, timeout=RECORDS_TIMEOUT_S)
        except grpc.RpcError as error:
            # A drafter need not have any, and a trace without the records of one worker is worth having.
            logger.info("no records of the %s service: %s", self.role.value, error_from_rpc(error))
            return None
        except asyncio.CancelledError:
            _check_not_cancelled()
            return None
        return answer

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.StepCommand, pb.StepAck]) -> None:
        try:
            while (command := await self._outbox.get()) is not None:
                await call.write(command_to_pb(command))
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The call is over. This says only that nothing can be written: `_read` gets the status, which says why.
            logger.debug("a command cannot be written", exc_info=True)
        except Exception as error:
            # Such as a number that the message cannot hold.
            self._fail(error)

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.StepCommand, pb.StepAck]) -> None:
        num_read = 0
        try:
            async for ack in call:
                num_read += 1
                if num_read > self._num_sent or not self._acknowledged <= ack.step <= self._last_sent:
                    # Each costs the thread that both workers' links share.
                    call.cancel()
                    given = f"got number {num_read}, of step {ack.step}"
                    accepted = f"one for each of {self._num_sent} commands, of a step up to {self._last_sent}, in order"
                    self._fail(InvalidArgumentError.described("acknowledgement", f"{given}, accepted: {accepted}"))
                    return
                with self._changed:
                    self._acknowledged = ack.step
                    self._changed.notify_all()
            self._fail(UnavailableError(f"the {self.role.value} service ended the stream"))
        except Exception as error:
            self._fail(error)

    def _flush(self, commands: CommandSender) -> None:
        try:
            if not commands.flush():
                self._thread.loop.call_later(ROOM_INTERVAL_S, self._flush, commands)
        except Exception as error:
            self._fail(error)

    async def _lose(self, error: Exception) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self.failure is not None:
                return
            if isinstance(error, grpc.RpcError):
                error = error_from_rpc(error)
            self.has_refused = not isinstance(error, UnavailableError | CancelledError)
            reason = str(error) or type(error).__name__
            self.failure = UnavailableError(f"the {self.role.value} service is lost: {reason}")
            self._changed.notify_all()
        self._on_failure()

    async def _detach(self, *, drain: bool) -> bool:
        has_drained, self._is_closed = False, True
        if drain and self.failure is None and self._channel is not None:
            has_drained = await self._drain(pb_grpc.WorkerStub(self._channel))  # type: ignore[no-untyped-call]
        self._outbox.put_nowait(None)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        commands, self._commands = self._commands, None
        if commands is not None:
            commands.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
        return has_drained

    async def _drain(self, stub: pb_grpc.WorkerStub) -> bool:
        try:
            await stub.Drain(pb.DrainRequest(epoch=self._epoch), timeout=DRAIN_TIMEOUT_S[self.role])
        except grpc.RpcError as error:
            # The end of the stream ends the epoch in any case.
            logger.warning("the %s service did not drain: %s", self.role.value, error_from_rpc(error))
            return False
        except asyncio.CancelledError:
            _check_not_cancelled()
            return False  # another `detach` has closed the channel
        return True


def _listening_pid(address: str) -> int:
    """The process that listens at a Unix socket, by the kernel's word; 0 if unknown, as in another PID namespace."""
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        return 0
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(str(parsed.path))
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)
    return 0


def _check_not_cancelled() -> None:
    """Raises CancelledError again if it means this task, and not a call whose channel was closed meanwhile."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def failure_of(link: Link) -> SlipstreamError:
    """Returns the failure of a link as an error to raise: the link's own would keep the frames that it is raised in."""
    return UnavailableError(str(link.failure))


def _unavailable_if_cancelled(error: SlipstreamError) -> SlipstreamError:
    # No call is cancelled here: a service that cancels one is on its way down.
    return UnavailableError(str(error)) if isinstance(error, CancelledError) else error


class Dispatch:
    """Sends the commands of a step: at once, or each when what it waits for was acknowledged.

    At once is for fences whose wait may be enqueued before their signal. With workers that acknowledge when the work is
    done, the other is the policy "the host blocks on each call".
    """

    def __init__(self, verify: Link, log: EventLog, timeout_of: Callable[[Role], float] | None = None) -> None:
        """`timeout_of` returns the time that a worker may take now to acknowledge a step; None sends at once."""
        self.verify = verify
        self._log = log
        self._timeout_of = timeout_of

    def send(self, link: Link, command: StepCommand, draft: Link | None) -> None:
        """Sends a command to verify or to a draft. `draft`: the draft that it may wait for.

        Raises a link's failure, and DeadlineExceededError if an acknowledgement does not arrive.
        """
        if self._timeout_of is not None:
            self._wait_for_producers(command, draft, self._timeout_of)
            command = replace(command, wants_acknowledgement=True)
        if self._log.is_enabled:
            self._log.send(link.role, epoch=command.epoch, step=command.step)
        link.send(command)

    def _wait_for_producers(
        self, command: StepCommand, draft: Link | None, timeout_of: Callable[[Role], float]
    ) -> None:
        for point in command.ops.waits:
            if point.fence is FenceName.GRAMMAR_READY:
                continue  # it is sent its command after this one
            producer = draft if point.fence in DRAFT_FENCES else self.verify
            assert producer is not None, "a step without a draft waits for none"
            self._wait(producer, point.value, timeout_of(producer.role))

    def _wait(self, producer: Link, step: int, timeout_s: float) -> None:
        begun_ns = time.monotonic_ns()
        if not producer.wait_for_acknowledgement(step, timeout_s):
            raise DeadlineExceededError(f"the {producer.role.value} service did not acknowledge step {step} in time")
        self._log.stall(Site.ACKNOWLEDGEMENT, step, begun_ns, time.monotonic_ns())


class Heartbeats:
    """Checks the workers' health on the links' event loop, over connections of its own."""

    def __init__(
        self,
        registry: CollectorRegistry,
        addresses: Mapping[Role, Callable[[], str]],
        thread: LinkThread,
        *,
        interval_s: float = HEARTBEAT_S,
    ) -> None:
        """`addresses`: where each worker is now, empty for nowhere; called on any thread.

        `thread` must live until `close`.
        """
        up, age = WORKER_UP.gauge(registry), HEARTBEAT_AGE.gauge(registry)
        self._loop = thread.loop
        self._pulses = [_Pulse(address, interval_s) for address in addresses.values()]
        for role, pulse in zip(addresses, self._pulses, strict=True):
            up.labels(role.value).set_function(pulse.up)
            age.labels(role.value).set_function(pulse.age_s)
        self._running: list[Future[None]] = []

    def start(self) -> None:
        """The first check is sent at once."""
        self._running = [asyncio.run_coroutine_threadsafe(pulse.beat(), self._loop) for pulse in self._pulses]

    def close(self) -> None:
        """Ends the checks and their connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        for future in self._running:
            future.cancel()
        for future in self._running:
            with suppress(FutureCancelledError, asyncio.CancelledError):
                await asyncio.wrap_future(future)


class _Pulse:
    """The health checks of one worker. Written on the event loop, read by the scraper's thread."""

    def __init__(self, address: Callable[[], str], interval_s: float) -> None:
        self._address = address
        self._interval_s = interval_s
        self._is_serving = False
        self._answered_at = time.monotonic()

    def up(self) -> float:
        return float(self._is_serving)

    def age_s(self) -> float:
        return time.monotonic() - self._answered_at

    async def beat(self) -> None:
        # Without this bound gRPC waits longer before it sees a worker that is back.
        options = [*SAME_HOST.options(), ("grpc.max_reconnect_backoff_ms", int(1000 * self._interval_s))]
        while True:
            if not (address := self._address()):
                self._is_serving, self._answered_at = False, time.monotonic()
                await asyncio.sleep(self._interval_s)
                continue
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                while self._address() == address:
                    self._is_serving = await self._check(stub)
                    await asyncio.sleep(self._interval_s)

    async def _check(self, stub: health_pb2_grpc.HealthStub) -> bool:
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEARTBEAT_TIMEOUT_S)
        except Exception as error:
            logger.debug("no answer to a health check: %r", error)
            return False
        self._answered_at = time.monotonic()
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
