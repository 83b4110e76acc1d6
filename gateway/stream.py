"""A stream to a client: reads a job's output for one call, and bounds the writes of all streams of a gateway."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import DeadlineExceededError, InternalError, InvalidArgumentError, ResourceExhaustedError
from slipstream.gateway.sample import BROKEN_OUTPUT, Chunk
from slipstream.protos.generation_pb2 import FINISH_REASON_ABORT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence

    from google.protobuf.message import Message

    from slipstream.common.rpc.loop_turns import LoopTurns
    from slipstream.gateway.job import Job
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.sample import Sample

    Write = Callable[[Any], Awaitable[None]]
    Encode = Callable[[Chunk], Iterable[Message]]


class JobReader:
    """Reads every sample of a job from a token on, up to its end. Belongs to the event loop."""

    def __init__(
        self,
        job: Job,
        from_tokens: Sequence[int],
        metrics: RequestMetrics,
        turns: LoopTurns,
        *,
        on_broken: Callable[[Exception], None],
        field: str = "from_token",
        interval_s: float = 0.0,
    ) -> None:
        """`from_tokens`: an offset for each sample, 0 for samples without one; `field` is its name on the wire.

        `interval_s`: least time between two chunks, first tokens and ends excepted. `on_broken` is called with the
        error if the output cannot be turned into text. Raises InvalidArgumentError for an offset beyond the output, and
        for a sample that does not exist.
        """
        samples = job.samples
        if len(from_tokens) > len(samples):
            raise InvalidArgumentError(field, f"{len(from_tokens)} numbers", f"at most {len(samples)}, one a sample")
        for index, (offset, sample) in enumerate(zip(from_tokens, samples, strict=False)):
            if offset > sample.num_tokens:
                name = field if len(from_tokens) == 1 else f"{field}[{index}]"
                accepted = f"0 to {sample.num_tokens}, the tokens that there are"
                raise InvalidArgumentError(name, offset, accepted)
        self._job = job
        self._metrics = metrics
        self._turns = turns
        self._on_broken = on_broken
        self._interval_s = interval_s
        self._offsets = [*from_tokens, *(0 for _ in samples[len(from_tokens) :])]
        self._steps = [0 for _ in samples]
        """For each sample, the steps whose output was read."""
        self._unfinished = list(range(len(samples)))
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._is_late = False
        self._is_live = False
        """True once all that there was is read."""
        self._sent_at = 0.0

    async def send(self, write: Write, *, encode: Encode | None = None, timeout_s: float | None = None) -> None:
        """Writes each chunk when it is there, or the messages that `encode` makes of it; returns after the last one.

        Raises DeadlineExceededError when `timeout_s` is over, the error that ends the job, and InternalError if the
        output is broken.
        """
        job, turns, offsets = self._job, self._turns, self._offsets
        with self._deadline(timeout_s):
            for sample, offset in zip(job.samples, offsets, strict=True):
                await sample.detokenize_in_turns(offset)
            while self._unfinished:
                has_read = False
                for index in tuple(self._unfinished):
                    sample = job.samples[index]
                    # A reader that has sent all there is goes to wait at once, without a turn for it.
                    if not sample.can_read(offsets[index]):
                        continue
                    if not turns.has_time():
                        await turns.begin()
                    chunk = self._next(sample, is_plain=encode is None)
                    if chunk is None:
                        continue
                    has_read = True
                    if encode is None or isinstance(chunk, bytes):
                        await write(chunk)
                    else:
                        for message in encode(chunk):
                            await write(message)
                    if not job.times.first_sent_ns and offsets[index]:
                        job.times.first_sent_ns = time.monotonic_ns()
                if not has_read:
                    self._check_goes_on()
                    self._is_live = True
                    await self._wait(job.waiting)
                elif self._interval_s and self._unfinished and not self._has_end():
                    # Until the next chunk may be sent.
                    timer = self._loop.call_later(self._interval_s, self._wake_up)
                    try:
                        await self._wait(job.waiting_for_turn)
                    finally:
                        timer.cancel()

    def _next(self, sample: Sample, *, is_plain: bool) -> Chunk | bytes | None:
        """Returns the next chunk of a sample, encoded if it is one of many; None if there is none."""
        offset = self._offsets[sample.index]
        try:
            if is_plain and (encoded := sample.read_encoded(offset)) is not None:
                self._advance(sample, sample.num_tokens - offset)
                return encoded
            return self._read(sample, offset)
        except Exception as error:
            # Without stop strings, tokens become text with their first reader.
            self._on_broken(error)
            raise InternalError(BROKEN_OUTPUT) from error

    def _read(self, sample: Sample, offset: int) -> Chunk | None:
        chunk = sample.read(offset)
        if chunk is None:
            return None
        if chunk.finish_reason == FINISH_REASON_ABORT:
            chunk = _copy(chunk)
            chunk.abort_cause = self._job.abort_cause.to_pb()
            if self._job.error is not None:
                # Another sample's error is the end of this one, too, and is told after all output.
                if not chunk.token_ids:
                    return None
                for name in ("finish_reason", "abort_cause", "usage"):
                    chunk.ClearField(name)
        if chunk.token_ids:
            self._advance(sample, len(chunk.token_ids))
        if chunk.finish_reason:
            self._unfinished.remove(sample.index)
            if not self._unfinished:
                chunk, usage = _copy(chunk), self._job.usage
                assert usage is not None, "all samples have ended"
                chunk.job_usage.CopyFrom(usage.to_pb())
        return chunk

    def _advance(self, sample: Sample, num_tokens: int) -> None:
        if self._is_live:
            self._measure(sample)
        self._steps[sample.index] = sample.num_steps
        self._offsets[sample.index] += num_tokens

    def _measure(self, sample: Sample) -> None:
        """Measures a chunk that is sent while the job runs."""
        now = time.monotonic()
        self._metrics.publish_to_send.observe(now - sample.published_ns / 1e9)
        if sample.num_steps - self._steps[sample.index] > 1:
            is_behind = sample.published_before_ns / 1e9 >= self._sent_at + self._interval_s
            if is_behind or not self._interval_s:
                self._metrics.coalesced.inc()
        self._sent_at = now

    def _check_goes_on(self) -> None:
        """Raises the error that ends the job, or DeadlineExceededError. Called when there is nothing more to read."""
        job = self._job
        if job.error is not None:
            raise job.error.again()
        if self._is_late:
            raise DeadlineExceededError(f"job {job.job_id!r} had {job.num_tokens} tokens at the call's deadline")

    def _has_end(self) -> bool:
        """Returns whether the end of a sample is there to be read."""
        return any(self._job.samples[index].is_over for index in self._unfinished)

    async def _wait(self, waiting: dict[asyncio.Future[None], None]) -> None:
        """Waits among the readers of the job that are woken alike."""
        wake = self._wake = self._loop.create_future()
        waiting[wake] = None
        try:
            await wake
        finally:
            waiting.pop(wake, None)

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    @contextmanager
    def _deadline(self, timeout_s: float | None) -> Iterator[None]:
        """Sets one timer for all waits of the reader."""
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._be_late)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _be_late(self) -> None:
        self._is_late = True
        self._wake_up()


def _copy(chunk: Chunk) -> Chunk:
    """Returns a chunk to be changed: other readers may get the same one."""
    copied = Chunk()
    copied.CopyFrom(chunk)
    return copied


MAX_PENDING = 64
LONGEST_S = 0.02
"""A write that takes longer waits for its client, and leaves its place to another stream."""


class StreamWrites:
    """Bounds the writes of all streams of a gateway, those included that it forwards. Belongs to the event loop."""

    def __init__(self, timeout_s: float, on_cut_off: Callable[[], None]) -> None:
        """Made on the event loop.

        A stream is cut off when one of its writes takes `timeout_s`; `on_cut_off` is called then.
        """
        self._timeout_s = timeout_s
        self._on_cut_off = on_cut_off
        self._pending = PendingWrites(asyncio.get_running_loop())

    @asynccontextmanager
    async def bounding(self, write: Write) -> AsyncIterator[Write]:
        """Yields what writes the messages of one stream, by `write`.

        Raises ResourceExhaustedError if the client reads nothing. By then gRPC holds a few MiB of the stream.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                with StreamWriter(write, self._pending, timeout, self._timeout_s) as writer:
                    yield writer.write
        except TimeoutError:
            if not timeout.expired():
                raise
            self._on_cut_off()
            message = f"the client read nothing for {self._timeout_s:g} s"
            raise ResourceExhaustedError(message, retry_after_ms=0) from None


