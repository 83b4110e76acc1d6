"""Two processes that share memory of this one and wait for each other in it, as draft and verify do."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch

from slipstream.common.device.choose import choose_device
from slipstream.common.errors import DeadlineExceededError, FailedPreconditionError
from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.step import FenceName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.wire.manifest import Manifest

WORDS = 8
"""Words that are passed there and back one by one, to see that memory and fences work."""
BATCH, BATCHES = 100, 6
"""Hand-overs there and back; the first batch is not counted."""
TIMED = BATCH * (BATCHES - 1)
HERE, THERE = FenceName.DRAFT_PROPOSED, FenceName.VERIFY_STASH
"""The fence that the first process signals, and the one that the second process signals."""
_STREAM_S, _ANSWER_S, _END_S = 20.0, 60.0, 10.0


@dataclass(frozen=True, slots=True)
class HandOver:
    """Times of hand-overs from one process's stream to the other's, after both saw each other's words."""

    fence_kind: str
    under_mps: bool
    times_us: tuple[float, ...] = ()
    """Empty for an "event" fence: a wait is enqueued only after its signal was, which needs the host each time."""

    @property
    def p50_us(self) -> float:
        """Median time."""
        return median(self.times_us)

    @property
    def p99_us(self) -> float:
        """99th percentile."""
        return quantiles(self.times_us, n=100)[98]

    def overlap(self, step_ms: float) -> float:
        """Share of a step that is work, where its kernels take `step_ms` and both its hand-overs the middle time."""
        return step_ms / (step_ms + 2 * self.p50_us / 1000)


def measure(device_name: str, fence: str, environment: Mapping[str, str]) -> HandOver:
    """Starts both processes with `environment` added. Raises SlipstreamError where one cannot do its part."""
    device = choose_device(device_name, fence)
    sizes = {"questions": WORDS + 1, "answers": WORDS + 1, "stamps": WORDS + 1 + BATCHES * (BATCH + 1)}
    specs = [BufferSpec(name, (size,), torch.int64, "verify") for name, size in sizes.items()]
    arena = device.create_arena(specs, (HERE, THERE))
    opening = environment, device_name, fence, arena.manifest
    try:
        with _Process.running(*opening) as one, _Process.running(*opening) as other:
            under_mps = [process.answer() for process in (one, other)]
            _pass_words(one, other)
            (answers,) = device.to_host([arena.tensor("answers")])
            if answers[1:].tolist() != list(range(2, WORDS + 2)):
                raise FailedPreconditionError(f"the second process read {answers[1:].tolist()} less one")
            times = _time(one, other, device, arena) if arena.fence(HERE).is_releasable else ()
        return HandOver(device.fence_kind, all(under_mps), times)
    finally:
        arena.close()


def _pass_words(one: _Process, other: _Process) -> None:
    for value in range(1, WORDS + 1):
        one.tell(_Peer.ask, value)
        other.tell(_Peer.reply, value)
        other.tell(_Peer.finish)
    one.tell(_Peer.finish)


def _time(one: _Process, other: _Process, device: Device, arena: Arena) -> tuple[float, ...]:
    """Returns half of each round, in microseconds.

    A batch is enqueued as a whole and then released, so that only the streams hand over. Larger ones would fill the
    queue of a GPU's stream and stop it.
    """
    times: list[float] = []
    for gate in range(WORDS + 1, WORDS + 1 + BATCHES * (BATCH + 1), BATCH + 1):
        other.tell(_Peer.follow, gate + 1, gate + BATCH)
        one.tell(_Peer.lead, gate, gate + BATCH)
        arena.fence(THERE).release(gate)
        one.tell(_Peer.finish)
        other.tell(_Peer.finish)
        stamps = device.to_host([arena.tensor("stamps")])[0][gate : gate + BATCH + 1].tolist()
        times.extend((after - before) / 2000 for before, after in pairwise(stamps))
    return tuple(times[BATCH:])


class _Process:
    """Runs `run_peer`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def running(cls, *opening: object) -> Iterator[_Process]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_peer, args=(theirs, *opening), daemon=True)
        process.start()
        theirs.close()
        try:
            with ours:
                yield cls(ours)
            process.join(_END_S)  # in order, if it can: a client of MPS that is killed may take the others along
        finally:
            process.kill()
            process.join()

    def tell(self, order: Callable[..., None], *values: int) -> None:
        """Lets its peer do this, and waits for the answer. Raises as `answer` does."""
        try:
            self._connection.send((order, values))
        except OSError:
            raise FailedPreconditionError("the process ended by itself") from None
        self.answer()

    def answer(self) -> object:
        """Returns its next answer. Raises FailedPreconditionError, DeadlineExceededError."""
        try:
            if not self._connection.poll(_ANSWER_S):
                raise DeadlineExceededError(f"no answer within {_ANSWER_S:g} s")
            error, answer = self._connection.recv()
        except (EOFError, OSError):
            raise FailedPreconditionError("the process ended by itself") from None
        if error:
            raise FailedPreconditionError(error)
        return answer


def run_peer(
    connection: Connection, environment: Mapping[str, str], device: str, fence: str, manifest: Manifest
) -> None:
    """The work of one process: answers whether it is under MPS, then each order, with an error's text or an answer.

    Ends with the first error, or when the other end of the connection is closed.
    """
    try:
        os.environ.update(environment)
        peer = _Peer(choose_device(device, fence), manifest)
        connection.send(("", peer.device.under_mps))
        while True:
            order, values = connection.recv()
            connection.send(("", order(peer, *values)))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        connection.send((f"{type(error).__name__}: {' '.join(str(error).split())}", None))


class _Peer:
    """One end of a hand-over: the arena, opened in this process, and this process's stream."""

    def __init__(self, device: Device, manifest: Manifest) -> None:
        self.device = device
        self._arena = device.open_arena(manifest)
        self._stream = device.create_stream("peer", lambda error: None)
        self._here, self._there = self._arena.fence(HERE), self._arena.fence(THERE)

    def lead(self, gate: int, last: int) -> None:
        """Waits for `gate`; then signals each later value, waits for its answer, and stamps the time."""
        stamps = self._arena.tensor("stamps")
        self._there.wait(self._stream, gate)
        self.device.stamp(self._stream, stamps[gate])
        for value in range(gate + 1, last + 1):
            self._here.signal(self._stream, value)
            self._there.wait(self._stream, value)
            self.device.stamp(self._stream, stamps[value])

    def follow(self, first: int, last: int) -> None:
        """Waits for each value, and answers it."""
        for value in range(first, last + 1):
            self._here.wait(self._stream, value)
            self._there.signal(self._stream, value)

    def ask(self, value: int) -> None:
        """Writes the value, and signals that it did."""
        question = self._arena.tensor("questions")[value]
        self._stream.enqueue(lambda: _write(question, value))
        self._here.signal(self._stream, value)

    def reply(self, value: int) -> None:
        """Waits for the value, and writes what it read, plus one."""
        question, answer = self._arena.tensor("questions")[value], self._arena.tensor("answers")[value]
        self._here.wait(self._stream, value)
        self._stream.enqueue(lambda: _write(answer, question + 1))
        self._there.signal(self._stream, value)

    def finish(self) -> None:
        """Returns when all is done."""
        self._stream.synchronize(_STREAM_S)


def _write(target: torch.Tensor, source: torch.Tensor | int) -> None:
    target[...] = source
