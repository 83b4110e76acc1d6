"""The link to the scheduler: keeps its stream open, and submits sequences again when it broke."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import grpc
import grpc.aio

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.address import SAME_HOST
from slipstream.common.rpc.loop_turns import SLICE_S
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import Refusal, StepOutput
from slipstream.common.wire.server import SchedulerDescription, SchedulerState
from slipstream.protos import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from slipstream.common.rpc.address import ChannelOption
    from slipstream.common.wire.server import ServerState
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.sample import Sample

logger = logging.getLogger(__name__)

MAX_TOKENS_PER_MESSAGE = 2**16
"""Tokens of prompts and outputs, and characters of grammars, in a message to the scheduler; a longer sequence has a
message of its own."""
MAX_SEQUENCES_PER_MESSAGE = 64
"""Sequences in a message to the scheduler: encoding them takes a few milliseconds of the event loop's time."""
MAX_ENDED_IN_A_TURN = 64
"""Sequences that fail in a turn of the event loop because an outage took too long."""
RECONNECT_S = 0.2
"""Time between two attempts to connect."""
DESCRIBE_TIMEOUT_S = 1.0


class Receiver(Protocol):
    """Takes the output of sequences."""

    async def begin(self, model: ServedModel) -> None:
        """Called with the model before any sequence is submitted to a scheduler that serves."""

    def deliver(self, step: StepOutput) -> None:
        """Called with the output of a step; the ids are those of `SchedulerLink.running`."""

    def end(self, sample: Sample, reason: FinishReason | None = None, error: SlipstreamError | None = None) -> None:
        """Called when a sequence is over without output: with the reason or the error."""

    async def settled(self) -> None:
        """Returns when all that was delivered is in the sequences' output."""