class PendingWrites:
    """Lets a number of streams write at a time. Belongs to the event loop.

    gRPC reports the end of each write, and of each part of any other call, in one queue. If a thousand streams wrote at
    the same time, a health check would wait for all of them several times.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Kept, because asking for the running loop is a system call in Python 3.11.
        self._loop = loop
        self._begun: dict[Hashable, float] = {}
        """The streams that have a place, with the times at which their writes began, the earliest first."""
        self._waiting: deque[tuple[Hashable, asyncio.Future[None]]] = deque()
        """The streams that wait for a place; there are none while one is free."""
        self._slow: dict[Hashable, float] = {}
        """As in `_begun`, of streams whose last write took too long: they get no place, and need none."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, stream: Hashable) -> asyncio.Future[None] | None:
        """Returns None if the stream may write now, otherwise what it must wait for before."""
        if stream in self._slow:
            self._slow[stream] = self._loop.time()
        elif len(self._begun) < MAX_PENDING:
            self._place(stream)
        else:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((stream, future))
            return future
        return None

    def end(self, stream: Hashable) -> None:
        """Called when its write is over."""
        if self._begun.pop(stream, None) is not None:
            self._let_in()
        elif self._loop.time() - self._slow[stream] < LONGEST_S:
            del self._slow[stream]

    def forget(self, stream: Hashable) -> None:
        """Called when the stream is over, in the midst of a write or not."""
        self._slow.pop(stream, None)
        if self._begun.pop(stream, None) is not None:
            self._let_in()

    def _place(self, stream: Hashable) -> None:
        self._begun[stream] = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(LONGEST_S, self._look)

    def _let_in(self) -> None:
        while self._waiting and len(self._begun) < MAX_PENDING:
            stream, future = self._waiting.popleft()
            if not future.done():
                self._place(stream)
                future.set_result(None)

    def _look(self) -> None:
        latest = self._loop.time() - LONGEST_S
        for stream in [stream for stream, begun_at in self._begun.items() if begun_at <= latest]:
            self._slow[stream] = self._begun.pop(stream)
        self._timer = None
        self._let_in()
        if self._begun and self._timer is None:
            self._timer = self._loop.call_later(LONGEST_S, self._look)


class StreamWriter:
    """Writes the messages of one stream, and lets a timeout expire when a write takes too long; a context manager.

    It has one timer for all writes, because most end long before a timer of their own would be worth its price.
    """

    def __init__(self, write: Write, pending: PendingWrites, timeout: asyncio.Timeout, timeout_s: float) -> None:
        """`timeout` was entered before; it expires when a write has taken `timeout_s`."""
        self._write = write
        self._pending = pending
        self._timeout = timeout
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._begun_at: float | None = None

    def __enter__(self) -> StreamWriter:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._pending.forget(self)

    async def write(self, message: Any) -> None:
        """Writes a message when the stream may."""
        place = self._pending.begin(self)
        if place is not None:
            await place
        self._begun_at = self._loop.time()
        await self._write(message)
        self._begun_at = None
        self._pending.end(self)

    def _look(self) -> None:
        now = self._loop.time()
        begun_at = now if self._begun_at is None else self._begun_at
        if now - begun_at >= self._timeout_s:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(begun_at + self._timeout_s, self._look)
