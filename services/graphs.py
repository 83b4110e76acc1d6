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

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MIB = 2**20
_FIRST_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_FURTHER = 32
T = TypeVar("T")


class Replay(Protocol):
    """Work that can be done again."""

    def __call__(self) -> None:
        """Stream work."""
        ...


class Capture(Protocol):
    """Makes work that can be replayed. Belongs to one stream: what it makes never runs twice at a time."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Stream work: records what `work` would do. Raises torch.OutOfMemoryError."""
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

    Where memory runs out, the largest sizes are left out, and larger batches run without a graph: slower.
    """
    started = time.monotonic()
    before = _reserved_bytes()
    made: dict[int, T] = {}
    for number, size in enumerate(sorted(sizes, reverse=True), start=1):
        try:
            made[size] = make(size)
        except torch.OutOfMemoryError as error:
            logger.warning(
                "graphs of %s: no memory for %d rows, larger batches run slower (%s)", what, size, _first_line(error)
            )
            _give_back()
            continue
        logger.debug("graphs of %s: %d rows, %d of %d", what, size, number, len(sizes))
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


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