class SchedulerLink:
    """Runs the sequences of samples at the scheduler, whichever there is. Belongs to the event loop.

    A sequence waits while there is no scheduler, and runs on at the next one from the output that it has.
    """

    def __init__(
        self,
        address: str,
        load_model: Callable[[SchedulerDescription, ServedModel | None], ServedModel],
        *,
        capacity: int,
        outage_timeout_s: float,
        max_lost_epochs: int = 3,
        on_serving: Callable[[bool], None] = lambda _: None,
        on_given_up: Callable[[], None] = lambda: None,
        connect: Callable[[str], SchedulerConnection] | None = None,
    ) -> None:
        """`load_model`: see there; called on a thread. `capacity`: sequences that may wait for their first slot.

        A sequence that has had no scheduler for `outage_timeout_s` fails. A sequence that ran in `max_lost_epochs` lost
        epochs in a row without a token is the suspected cause: it fails, and `on_given_up` is called. `on_serving` is
        called with whether there is a scheduler, when that changes. `connect` makes the connection to an address.
        """
        self.running: dict[int, Sample] = {}
        """The samples whose sequences the scheduler has now, by their ids."""
        self.num_waiting = 0
        """Sequences that wait for their first slot, and were not cancelled."""
        self.num_running = 0
        """Sequences that had a slot and are not over."""
        self.description: SchedulerDescription | None = None
        """The description of the scheduler that serves, or that served last."""
        self._address = address
        self._load_model = load_model
        self._capacity = capacity
        self._outage_timeout_s = outage_timeout_s
        self._max_lost_epochs = max_lost_epochs
        self._on_serving = on_serving
        self._on_given_up = on_given_up
        self._connect = connect or SchedulerConnection
        self._receiver: Receiver | None = None
        self._samples: dict[Sample, None] = {}
        """All that are not over, in the order of their arrival."""
        self._leaving: set[int] = set()
        """Ids that were cancelled before their first slot, and of which the scheduler has not said the end."""
        self._model: ServedModel | None = None
        self._absence: SlipstreamError | None = UnavailableError(
            "the scheduler is not attached to its workers", retry_after_ms=RETRY_AFTER_MS
        )
        self._is_final = False
        self._shut: SlipstreamError | None = None
        self._last_id = 0
        self._outgoing: list[Sample] = []
        self._cancelled: list[int] = []
        self._is_flushing = False
        self._outage_at = time.monotonic()
        self._expiry: asyncio.TimerHandle | None = None
        self._connection: SchedulerConnection | None = None
        self._stream: SchedulerStream | None = None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples whose sequences are not over, oldest first."""
        return tuple(self._samples)

    def model(self) -> ServedModel:
        """Returns the model that is served, or was last.

        Raises UnavailableError before the first one, FailedPreconditionError if the scheduler can never serve.
        """
        if self._model is None or self._is_final:
            assert self._absence is not None, "without a model there is a reason for it"
            raise self._absence.again()
        return self._model

    def stream_interval_s(self) -> float:
        """Returns the least time between two messages of a stream by default: 0 on a GPU, 5 ms on a CPU."""
        return 0.005 if self.description is not None and self.description.server.fence == "host" else 0.0

    async def describe(self) -> SchedulerDescription:
        """Asks the scheduler for its description, with its load; returns the last known one if it does not answer.

        Raises the errors of `model`.
        """
        if self.description is None:
            self.model()
        found = await asyncio.to_thread(self._describe_now)
        assert found is not None, "a model has a description"
        return found

    def read_state(self) -> ServerState | None:
        """As `describe`, on any thread but the event loop's; None before the first scheduler."""
        found = self._describe_now()
        return None if found is None else found.server

    def _describe_now(self) -> SchedulerDescription | None:
        connection = self._connection
        if connection is not None and self._absence is None:
            try:
                return SchedulerDescription.from_pb(connection.describe())
            except grpc.RpcError:
                logger.debug("the scheduler does not describe itself", exc_info=True)
        return self.description

    def add(self, *samples: Sample) -> None:
        """Adds samples that may have output already, without a look at the queue's bound."""
        for sample in samples:
            self._samples[sample] = None
            sample.added_at = time.monotonic()
            if sample.admitted_at is None:
                self.num_waiting += 1
            else:
                self.num_running += 1
            if self._absence is None:
                self._send(sample)
        if self._absence is not None:
            self._watch_outage()

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises ResourceExhaustedError if the queue has no room for `num_sequences` more, and the error of `shut`.

        A sequence that was cancelled takes no place, until as many are leaving as the queue has places.
        """
        if self._shut is not None:
            raise self._shut.again()
        num_taken = self.num_waiting + max(0, len(self._leaving) - self._capacity)
        if num_taken + num_sequences > self._capacity:
            few = "full" if num_sequences == 1 else f"too full for {num_sequences} more"
            message = f"the queue is {few}: {num_taken} outputs are waiting, of at most {self._capacity}"
            raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)

    def cancel(self, sample: Sample) -> None:
        """Asks for the end of a sequence, which follows soon. No effect if it is over."""
        if sample.is_cancelled or sample not in self._samples:
            return
        sample.is_cancelled = True
        if sample.admitted_at is None:
            self.num_waiting -= 1
            if sample.id in self.running:
                self._leaving.add(sample.id)
        if sample.id:
            self._cancelled.append(sample.id)
            self._flush_soon()
        else:
            asyncio.get_running_loop().call_soon(self._abort, sample)

    def drop(self, sample: Sample) -> None:
        """Cancels a sequence, and forgets it at once: what the scheduler still sends for it is ignored."""
        self.cancel(sample)
        if sample in self._outgoing:
            # The scheduler never hears of it.
            self._outgoing.remove(sample)
            self._leaving.discard(sample.id)
        self._forget(sample)

    def release(self, sample: Sample) -> None:
        """Forgets a sequence. Called by the receiver when it is over."""
        self._leaving.discard(sample.id)
        self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        if sample in self._samples:
            del self._samples[sample]
            self.running.pop(sample.id, None)
            if sample.admitted_at is not None:
                self.num_running -= 1
            elif not sample.is_cancelled:
                self.num_waiting -= 1

    def shut(self, error: SlipstreamError) -> None:
        """Refuses new sequences with `error` from now on."""
        self._shut = error
        self._on_serving(False)

    async def run(self, receiver: Receiver) -> NoReturn:
        """Keeps the link until it is cancelled. Raises CheckpointError when the tokenizer cannot be loaded."""
        self._receiver = receiver
        with self._connect(self._address) as self._connection:
            while True:
                self._stream = self._connection.open()
                try:
                    while True:
                        messages, begun_at = await self._stream.receive(), time.monotonic()
                        for message in messages:
                            if isinstance(message, SchedulerGoneError):
                                raise message
                            await self._take(message, receiver)
                            # All that has arrived is taken in before readers go on, so that each gets it in one
                            # message; but clients are served in between, also after a long pause.
                            if time.monotonic() - begun_at > SLICE_S:
                                await asyncio.sleep(0)
                                begun_at = time.monotonic()
                except SchedulerGoneError as error:
                    if not self._is_final:
                        await self._pause(receiver, str(error))
                finally:
                    await asyncio.to_thread(self._stream.close)
                await asyncio.sleep(RECONNECT_S)

    async def _take(self, message: scheduler_pb2.RunResponse, receiver: Receiver) -> None:
        if message.HasField("state"):
            await self._change_state(SchedulerState.from_pb(message.state), receiver)
        if message.HasField("output"):
            step = StepOutput.from_pb(message.output)
            self._note_admitted(step)
            receiver.deliver(step)
        for refusal in map(Refusal.from_pb, message.refusals):
            self._leaving.discard(refusal.sequence)
            if (sample := self.running.pop(refusal.sequence, None)) is not None:
                receiver.end(sample, error=refusal.error)

    def _flush(self) -> None:
        """Sends new sequences and cancels, one message in each turn of the event loop."""
        self._is_flushing = False
        if self._absence is not None or self.description is None or self._stream is None:
            return
        num_sequences = _num_in_message(self._outgoing)
        now, self._outgoing = self._outgoing[:num_sequences], self._outgoing[num_sequences:]
        cancelled: list[int] = []
        if self._outgoing:
            self._flush_soon()
        else:
            cancelled, self._cancelled = self._cancelled, []
        if now or cancelled:
            epoch = self.description.server.epoch
            sequences = [message for sample in now if (message := self._encoded(sample, epoch)) is not None]
            self._stream.send(scheduler_pb2.RunRequest(sequences=sequences, cancelled=cancelled))
        for sample in now:
            sample.times.submitted_ns = sample.times.submitted_ns or time.monotonic_ns()

    def _encoded(self, sample: Sample, epoch: int) -> scheduler_pb2.NewSequence | None:
        """Encodes a sequence. One that cannot be encoded fails, and no other."""
        try:
            return sample.to_scheduler(epoch)
        except Exception:
            logger.exception("a sequence cannot be submitted", extra={"job": sample.spec.job_id})
            assert self._receiver is not None, "there is a receiver where there is a stream"
            self._leaving.discard(sample.id)
            self._fail(sample, self._receiver, InternalError("it cannot be submitted; the server's log has more"))
            return None

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _change_state(self, state: SchedulerState, receiver: Receiver) -> None:
        if state.serving is not None:
            await self._serve(state.serving, receiver)
            return
        if state.is_final:
            error = FailedPreconditionError(f"this server cannot serve: {state.paused}")
            await self._pause(receiver, state.paused, error)
            for sample in self.samples:
                self._fail(sample, receiver, error)
        else:
            await self._pause(receiver, state.paused)

    async def _serve(self, description: SchedulerDescription, receiver: Receiver) -> None:
        """Submits all sequences to a scheduler that serves from now on."""
        if self._absence is None:
            await self._pause(receiver, "the scheduler attached to its workers again")
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(None, self._load_model, description, self._model)
        if self._model is not None and self._model.identity != model.identity:
            # From now on new sequences are of the new model, and wait until it serves.
            self._model = model
            for sample in self.samples:
                receiver.end(sample, error=UnavailableError("the model changed"))
            await receiver.settled()
        await receiver.begin(model)
        self.description, self._model, self._absence, self._is_final = description, model, None, False
        for sample in self._samples:
            if not sample.is_cancelled:
                self._send(sample)
        epoch = {"epoch": description.server.epoch}
        logger.info("serving %s, %d sequences", description.server.model, len(self._samples), extra=epoch)
        self._on_serving(self._shut is None)

    async def _pause(self, receiver: Receiver, reason: str, error: SlipstreamError | None = None) -> None:
        """Keeps all sequences for the next scheduler, because this one has dropped them."""
        if self._absence is None:
            self._outage_at = time.monotonic()
            logger.warning("no scheduler: %s", reason)
        self._absence = error or UnavailableError(f"no scheduler: {reason}", retry_after_ms=RETRY_AFTER_MS)
        self._is_final = error is not None
        self._on_serving(False)
        await receiver.settled()
        self._outgoing.clear()
        self._cancelled.clear()
        self._leaving.clear()
        self.running.clear()
        for sample in self.samples:
            sample.lose_epoch()
            if sample.is_cancelled:
                self._abort(sample)
            elif sample.num_lost_epochs >= self._max_lost_epochs:
                self._give_up(sample, receiver)
        self._watch_outage()

    def _send(self, sample: Sample) -> None:
        self._last_id += 1
        sample.id = self._last_id
        self.running[sample.id] = sample
        self._outgoing.append(sample)
        self._flush_soon()

    def _abort(self, sample: Sample) -> None:
        # It may have begun again meanwhile.
        if self._receiver is not None and sample.is_cancelled and sample in self._samples:
            self._receiver.end(sample, FinishReason.ABORT)

    def _give_up(self, sample: Sample, receiver: Receiver) -> None:
        count = sample.num_lost_epochs
        error = InternalError(
            f"{count} times in a row all work was lost while this sequence ran, before its next token"
        )
        logger.error("given up: %s", error, extra={"job": sample.spec.job_id})
        self._fail(sample, receiver, error)
        self._on_given_up()

    def _fail(self, sample: Sample, receiver: Receiver, error: SlipstreamError) -> None:
        # The receiver's end may take a while, and no scheduler is to get the sequence meanwhile.
        if not sample.is_cancelled and sample.admitted_at is None:
            self.num_waiting -= 1
        sample.is_cancelled = True
        receiver.end(sample, error=error)

    def _note_admitted(self, step: StepOutput) -> None:
        for number, admitted_ns in zip(step.admitted, step.admitted_ns, strict=True):
            self._leaving.discard(number)
            sample = self.running.get(number)
            if sample is None:
                continue
            sample.is_in_slot = True
            if sample.admitted_at is None:
                sample.admitted_at = admitted_ns / 1e9
                self.num_running += 1
                self.num_waiting -= not sample.is_cancelled
        for number, num_tokens in step.cached_tokens.items():
            sample = self.running.get(number)
            if sample is not None and not sample.num_new_tokens:
                sample.cached_tokens = num_tokens
        if self._leaving:
            ended = zip(step.sequences, step.finish_reasons, strict=True)
            self._leaving.difference_update(number for number, reason in ended if reason is not None)

    def _watch_outage(self) -> None:
        """Sets a timer for the sequence that has been without a scheduler for longest, unless there is one."""
        if self._expiry is not None or self._absence is None:
            return
        since = [max(self._outage_at, sample.added_at) for sample in self._samples if not sample.is_cancelled]
        if not since:
            return
        delay_s = min(since) + self._outage_timeout_s - time.monotonic()
        self._expiry = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        if self._absence is None or self._receiver is None:
            return
        latest = time.monotonic() - self._outage_timeout_s
        message = f"{self._absence}, for {self._outage_timeout_s:g} s"
        unfinished = (sample for sample in self._samples if not sample.is_cancelled)
        late = (sample for sample in unfinished if max(self._outage_at, sample.added_at) <= latest)
        for sample in tuple(islice(late, MAX_ENDED_IN_A_TURN)):
            self._fail(sample, self._receiver, UnavailableError(message, retry_after_ms=RETRY_AFTER_MS))
        self._watch_outage()


def _num_in_message(samples: Sequence[Sample]) -> int:
    """Returns the number of the first sequences that go into one message."""
    num_tokens = 0
    for number, sample in enumerate(samples):
        num_tokens += len(sample.spec.prompt) + sample.num_tokens + len(sample.spec.grammar)
        if number and (num_tokens > MAX_TOKENS_PER_MESSAGE or number == MAX_SEQUENCES_PER_MESSAGE):
            return number
    return len(samples)


class SchedulerGoneError(Exception):
    """The stream to the scheduler is over; the message says why."""


Message = scheduler_pb2.RunResponse | SchedulerGoneError
"""A message of a stream, or its end."""


class SchedulerConnection:
    """A connection to a scheduler, there or not; a context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def open(self) -> SchedulerStream:
        """Calls Run. Called on the event loop."""
        return SchedulerStream(self._stub)

    def describe(self) -> scheduler_pb2.SchedulerDescription:
        """Calls Describe, on any thread. Raises grpc.RpcError."""
        found: scheduler_pb2.SchedulerDescription = self._stub.Describe(
            scheduler_pb2.DescribeSchedulerRequest(), timeout=DESCRIBE_TIMEOUT_S
        )
        return found


