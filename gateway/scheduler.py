"""The link from a gateway to the scheduler: keeps its stream open, and submits sequences again when it broke."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.loop_turns import SLICE_S
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import Refusal, StepOutput
from slipstream.common.wire.server import SchedulerDescription, SchedulerState
from slipstream.gateway.scheduler_stream import RECONNECT_S, SchedulerConnection, SchedulerGoneError
from slipstream.protos import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.sample import RunningSequence
    from slipstream.gateway.scheduler_stream import Connection, RunStream

logger = logging.getLogger(__name__)

MAX_TOKENS_PER_MESSAGE = 2**16
"""Prompts and outputs in one message to the scheduler; a longer sequence goes alone."""
MAX_SEQUENCES_PER_MESSAGE = 64
"""Encoding so many takes a few milliseconds of the event loop's time."""
MAX_ENDED_IN_A_TURN = 64
"""Sequences that fail at once because an outage took too long."""


class Receiver(Protocol):
    """Takes the output of sequences."""

    async def begin(self, model: ServedModel) -> None:
        """Called with the model before any sequence is submitted to a scheduler that serves."""

    def deliver(self, step: StepOutput) -> None:
        """Called with the output of a step; the ids are those of `SchedulerLink.running`."""

    def end(
        self, sequence: RunningSequence, reason: FinishReason | None = None, error: SlipstreamError | None = None
    ) -> None:
        """Called when a sequence is over without output: with the reason or the error."""

    async def settled(self) -> None:
        """Returns when all that was delivered is in the sequences' output."""


