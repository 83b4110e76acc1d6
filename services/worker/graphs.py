"""A step's work, made once and replayed: CUDA graphs, one for each size of batch.

What is captured reads and writes the same memory each time; what differs from step to step lies in that memory. On a
CPU the same work is simply done again, which is how the tests look at everything but the graphs themselves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from slipstream.services.worker.memory import first_line, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MIB = 2**20
_FIRST_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_FURTHER = 32
T = TypeVar("T")


class NoRoomForGraphError(Exception):
    """Memory ran out while work was captured that has room when it is simply done."""


class Replay(Protocol):
    """Work that can be done again."""

    def __call__(self) -> None:
        """Stream work."""
        ...


class Capture(Protocol):
    """Makes work that can be replayed. Belongs to one stream: what it makes never runs twice at a time."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Stream work: records what `work` would do.

        Raises NoRoomForGraphError where the work has room and the graph has none.
        """
        ...


class HostCapture:
    """Implements `Capture` where there are no graphs."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """See `Capture.capture`."""
        return work


class CudaCapture:
    """Implements `Capture`. All graphs share their memory, since one stream replays them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Replay:
        """See `Capture.capture`. The work runs once as it is, so that everything in it is compiled and warm."""
        work()
        try:
            return self._captured(work)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise NoRoomForGraphError(first_line(error)) from error
            raise

    def _captured(self, work: Callable[[], None]) -> Replay:
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


class Latest(Generic[T]):
    """What work that is captured leaves for the next: set each time it runs, and in a graph the same each time."""

    value: T


def batch_buckets(num_rows: int) -> tuple[int, ...]:
    """Sizes of batches that are captured, up to `num_rows`: small ones close together, as they cost what they hold."""
    beyond = range(_FIRST_BUCKETS[-1] + _FURTHER, num_rows, _FURTHER)
    return (*(size for size in (*_FIRST_BUCKETS, *beyond) if size < num_rows), num_rows)


class Buckets(Generic[T]):
    """What was made for each size of batch."""

    def __init__(self, made: dict[int, T]) -> None:
        self._sizes = sorted(made)
        self._made = made

    def get(self, num_rows: int) -> T | None:
        """What takes `num_rows` rows, the smallest of those; None if there is none so large."""
        index = bisect_left(self._sizes, num_rows)
        return self._made[self._sizes[index]] if index < len(self._sizes) else None


def capture_buckets(what: str, sizes: tuple[int, ...], make: Callable[[int], T]) -> Buckets[T]:
    """Stream work: calls `make` for each size, the largest first: the others then live in its memory.

    Where graphs find no memory, the largest sizes are left out, and larger batches run without one: slower.
    Raises torch.OutOfMemoryError where such a batch would have no room either.
    """
    started = time.monotonic()
    before = _reserved_bytes()
    made: dict[int, T] = {}
    for number, size in enumerate(sorted(sizes, reverse=True), start=1):
        try:
            made[size] = make(size)
            logger.debug("graphs of %s: %d rows, %d of %d", what, size, number, len(sizes))
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
        # Here, where no error holds what the attempt had made.
        _give_back()
    taken = (_reserved_bytes() - before) / MIB
    logger.info("graphs of %s: %d in %.1f s, %.0f MiB", what, len(made), time.monotonic() - started, taken)
    return Buckets(made)


def _reserved_bytes() -> int:
    has_memory: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.memory_reserved() if has_memory else 0


def _give_back() -> None:
    if _has_cuda():
        torch.cuda.empty_cache()


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