async def take_all(messages: asyncio.Queue[Message]) -> list[Message]:
    """Waits for messages and returns all that there are."""
    taken = [await messages.get()]
    while not messages.empty():
        taken.append(messages.get_nowait())
    return taken


async def watch_pages(address: str) -> AsyncGenerator[scheduler_pb2.PageChanges, None]:
    """Calls WatchPages of the scheduler at an address. Raises its errors; UnavailableError when the stream ends."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        try:
            async for message in stub.WatchPages(scheduler_pb2.WatchPagesRequest()):
                yield message
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotImplementedError from error
            raise error_from_rpc(error) from error
    raise UnavailableError("the prefix cache is gone with its epoch", retry_after_ms=RETRY_AFTER_MS)


class SchedulerStream:
    """A call of Run. Belongs to the event loop, but for `close`.

    A thread reads it, so that all messages that arrive while the loop is busy are there together afterwards. On the
    loop, `grpc.aio` reads a message a turn: a gateway that is late then gets later by seconds, not by milliseconds.
    """

    def __init__(self, stub: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._requests: SimpleQueue[scheduler_pb2.RunRequest | None] = SimpleQueue()
        self._call = stub.Run(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, name="scheduler link", daemon=True)
        self._thread.start()

    def send(self, request: scheduler_pb2.RunRequest) -> None:
        """Sends a message and returns at once."""
        self._requests.put(request)

    async def receive(self) -> list[Message]:
        """Waits for messages and returns all that there are."""
        return await take_all(self._messages)

    def close(self) -> None:
        """Ends the call. Blocks until its thread has ended."""
        self._requests.put(None)
        self._call.cancel()
        self._thread.join()

    def _read(self) -> None:
        end = SchedulerGoneError("the scheduler ended the stream")
        try:
            for message in self._call:
                self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
        except grpc.RpcError as error:
            end = SchedulerGoneError(str(error_from_rpc(error)))
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._messages.put_nowait, end)


def channel_options() -> list[ChannelOption]:
    """Returns the arguments of a channel to the scheduler."""
    backoff_ms = int(1000 * RECONNECT_S)
    return [
        *SAME_HOST.options(),
        ("grpc.initial_reconnect_backoff_ms", backoff_ms),
        ("grpc.min_reconnect_backoff_ms", backoff_ms),
        ("grpc.max_reconnect_backoff_ms", backoff_ms),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