class SchedulerLink:
    """Runs sequences at the scheduler, whichever there is. Belongs to the event loop.

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
        connect: Callable[[str], Connection] = SchedulerConnection,
    ) -> None:
        """`load_model`: see there; called on a thread. `capacity`: sequences that may wait for their first slot.

        A sequence that has had no scheduler for `outage_timeout_s` fails. One that had a slot when `max_lost_epochs`
        epochs in a row ended, and got no token in them, may be what ends them: it fails, too, and `on_given_up` is
        called. `on_serving` is called with whether there is a scheduler, when that changes. `connect` makes the
        connection to an address.
        """
        self.running: dict[int, RunningSequence] = {}
        """The sequences that the scheduler has now, by their ids."""
        self.num_waiting = 0
        """Sequences that wait for their first slot, and were not cancelled."""
        self._num_leaving = 0
        """Those that were cancelled meanwhile, and are not over."""
        self.description: SchedulerDescription | None = None
        """The description of the scheduler that serves, or that served last."""
        self._address = address
        self._load_model = load_model
        self._capacity = capacity
        self._outage_timeout_s = outage_timeout_s
        self._max_lost_epochs = max_lost_epochs
        self._on_serving = on_serving
        self._on_given_up = on_given_up
        self._receiver: Receiver | None = None
        self._sequences: dict[RunningSequence, None] = {}
        """All that are not over, in the order of their arrival."""
        self._model: ServedModel | None = None
        self._absence: SlipstreamError | None = UnavailableError(
            "the scheduler is not attached to its workers", retry_after_ms=RETRY_AFTER_MS
        )
        self._is_final = False
        self._shut: SlipstreamError | None = None
        self._last_id = 0
        self._outgoing: list[RunningSequence] = []
        self._cancelled: list[int] = []
        self._is_flushing = False
        self._outage_at = time.monotonic()
        self._expiry: asyncio.TimerHandle | None = None
        self._connect = connect
        self._connection: Connection | None = None
        self._stream: RunStream | None = None

    @property
    def num_running(self) -> int:
        """Sequences that had a slot and are not over."""
        return len(self._sequences) - self.num_waiting - self._num_leaving

    @property
    def sequences(self) -> tuple[RunningSequence, ...]:
        """The unfinished sequences that were submitted, oldest first."""
        return tuple(self._sequences)

    def model(self) -> ServedModel:
        """The model that is served, or was last.

        Raises UnavailableError before the first one, FailedPreconditionError if the scheduler can never serve.
        """
        if self._model is None or self._is_final:
            assert self._absence is not None, "without a model there is a reason for it"
            raise self._absence.again()
        return self._model

    def stream_interval_s(self) -> float:
        """The least time between two messages of a stream where no setting says it: 0 on a GPU, 5 ms on a CPU."""
        return 0.005 if self.description is not None and self.description.server.fence == "host" else 0.0

    async def describe(self) -> SchedulerDescription:
        """Asks the scheduler for its description, with its load; returns the last known one if it does not answer.

        Raises the errors of `model`.
        """
        if self.description is None:
            self.model()
        if self._absence is None and self._connection is not None:
            try:
                return SchedulerDescription.from_pb(await asyncio.to_thread(self._connection.describe))
            except grpc.RpcError:
                logger.debug("the scheduler does not describe itself", exc_info=True)
        assert self.description is not None, "a model comes with a description"
        return self.description

    def add(self, *sequences: RunningSequence) -> None:
        """Adds sequences that may have output already, without a look at the queue's bound."""
        for sequence in sequences:
            self._sequences[sequence] = None
            sequence.added_at = time.monotonic()
            sequence.is_waiting = sequence.stats.admitted_at is None
            self.num_waiting += sequence.is_waiting
            if self._absence is None:
                self._send(sequence)
        if self._absence is not None:
            self._watch_outage()

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises ResourceExhaustedError if the queue has no room for so many more, and the error of `shut`.

        A sequence that was cancelled takes no place, until as many are on their way out as the queue has places.
        """
        if self._shut is not None:
            raise self._shut.again()
        num_taken = self.num_waiting + max(0, self._num_leaving - self._capacity)
        if num_taken + num_sequences > self._capacity:
            few = "full" if num_sequences == 1 else f"too full for {num_sequences} more"
            message = f"the queue is {few}: {num_taken} outputs are waiting, of at most {self._capacity}"
            raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)

    def cancel(self, sequence: RunningSequence) -> None:
        """Asks for the end of a sequence; it comes soon. No effect if it is over."""
        if sequence.is_cancelled or sequence not in self._sequences:
            return
        sequence.is_cancelled = True
        if sequence.is_waiting:
            sequence.is_waiting, sequence.is_leaving = False, True
            self.num_waiting, self._num_leaving = self.num_waiting - 1, self._num_leaving + 1
        if sequence.id:
            self._cancelled.append(sequence.id)
            self._flush_soon()
        else:
            asyncio.get_running_loop().call_soon(self._abort, sequence)

    def release(self, sequence: RunningSequence) -> None:
        """Called by the receiver when a sequence is over."""
        if sequence in self._sequences:
            del self._sequences[sequence]
            self.num_waiting -= sequence.is_waiting
            self._num_leaving -= sequence.is_leaving
            self.running.pop(sequence.id, None)

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
                            await self._take(message, receiver)
                            # All that has arrived is taken in before readers go on, so that each gets it in one
                            # message; but clients are served in between, also when the gateway is far behind.
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
            if (sequence := self.running.get(refusal.sequence)) is not None:
                receiver.end(sequence, error=refusal.error)

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
            sequences = [message for sequence in now if (message := self._encoded(sequence, epoch)) is not None]
            self._stream.send(scheduler_pb2.RunRequest(sequences=sequences, cancelled=cancelled))
        for sequence in now:
            sequence.stats.submitted_at = sequence.stats.submitted_at or time.monotonic()

    def _encoded(self, sequence: RunningSequence, epoch: int) -> scheduler_pb2.NewSequence | None:
        """Encodes a sequence. One that cannot be encoded fails, and no other."""
        try:
            return sequence.to_pb(epoch)
        except Exception:
            logger.exception("a sequence cannot be submitted", extra={"job": sequence.spec.job_id})
            assert self._receiver is not None, "there is a receiver where there is a stream"
            self._fail(sequence, self._receiver, InternalError("it cannot be submitted; the server's log has more"))
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
            for sequence in tuple(self._sequences):
                self._fail(sequence, receiver, error)
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
            for sequence in tuple(self._sequences):
                receiver.end(sequence, error=UnavailableError("the model changed"))
            await receiver.settled()
        await receiver.begin(model)
        self.description, self._model, self._absence, self._is_final = description, model, None, False
        for sequence in self._sequences:
            if not sequence.is_cancelled:
                self._send(sequence)
        epoch = {"epoch": description.server.epoch}
        logger.info("serving %s, %d sequences", description.server.model, len(self._sequences), extra=epoch)
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
        self.running.clear()
        for sequence in tuple(self._sequences):
            sequence.lose_epoch()
            if sequence.is_cancelled:
                self._abort(sequence)
            elif sequence.num_lost_epochs >= self._max_lost_epochs:
                self._give_up(sequence, receiver)
        self._watch_outage()

    def _send(self, sequence: RunningSequence) -> None:
        self._last_id += 1
        sequence.id = self._last_id
        self.running[sequence.id] = sequence
        self._outgoing.append(sequence)
        self._flush_soon()

    def _abort(self, sequence: RunningSequence) -> None:
        if self._receiver is not None and sequence in self._sequences:
            self._receiver.end(sequence, FinishReason.ABORT)

    def _give_up(self, sequence: RunningSequence, receiver: Receiver) -> None:
        count = sequence.num_lost_epochs
        error = InternalError(
            f"{count} times in a row all work was lost while this sequence ran, before its next token"
        )
        logger.error("given up: %s", error, extra={"job": sequence.spec.job_id})
        self._fail(sequence, receiver, error)
        self._on_given_up()

    @staticmethod
    def _fail(sequence: RunningSequence, receiver: Receiver, error: SlipstreamError) -> None:
        # The receiver's end may take a while, and no scheduler is to get the sequence meanwhile.
        sequence.is_cancelled = True
        receiver.end(sequence, error=error)

    def _note_admitted(self, step: StepOutput) -> None:
        for number, admitted_ns in zip(step.admitted, step.admitted_ns, strict=True):
            sequence = self.running.get(number)
            if sequence is None:
                continue
            sequence.is_in_slot = True
            self.num_waiting -= sequence.is_waiting
            self._num_leaving -= sequence.is_leaving
            sequence.is_waiting = sequence.is_leaving = False
            if sequence.stats.admitted_at is None:
                sequence.stats.admitted_at = admitted_ns / 1e9
        for number, num_tokens in step.cached_tokens.items():
            sequence = self.running.get(number)
            if sequence is not None and not sequence.output:
                sequence.stats.cached_tokens = num_tokens

    def _watch_outage(self) -> None:
        """Sets a timer for the sequence that has been without a scheduler for longest, unless there is one."""
        if self._expiry is not None or self._absence is None:
            return
        since = [max(self._outage_at, one.added_at) for one in self._sequences if not one.is_cancelled]
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
        unfinished = (one for one in self._sequences if not one.is_cancelled)
        late = (one for one in unfinished if max(self._outage_at, one.added_at) <= latest)
        for sequence in tuple(islice(late, MAX_ENDED_IN_A_TURN)):
            self._fail(sequence, self._receiver, UnavailableError(message, retry_after_ms=RETRY_AFTER_MS))
        self._watch_outage()


def _num_in_message(sequences: Sequence[RunningSequence]) -> int:
    """The number of the first sequences that go into one message."""
    num_tokens = 0
    for number, sequence in enumerate(sequences):
        num_tokens += len(sequence.spec.prompt) + len(sequence.output)
        if number and (num_tokens > MAX_TOKENS_PER_MESSAGE or number == MAX_SEQUENCES_PER_MESSAGE):
            return number
    return len(sequences)
