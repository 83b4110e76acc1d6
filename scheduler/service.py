"""The `Scheduler` service: takes sequences from gateways, and gives them the output of each step."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import (
    ConfigError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.address import parse_address
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.wire.sequence import Refusal, SequenceSpec
from slipstream.common.wire.server import DraftSwap, SchedulerState
from slipstream.protos import scheduler_pb2 as pb
from slipstream.protos import scheduler_pb2_grpc
from slipstream.scheduler.records import Sequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from slipstream.common.wire.server import SchedulerDescription, SwapOutcome
    from slipstream.scheduler.page_log import PageLog
    from slipstream.scheduler.results import Outgoing
    from slipstream.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name
MAX_RECEIVE_BYTES = 64 * 2**20
"""Of one message from a gateway: many sequences that it submits again, each with its tokens."""
MAX_QUEUED = 8192
"""Messages that may wait for a gateway that does not read."""
EPOCH_LOOK_S = 1.0
"""Seconds after which a stream of page changes looks whether its epoch has ended."""
_AT_ONCE = 16
"""Sequences that are taken in before the event loop gets its turn."""
_NOT_ATTACHED = SchedulerState(paused="the scheduler is not attached to its workers")


def check_sequence(spec: SequenceSpec, serving: SchedulerDescription) -> None:
    """Raises InvalidArgumentError for token ids that do not exist, and for more tokens than the context has."""
    vocab_size, room = serving.server.vocab_size, serving.server.context_tokens - len(spec.prompt)
    for field, ids in (("prompt", spec.prompt), ("output", spec.output), ("stop_token_ids", spec.stop_token_ids)):
        if ids and max(ids) >= vocab_size:
            raise InvalidArgumentError(field, max(ids), f"token ids of 0 to {vocab_size - 1}")
    spec.sampling.check_token_ids(vocab_size)
    if spec.grammar and not serving.constraints:
        raise InvalidArgumentError("grammar", "a grammar", "none: this server has no grammar worker")
    if spec.max_new_tokens > room:
        raise InvalidArgumentError("max_new_tokens", spec.max_new_tokens, f"at most {room} after this prompt")


class GatewayStream:
    """A gateway's `Run` stream: messages wait here while one is written. Belongs to the event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.last_id = 0
        """The highest id of a sequence so far."""
        self._messages: deque[pb.RunResponse] = deque()
        self._end: SlipstreamError | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """True once its end was asked for."""
        return self._is_over

    def put(self, message: pb.RunResponse) -> None:
        """Queues a message. Ends the stream instead if its gateway has not read for too long."""
        if self._is_over:
            return
        if len(self._messages) < MAX_QUEUED:
            self._messages.append(message)
            self._changed.set()
            return
        self._messages.clear()
        unread = f"the gateway has left {MAX_QUEUED} messages unread"
        self.end(ResourceExhaustedError(unread, retry_after_ms=1000))

    def end(self, error: SlipstreamError | None) -> None:
        """Ends the stream after what is queued, with an error or without."""
        if not self._is_over:
            self._end, self._is_over = error, True
            self._changed.set()

    async def send(self, write: Callable[[pb.RunResponse], Awaitable[None]]) -> None:
        """Writes what is queued until the stream ends. Raises the error that it ends with."""
        while self._messages or not self._is_over:
            if self._messages:
                await write(self._messages.popleft())
            else:
                self._changed.clear()
                await self._changed.wait()
        if self._end is not None:
            raise self._end


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves `Scheduler`, and takes the loop's output. Belongs to the event loop, but for `put`."""

    def __init__(
        self,
        queue: WaitingQueue,
        describe: Callable[[], SchedulerDescription],
        swap: Callable[[DraftSwap], Awaitable[SwapOutcome]],
        page_log: Callable[[], PageLog | None] = lambda: None,
    ) -> None:
        """`describe` returns what is served now; called while the state is serving. `swap`: see `DraftSession.swap`.

        `page_log` returns that of the present epoch; None if there is none.
        """
        self._queue = queue
        self._describe = describe
        self._swap = swap
        self._page_log = page_log
        self._state = _NOT_ATTACHED
        self._streams: dict[int, GatewayStream] = {}
        self._numbers = count(1)
        self._loop = asyncio.get_running_loop()

    def put(self, outgoing: Outgoing) -> None:
        """Called on the loop's thread after each step; returns at once. Keeps the order."""
        self._loop.call_soon_threadsafe(self._deliver, outgoing)

    def set_state(self, state: SchedulerState) -> None:
        """Tells all gateways. Sequences of the state before are over by now."""
        self._state = state
        message = pb.RunResponse(state=state.to_pb())
        for stream in self._streams.values():
            stream.put(message)

    def close(self, reason: str) -> None:
        """Ends all streams."""
        self.set_state(SchedulerState(paused=reason, is_final=self._state.is_final))
        for stream in self._streams.values():
            stream.end(UnavailableError(reason))

    async def Describe(self, request: pb.DescribeSchedulerRequest, context: Any) -> pb.SchedulerDescription:
        reject_unknown_fields(request)
        if self._state.serving is None:
            kind = FailedPreconditionError if self._state.is_final else UnavailableError
            raise kind(self._state.paused)
        return self._describe().to_pb()

    async def Run(self, requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        """See scheduler.proto. The end of the stream ends its sequences."""
        stream = GatewayStream(next(self._numbers))
        stream.put(pb.RunResponse(state=self._state.to_pb()))
        self._streams[stream.number] = stream
        reading = asyncio.create_task(self._read(stream, requests))
        try:
            await stream.send(context.write)
        finally:
            del self._streams[stream.number]
            self._queue.drop(stream.number)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def SwapDraft(self, request: pb.SwapDraftRequest, context: Any) -> pb.SwapDraftResponse:
        reject_unknown_fields(request)
        swap = DraftSwap.from_pb(request)
        if swap.address:
            try:
                parse_address(swap.address)
            except ConfigError:
                raise InvalidArgumentError(
                    "address", swap.address, "unix:PATH or HOST:PORT, or empty for none"
                ) from None
        return (await self._swap(swap)).to_pb()

    async def WatchPages(self, request: pb.WatchPagesRequest, context: Any) -> None:
        """See scheduler.proto."""
        reject_unknown_fields(request)
        log, changed = self._page_log(), asyncio.Event()
        if log is None:
            raise NotImplementedError
        with log.watching(lambda: self._loop.call_soon_threadsafe(changed.set)) as watch:
            # Once when there is nothing, too: it says that all is told.
            while self._page_log() is log:
                changed.clear()
                taken = watch.take()
                await context.write(pb.PageChanges(changes=[change.to_pb() for change in taken]))
                while not taken and not changed.is_set() and self._page_log() is log:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(EPOCH_LOOK_S):
                            await changed.wait()

    async def _read(self, stream: GatewayStream, requests: AsyncIterator[pb.RunRequest]) -> None:
        error: SlipstreamError | None = None
        try:
            async for request in requests:
                await self._take(stream, request)
        except SlipstreamError as wrong:
            error = wrong
        finally:
            stream.end(error)

    async def _take(self, stream: GatewayStream, request: pb.RunRequest) -> None:
        """Raises InvalidArgumentError for a message that makes no sense."""
        reject_unknown_fields(request)
        for number, message in enumerate(request.sequences):
            if message.id <= stream.last_id:
                raise InvalidArgumentError(f"sequences[{number}].id", message.id, f"above {stream.last_id}")
            stream.last_id = message.id
            self._submit(stream, message)
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
        if request.cancelled:
            self._queue.cancel(stream.number, request.cancelled)

    def _submit(self, stream: GatewayStream, message: pb.NewSequence) -> None:
        """Queues a sequence, or refuses it. One for another epoch is dropped: its gateway learns of this one."""
        serving = self._state.serving
        if serving is None or serving.server.epoch != message.epoch:
            return

        def refuse(error: SlipstreamError) -> None:
            stream.put(pb.RunResponse(refusals=[Refusal(message.id, error).to_pb()]))

        try:
            spec = SequenceSpec.from_pb(message)
            check_sequence(spec, serving)
            self._queue.add(Sequence(spec, message.id, stream.number), epoch=message.epoch)
        except (InvalidArgumentError, ResourceExhaustedError) as error:
            refuse(error)
        except Exception:
            logger.exception("a sequence cannot be taken in", extra={"job": message.job_id})
            refuse(InternalError("the scheduler cannot take it in; its log has more"))

    def _deliver(self, outgoing: Outgoing) -> None:
        for number, output, refusals in outgoing.deliveries():
            # The gateway may be gone.
            if (stream := self._streams.get(number)) is not None:
                stream.put(
                    pb.RunResponse(
                        output=None if output is None else output.to_pb(),
                        refusals=[refusal.to_pb() for refusal in refusals],
                    )
                )
                if stream.is_over:
                    # At once: the call itself may be held up in a write that its gateway does not read.
                    self._queue.drop(number)
