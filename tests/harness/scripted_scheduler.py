"""A scheduler without a model, behind a real socket: its streams break, pause and end as a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.job import FinishReason, TokenLogprobs
from slipstream.common.wire.sequence import Refusal, SequenceSpec, StepOutput
from slipstream.common.wire.server import SchedulerDescription, SchedulerState
from slipstream.protos import scheduler_pb2, scheduler_pb2_grpc
from tests.harness.example_states import STATE, TOKENS_PER_STEP

EOS_ID = 1

DESCRIPTION = SchedulerDescription(
    server=STATE,
    tokenizer_path="/nowhere",
    eos_token_ids=(EOS_ID,),
    max_sequences=8192,
    most_draft_tokens=STATE.num_draft_tokens,
)


@dataclass(slots=True, eq=False)
class FakeSequence:
    """A sequence of a stream."""

    id: int
    spec: SequenceSpec
    num_tokens: int
    """Output tokens, those that it came with included."""


@dataclass(slots=True, eq=False)
class _Stream:
    waiting: list[FakeSequence] = field(default_factory=list)
    running: list[FakeSequence] = field(default_factory=list)
    aborted: list[FakeSequence] = field(default_factory=list)
    last_id: int = 0
    num_states: int = 0
    """States that it was told of."""
    broken_by: str | None = None
    is_over: bool = False


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Serves sequences, all of them in one batch a step.

    A sequence's k-th token is the k-th of its prompt, from the beginning again at its end. The last token of a step is
    the target's own, those before it were drafted.
    """

    def __init__(self, description: SchedulerDescription = DESCRIPTION, *, slots: int = 64) -> None:
        self.may_step = threading.Event()
        self.may_step.set()
        self.beyond_tokens: int | None = None
        """Sequences with more output than this are too long for the draft, if it is set."""
        self.pause_tokens: int | None = None
        """A sequence that has as many tokens gets no more."""
        self.stuck: set[str] = set()
        """Jobs that get no tokens."""
        self.holds_cancelled = False
        """True: what is cancelled does not end, as before the end of a long step."""
        self.error: SlipstreamError | None = None
        """Ends every running sequence at the next step."""
        self.slots = slots
        self.cancelled: list[FakeSequence] = []
        self.submitted: list[FakeSequence] = []
        """Everything that ever came."""
        self.num_streams = 0
        self.page_changes: list[scheduler_pb2.PageChanges] | None = None
        """What WatchPages sends before it ends; None does not serve it."""
        self._states = [SchedulerState(serving=description)]
        self._streams: list[_Stream] = []
        self._changed = threading.Condition()

    @property
    def running(self) -> list[FakeSequence]:
        """The sequences that have a slot now."""
        with self._changed:
            return [sequence for stream in self._streams for sequence in stream.running]

    @property
    def description(self) -> SchedulerDescription | None:
        """Of now."""
        return self._states[-1].serving

    def change(self, state: SchedulerState) -> None:
        """Changes the state, which drops all sequences."""
        with self._changed:
            self._states.append(state)
            self._changed.notify_all()

    def pause(self, reason: str = "verify is gone", *, is_final: bool = False) -> None:
        """Serves nothing from now on."""
        self.change(SchedulerState(paused=reason, is_final=is_final))

    def serve(self, description: SchedulerDescription = DESCRIPTION, **changes: Any) -> None:
        """Serves, in a new epoch, with some of the server's values changed."""
        with self._changed:
            epoch = STATE.epoch + len(self._states)
        self.change(SchedulerState(serving=replace(description, server=replace(STATE, epoch=epoch, **changes))))

    def break_streams(self, reason: str = "broken by the test") -> None:
        """Ends every stream with an error."""
        with self._changed:
            for stream in self._streams:
                stream.broken_by = reason
            self._changed.notify_all()

    def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        """See scheduler.proto."""
        if self.description is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, self._states[-1].paused)
        assert self.description is not None
        return self.description.to_pb()

    def WatchPages(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """See scheduler.proto."""
        if self.page_changes is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        yield from self.page_changes or ()

    def Run(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """See scheduler.proto."""
        stream = _Stream()
        reader = threading.Thread(target=self._read, args=(stream, requests), daemon=True)
        with self._changed:
            self._streams.append(stream)
            self.num_streams += 1
            stream.num_states = len(self._states) - 1
        context.add_callback(lambda: self._end(stream))
        reader.start()
        try:
            while not stream.is_over:
                with self._changed:
                    response = self._next(stream)
                if stream.broken_by is not None:
                    context.abort(grpc.StatusCode.UNAVAILABLE, stream.broken_by)
                if response is not None:
                    yield response
        finally:
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        with self._changed:
            stream.is_over = True
            if stream in self._streams:
                self._streams.remove(stream)
            self._changed.notify_all()

    def _read(self, stream: _Stream, requests: Any) -> None:
        try:
            for request in requests:
                with self._changed:
                    self._take(stream, request)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # the stream is over

    def _take(self, stream: _Stream, request: Any) -> None:
        epoch = None if self.description is None else self.description.server.epoch
        for message in request.sequences:
            assert message.id > stream.last_id, "ids are never used twice"
            stream.last_id = message.id
            if message.epoch == epoch:
                spec = SequenceSpec.from_pb(message)
                stream.waiting.append(FakeSequence(message.id, spec, len(spec.output)))
                self.submitted.append(stream.waiting[-1])
        for sequence in [*stream.waiting, *stream.running]:
            if sequence.id in request.cancelled:
                (stream.waiting if sequence in stream.waiting else stream.running).remove(sequence)
                stream.aborted.append(sequence)
                self.cancelled.append(sequence)

    def _next(self, stream: _Stream) -> Any:
        """The next message; None, after a short wait, if there is none."""
        if stream.num_states < len(self._states):
            state = self._states[stream.num_states]
            stream.num_states += 1
            for sequences in (stream.waiting, stream.running, stream.aborted):
                sequences.clear()
            return scheduler_pb2.RunResponse(state=state.to_pb())
        admitted = stream.waiting[: max(0, self.slots - len(stream.running))]
        del stream.waiting[: len(admitted)]
        stream.running += admitted
        rows: list[tuple[FakeSequence, list[int], FinishReason | None]] = []
        if not self.holds_cancelled:
            rows = [(sequence, [], FinishReason.ABORT) for sequence in stream.aborted]
            stream.aborted.clear()
        if self.may_step.is_set() and self.error is not None:
            refusals = [Refusal(sequence.id, self.error).to_pb() for sequence in stream.running]
            stream.running.clear()
            if refusals:
                return scheduler_pb2.RunResponse(refusals=refusals)
        elif self.may_step.is_set():
            rows += [self._step(sequence) for sequence in stream.running if not self._is_paused(sequence)]
            ended = [sequence for sequence, _, reason in rows if reason is not None]
            stream.running = [sequence for sequence in stream.running if sequence not in ended]
        if rows or admitted:
            return scheduler_pb2.RunResponse(output=_step_output(rows, admitted, self.beyond_tokens).to_pb())
        self._changed.wait(0.002 if stream.running else 0.5)
        return None

    def _is_paused(self, sequence: FakeSequence) -> bool:
        is_stuck = sequence.spec.job_id in self.stuck
        return is_stuck or (self.pause_tokens is not None and sequence.num_tokens >= self.pause_tokens)

    @staticmethod
    def _step(sequence: FakeSequence) -> tuple[FakeSequence, list[int], FinishReason | None]:
        spec, start = sequence.spec, sequence.num_tokens
        tokens = [spec.prompt[(start + number) % len(spec.prompt)] for number in range(TOKENS_PER_STEP)]
        tokens = tokens[: spec.max_new_tokens - start]
        reason = FinishReason.LENGTH if start + len(tokens) == spec.max_new_tokens else None
        for number, token in enumerate(tokens, start=1):
            if token in spec.stop_token_ids:
                tokens, reason = tokens[:number], FinishReason.STOP
                break
        sequence.num_tokens += len(tokens)
        return sequence, tokens, reason


def _step_output(
    rows: list[tuple[FakeSequence, list[int], FinishReason | None]],
    admitted: list[FakeSequence],
    beyond_tokens: int | None,
) -> StepOutput:
    now_ns = time.monotonic_ns()
    return StepOutput(
        sequences=[sequence.id for sequence, _, _ in rows],
        num_tokens=[len(tokens) for _, tokens, _ in rows],
        num_accepted=[TOKENS_PER_STEP - 1 if tokens else 0 for _, tokens, _ in rows],
        finish_reasons=[reason for _, _, reason in rows],
        tokens=[token for _, tokens, _ in rows for token in tokens],
        num_draft_tokens=TOKENS_PER_STEP - 1 if any(tokens for _, tokens, _ in rows) else 0,
        published_ns=now_ns,
        is_beyond_draft=[] if beyond_tokens is None else [one.num_tokens > beyond_tokens for one, _, _ in rows],
        admitted=[sequence.id for sequence in admitted],
        admitted_ns=[now_ns for _ in admitted],
        # A sequence that goes on elsewhere may find more in that cache.
        cached_tokens={one.id: len(one.spec.prompt) // 2 + len(one.spec.output) for one in admitted},
        logprobs={
            sequence.id: tuple(logprobs_of(token, sequence.spec.top_logprobs) for token in tokens)
            for sequence, tokens, _ in rows
            if sequence.spec.top_logprobs is not None
        },
    )


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """A token's, made up."""
    return TokenLogprobs(-token / 2, tuple((token + number, -number / 4) for number in range(num_top)))


@contextmanager
def serving(scheduler: ScriptedScheduler, directory: str | Path) -> Iterator[str]:
    """Serves it at a Unix socket in a directory, and yields the address."""
    address = f"unix:{directory}/scheduler.sock"
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.http2.min_ping_interval_without_data_ms", 500)])
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        scheduler.break_streams("the scheduler ends")
        server.stop(0).wait()
