"""Two processes that share memory of this one and wait for each other in it, as draft and verify do."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch

from slipstream.cli.doctor.peer import HERE, THERE
from slipstream.common.device.choose import choose_device
from slipstream.common.device.manifest import BufferSpec
from slipstream.common.errors import DeadlineExceededError, FailedPreconditionError
from slipstream.common.worker.wire import manifest_to_pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from slipstream.common.device.interface import Arena, Device

WORDS = 8
"""Words that are passed there and back one by one, to see that memory and fences work."""
BATCH, BATCHES = 100, 6
"""Hand-overs there and back; the first batch is not counted."""
TIMED = BATCH * (BATCHES - 1)
_ANSWER_S = 60.0
_END_S = 10.0
_PEER = (sys.executable, "-m", "slipstream.cli.doctor.peer")


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
    try:
        manifest = manifest_to_pb(arena.manifest).SerializeToString().hex()
        with _Process.running(environment) as one, _Process.running(environment) as other:
            where = {process.tell(f"{device_name} {fence} {manifest}") for process in (one, other)}
            _pass_words(one, other)
            (answers,) = device.to_host([arena.tensor("answers")])
            if answers[1:].tolist() != list(range(2, WORDS + 2)):
                raise FailedPreconditionError(f"the second process read {answers[1:].tolist()} less one")
            times = _time(one, other, device, arena) if arena.fence(HERE).is_releasable else ()
        return HandOver(device.fence_kind, where == {"under MPS"}, times)
    finally:
        arena.close()


def _pass_words(one: _Process, other: _Process) -> None:
    for value in range(1, WORDS + 1):
        one.tell(f"ask {value}")
        other.tell(f"answer {value}")
        other.tell("finish")
    one.tell("finish")


def _time(one: _Process, other: _Process, device: Device, arena: Arena) -> tuple[float, ...]:
    """Returns half of each round, in microseconds.

    A batch is enqueued as a whole and then let go, so that the streams alone hand over. Larger ones would fill the
    queue of a GPU's stream and stop it.
    """
    times: list[float] = []
    for gate in range(WORDS + 1, WORDS + 1 + BATCHES * (BATCH + 1), BATCH + 1):
        other.tell(f"follow {gate + 1} {gate + BATCH}")
        one.tell(f"lead {gate} {gate + BATCH}")
        arena.fence(THERE).release(gate)
        one.tell("finish")
        other.tell("finish")
        stamps = device.to_host([arena.tensor("stamps")])[0][gate : gate + BATCH + 1].tolist()
        times.extend((after - before) / 2000 for before, after in pairwise(stamps))
    return tuple(times[BATCH:])


class _Process:
    """Runs `peer.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def running(cls, environment: Mapping[str, str]) -> Iterator[_Process]:
        pipe = subprocess.PIPE
        merged = {**os.environ, **environment}
        with subprocess.Popen(_PEER, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=merged) as it:
            try:
                yield cls(it)
                # In order, if it can: a client of MPS that is killed may take the others along.
                _close(it)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    it.wait(_END_S)
            finally:
                it.kill()
                _close(it)

    def tell(self, line: str) -> str:
        """Gives it something to do; returns its answer. Raises FailedPreconditionError, DeadlineExceededError."""
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise FailedPreconditionError("the process ended by itself") from None
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise DeadlineExceededError(f"no answer within {_ANSWER_S:g} s")
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise FailedPreconditionError("the process ended by itself")
        if answer.startswith("error "):
            raise FailedPreconditionError(answer.removeprefix("error "))
        return answer


def _close(process: subprocess.Popen[str]) -> None:
    """Closes its standard input. A process that has ended may have left a line there that is not read any more."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
