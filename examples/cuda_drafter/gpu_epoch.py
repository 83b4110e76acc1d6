"""An attachment to verify, on a GPU: each step is enqueued at once, and no thread of this process waits for it."""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from cuda.bindings import driver as cu
from gpu import CudaError
from gpu_memory import OwnMemory, SharedMemory

from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpu import Gpu

logger = logging.getLogger(__name__)

MOST_INTEGERS = 512
"""That one launch brings, as in the kernels' source."""
POLL_S = 0.001
"""Between two looks at whether the stream has come to its end."""
_WORD_BYTES = 8


class Slots(ctypes.Structure):
    """As in the kernels' source."""

    _fields_ = (
        ("tokens", ctypes.c_uint64),
        ("begins", ctypes.c_uint64),
        ("ends", ctypes.c_uint64),
        ("temperatures", ctypes.c_uint64),
        ("seeds", ctypes.c_uint64),
        ("capacity", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
    )


class Stash(ctypes.Structure):
    """As in the kernels' source."""

    _fields_ = (("seq_lens", ctypes.c_uint64), ("num_new", ctypes.c_uint64), ("last_tokens", ctypes.c_uint64))


class Integers(ctypes.Structure):
    """As in the kernels' source."""

    _fields_ = (("count", ctypes.c_int), ("values", ctypes.c_int * MOST_INTEGERS))


class GpuEpoch:
    """The stream of an epoch. `enqueue` returns at once; the GPU does the work."""

    def __init__(self, request: pb.AttachRequest, vocab_size: int, gpu: Gpu, on_failure: Callable[[], None]) -> None:
        """Maps the memory. Raises ManifestError."""
        self.number = request.epoch
        self._gpu = gpu
        self._on_failure = on_failure
        num_slots, self._width, self._ring = request.num_slots, request.num_draft_tokens, request.run_ahead + 2
        self._lock = threading.Lock()
        self._is_closed = False
        self._awaited = 0
        """The largest value of the stash's fence that the stream waits for."""
        with ExitStack() as held:
            own, given = SharedMemory(gpu, request.manifest), None
            held.callback(own.close)
            given = SharedMemory(gpu, request.given)
            held.callback(given.close)
            self._draft_tokens = own.buffer("draft_tokens", (num_slots, self._width))
            self._num_proposed = own.buffer("num_proposed", (num_slots,))
            self._stamps = own.buffer("draft_stamps", (self._ring, 2, 2))
            self._fences = {name: own.fence(name) for name in (pb.FENCE_DRAFT_PROPOSED, pb.FENCE_DRAFT_PREFILLED)}
            self._stashed = given.fence(pb.FENCE_VERIFY_STASH)
            seq_lens, num_new = (given.buffer(name, (num_slots,)) for name in ("seq_lens", "num_new"))
            self._stash = Stash(seq_lens, num_new, given.buffer("last_tokens", (num_slots, self._width + 1)))
            # A sequence, what steps that are sent already may add to it, and guesses behind that.
            capacity = request.context_tokens + (request.run_ahead + 3) * (self._width + 1)
            sizes = [_WORD_BYTES * num_slots] * 4 + [4 * num_slots * capacity]
            begins, ends, temperatures, seeds, tokens, end = itertools.accumulate(sizes, initial=0)
            memory = OwnMemory(gpu, end)
            held.callback(memory.close)
            places = (memory.address + offset for offset in (tokens, begins, ends, temperatures, seeds))
            self._slots = Slots(*places, capacity, vocab_size)
            self._stream, self._side = gpu.create_stream(), gpu.create_stream()
            for stream in (self._side, self._stream):
                held.callback(gpu.call, cu.cuStreamDestroy, stream)
            self._held = held.pop_all()

    def enqueue(self, command: pb.StepCommand) -> None:
        """Enqueues a step and returns."""
        try:
            self._enqueue(command)
        except CudaError:
            logger.exception("the GPU failed")
            self._on_failure()

    def finish(self) -> None:
        """Returns when every enqueued step is done, or once `abandon` was called; the memory is unmapped then."""
        while not self._has_ended():
            time.sleep(POLL_S)

    def abandon(self) -> None:
        """Ends the epoch in place of a scheduler that is gone: sets the fence that the stream waits for.

        Again and again: a late write of verify may set it back.
        """
        while not self._has_ended(release=True):
            time.sleep(POLL_S)

    def _has_ended(self, *, release: bool = False) -> bool:
        with self._lock:
            if self._is_closed:
                return True
            try:
                if not (self._gpu.is_idle(self._stream) and self._gpu.is_idle(self._side)):
                    if release:
                        self._gpu.write(self._side, self._stashed, self._awaited)
                    return False
                self._held.close()
            except CudaError:
                logger.exception("the GPU failed")
                self._on_failure()
            self._is_closed = True
            return True

    def _enqueue(self, command: pb.StepCommand) -> None:
        gpu, stream = self._gpu, self._stream
        for update in command.updates:
            if update.HasField("sampling"):
                temperature, seed = ctypes.c_float(update.sampling.temperature), ctypes.c_uint64(update.sampling.seed)
                gpu.launch("take_over", stream, 1, self._slots, ctypes.c_int(update.slot), temperature, seed)
        # The signals say which parts the step has: the decode part, the prefill part, or both in this order.
        for point in command.signals:
            is_decode = point.fence == pb.FENCE_DRAFT_PROPOSED
            place = pb.WAIT_PLACE_START if is_decode else pb.WAIT_PLACE_PREFILL_HIDDEN
            for wait in command.waits:
                if wait.place == place:
                    self._awaited = max(self._awaited, wait.value)
                    gpu.wait(stream, self._stashed, wait.value)
            started = self._stamps + (command.step % self._ring * 4 + (0 if is_decode else 2)) * _WORD_BYTES
            gpu.launch("stamp", stream, 1, ctypes.c_uint64(started))
            if is_decode:
                self._decode(command)
            else:
                self._prefill(command)
            gpu.launch("stamp", stream, 1, ctypes.c_uint64(started + _WORD_BYTES))
            gpu.write(stream, self._fences[point.fence], point.value)

    def _decode(self, command: pb.StepCommand) -> None:
        targets = (ctypes.c_uint64(address) for address in (self._draft_tokens, self._num_proposed))
        numbers = (ctypes.c_int64(self._width), ctypes.c_int64(max(command.num_draft_tokens, default=0)))
        arguments = (self._slots, self._stash, *targets, *numbers)
        for _, rows in _pieces(command.slots):
            self._gpu.launch("propose", self._stream, rows.count, *arguments, rows)

    def _prefill(self, command: pb.StepCommand) -> None:
        for chunk in command.chunks:
            for offset, piece in _pieces(chunk.tokens):
                start = ctypes.c_int64(chunk.start + offset)
                self._gpu.launch("put", self._stream, 1, self._slots, ctypes.c_int(chunk.slot), start, piece)


def warm_up(gpu: Gpu) -> None:
    """Runs each kernel once: the driver loads one when it is first launched, which might wait for a waiting stream."""
    memory = OwnMemory(gpu, 4096)
    word, zero = ctypes.c_uint64(memory.address), ctypes.c_int(0)
    slots, stash = Slots(*[memory.address] * 5, 1, 1), Stash(*[memory.address] * 3)
    stream = gpu.create_stream()
    gpu.launch("stamp", stream, 1, word)
    gpu.launch("take_over", stream, 1, slots, zero, ctypes.c_float(0), ctypes.c_uint64(0))
    gpu.launch("put", stream, 1, slots, zero, ctypes.c_int64(0), Integers())
    gpu.launch("propose", stream, 1, slots, stash, word, word, ctypes.c_int64(1), ctypes.c_int64(1), Integers())
    gpu.call(cu.cuStreamSynchronize, stream)
    gpu.call(cu.cuStreamDestroy, stream)
    memory.close()


def _pieces(values: Sequence[int]) -> Iterator[tuple[int, Integers]]:
    """Yields values in pieces that a launch can bring, each with the number of those before it."""
    for offset in range(0, len(values), MOST_INTEGERS):
        piece = values[offset : offset + MOST_INTEGERS]
        yield offset, Integers(len(piece), tuple(piece))
