"""Captures a step's work once and replays it: CUDA graphs, one for each size of batch.

A graph reads and writes the same memory each time; what differs from step to step lies in that memory. On a CPU the
same work is done again, so that tests without a GPU cover everything but the graphs themselves.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import torch

from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.common.wire.step import PrefillChunk
from slipstream.services.worker.memory import first_line, is_out_of_memory
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from slipstream.common.wire.step import StepCommand
    from slipstream.services.models.ranks import Ranks
    from slipstream.services.worker.future_map import CapturedAccess, CapturedStep, SharedBuffers

logger = logging.getLogger(__name__)

GRAPHED_MODES = (SamplingMode.NOISE, SamplingMode.FILTERS)
"""Adjustments and logprobs have no graph: they take tables of the vocabulary for each row."""
MIB = 2**20
_SPACINGS = ((4, 1), (16, 2), (64, 4), (256, 16), (math.inf, 64))
"""Up to so many rows, the sizes of batches that are captured are so many apart."""
_SIZES: tuple[int, ...] = (16, 32, *range(64, 512, 64), *range(512, 2049, 128))
"""Numbers of tokens of forwards over prompts on a GPU: few, all of which are rehearsed.

Libraries choose the kernel of a product by its exact number of rows, and load each at its first use, while all steps
wait.
"""
_FURTHER_BITS = 5
"""Sixteen larger ones lie between a power of two and the next, so that rehearsing large steps does not take minutes."""
REPEATS = 3
"""Runs of which the shortest counts: other processes start at the same time."""
T = TypeVar("T")


class NoRoomForGraphError(Exception):
    """Raised when memory runs out for a graph of work that has room without one."""


class Capture(Protocol):
    """Makes graphs. Belongs to one stream: its graphs share memory and run one at a time."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Stream work: records `work`, and returns the stream work that does it again.

        Raises NoRoomForGraphError where the work has room and the graph has none.
        """


class HostCapture:
    """Implements `Capture` where there are no graphs: does the work at once, as a graph's capture does, and again."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


class CudaCapture:
    """Implements `Capture`. All graphs share their memory, since one stream replays them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.capture`. The work runs once as it is, so that everything in it is compiled and warm."""
        work()
        try:
            return self.record(work)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise NoRoomForGraphError(first_line(error)) from error
            raise

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures work that is warm. Returns what does it again."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may go on using the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a capture that is broken; what broke it says more
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


class RankedCapture:
    """Implements `Capture` for rank 0 of several: the others capture and replay their parts of the same work."""

    def __init__(self, capture: Capture, ranks: Ranks) -> None:
        self._capture = capture
        self._ranks = ranks
        self._num_made = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.capture`."""
        self._ranks.captured.clear()
        replay, told = self._capture.capture(work), tuple(self._ranks.captured)
        if not told:
            return replay
        self._num_made += 1
        number = self._num_made
        try:
            self._ranks.ask("capture", number=number, messages=told)
        except torch.OutOfMemoryError as error:
            raise NoRoomForGraphError(str(error)) from error

        def run() -> None:
            self._ranks.tell("replay", number=number)
            replay()

        return run


@dataclass(frozen=True, slots=True)
class GraphedPart:
    """A captured part of a step, and its accesses to shared memory."""

    work: Callable[[], None]
    accesses: tuple[CapturedAccess, ...]

    def replay(self, memory: SharedBuffers, command: StepCommand) -> None:
        """Stream work: does it for a step, and logs the accesses."""
        self.work()
        memory.log_replay(self.accesses, command.step, command.slots)


@dataclass(frozen=True, slots=True)
class GraphedStep:
    """The inputs of an epoch's graphs: they lie at the same place in every step."""

    capture: Capture
    slots: torch.Tensor
    """[num_slots] int64: the step's slots, then padding."""
    step: CapturedStep
    """Stands for the step's number."""
    stamp_start: Callable[[], None]
    """Stream work: the worker's own work of the step begins. Captured work stamps by itself, see `CapturedStep`."""
    stamp_end: Callable[[], None]
    """Stream work: it ends."""

    def clear(self) -> None:
        """Stream work: sets the inputs to those of a step of padding rows without a draft."""
        self.slots.fill_(PADDING_SLOT)
        self.step.region_words.zero_()

    def capture_part(self, work: Callable[[], None]) -> GraphedPart:
        """Stream work: captures a part of a step, which does it once.

        Sequences may be running. So it is done only for the padding slot and without a draft, and leaves the stamps
        as they are: the inputs are still those of the last step, and its results may not have been read.
        """
        columns = [place.column for place in (self.step.start, self.step.end) if place is not None]
        stamps = [column.clone() for column in columns]
        self.clear()
        self.step.take_accesses()
        replay = self.capture.capture(work)
        accesses = self.step.take_accesses()
        for column, values in zip(columns, stamps, strict=True):
            column.copy_(values)
        return GraphedPart(replay, accesses)


class Latest(Generic[T]):
    """Hands a value from one captured part to the next: set at each capture; in replays its memory stays the same."""

    value: T


def forward_size(num_tokens: int) -> int:
    """Returns the size of a forward over so many tokens."""
    if num_tokens <= _SIZES[-1]:
        return next(size for size in _SIZES if size >= num_tokens)
    granule = 1 << ((num_tokens - 1).bit_length() - _FURTHER_BITS)
    return -(-num_tokens // granule) * granule


def sizes_up_to(most: int) -> list[int]:
    """Returns all sizes that forwards over up to `most` tokens have, `most` included, the largest first."""
    sizes, size = [most], forward_size(1)
    while size < most:
        sizes.append(size)
        size = forward_size(size + 1)
    return sorted(sizes, reverse=True)


def with_padding(chunks: Sequence[PrefillChunk], most: int, *, beside: int = 0) -> tuple[PrefillChunk, ...]:
    """Adds a chunk in the padding slot that gives a forward over the chunks its size.

    `most`: tokens of the largest step of only prompts, which is a size, too; `beside`: the forward's other tokens.
    """
    num_tokens = beside + sum(len(chunk.tokens) for chunk in chunks)
    size = forward_size(num_tokens)
    return padded_to((min(size, most) if num_tokens <= most else size) - beside, chunks)


def padded_to(size: int, chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
    """Adds a chunk in the padding slot that makes them `size` tokens together, if they are fewer."""
    missing = size - sum(len(chunk.tokens) for chunk in chunks)
    if missing <= 0:
        return tuple(chunks)
    return (*chunks, PrefillChunk(slot=PADDING_SLOT, start=0, tokens=(0,) * missing, is_last=False))


def batch_buckets(num_rows: int) -> tuple[int, ...]:
    """Sizes of batches to capture, up to `num_rows`: small ones close together, as padding costs them most."""
    sizes = [0]
    while sizes[-1] < num_rows:
        spacing = next(spacing for most, spacing in _SPACINGS if sizes[-1] < most)
        sizes.append(min(sizes[-1] + spacing, num_rows))
    return tuple(sizes[1:])


def few_buckets(num_rows: int) -> tuple[int, ...]:
    """Some of the same sizes, for steps that are run more rarely: at most half as large again as the next smaller."""
    return tuple(size for size in batch_buckets(num_rows) if size == num_rows or (size & (size - 1)).bit_count() < 2)


class Buckets(Generic[T]):
    """Captured graphs, or anything else that is made for each size of batch."""

    def __init__(self, made: dict[int, T]) -> None:
        self.sizes = tuple(sorted(made))
        self._made = made

    def get(self, num_rows: int) -> T | None:
        """Returns the smallest that takes `num_rows` rows; None if there is none so large."""
        index = bisect_left(self.sizes, num_rows)
        return self._made[self.sizes[index]] if index < len(self.sizes) else None

    def worthwhile(self, seconds: Callable[[T], float]) -> Buckets[T]:
        """Returns those that take less time than all larger ones: for some sizes libraries choose a poor kernel."""
        kept, least = {}, math.inf
        for size in reversed(self.sizes):
            if (taken := seconds(self._made[size])) < least:
                kept[size], least = self._made[size], taken
        return Buckets(kept)


def capture_buckets(what: str, sizes: tuple[int, ...], make: Callable[[int], T]) -> Generator[None, None, Buckets[T]]:
    """Stream work: calls `make` for each size, the largest first: the others then live in its memory.

    Other work may be done between two items of the generator, which returns the buckets. Where graphs find no memory,
    the largest sizes are left out, and larger batches run without one: slower.
    Raises torch.OutOfMemoryError where such a batch would have no room either.
    """
    started = time.monotonic()
    before = torch.cuda.memory_reserved()  # 0 where there is no GPU
    made: dict[int, T] = {}
    for number, size in enumerate(sorted(sizes, reverse=True), start=1):
        try:
            made[size] = make(size)
            logger.debug("graphs of %s: %d rows, %d of %d", what, size, number, len(sizes))
            yield
            continue
        except NoRoomForGraphError as error:
            cause, consequence = str(error), "larger batches run slower"
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not made:
                raise torch.OutOfMemoryError(first_line(error)) from error
            cause, consequence = first_line(error), "the next larger graph takes them"
        logger.warning("graphs of %s: no memory for %d rows, %s (%s)", what, size, consequence, cause)
        # Outside of the handlers: their error holds the attempt's tensors.
        torch.cuda.empty_cache()
    taken = (torch.cuda.memory_reserved() - before) / MIB
    logger.info("graphs of %s: %d in %.1f s, %.0f MiB", what, len(made), time.monotonic() - started, taken)
    return Buckets(made)


def shortest_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Returns the shortest time of a few runs of `work`, from an idle device to an idle device."""
    found = []
    for _ in range(REPEATS):
        _wait_for(device)
        begun = time.monotonic()
        work()
        _wait_for(device)
        found.append(time.monotonic() - begun)
    return min(found)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def at_once(work: Generator[None, None, T]) -> T:
    """Does work to its end and returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast("T", end.value)
