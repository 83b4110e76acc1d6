"""What the rest of the house knows of a device: streams, fences, an arena, a clock.

A stream runs work in order and apart from the host's threads. On a CPU it is a thread that runs
closures; on a GPU the closure runs at once and *its kernels* are what is enqueued. So work given to a
stream must not return anything to the host, and must hold everything it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from slipstream.common.device.clock import ClockSample
    from slipstream.common.device.manifest import BufferSpec, Manifest
    from slipstream.common.worker.step import FenceName


class Stream(Protocol):
    """Work in order. One per worker, for its whole life."""

    @property
    def name(self) -> str:
        """For messages and logs."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What broke the stream; nothing that was enqueued after it ran."""
        ...

    def enqueue(self, work: Callable[[], None]) -> None:
        """Appends work; returns at once."""
        ...

    def synchronize(self, timeout_s: float) -> None:
        """Blocks the host until all is done. Raises DeadlineExceededError, or the stream's failure."""
        ...

    def bind_thread(self) -> None:
        """What the calling thread itself does with tensors from now on goes to this stream as well, where it can."""
        ...

    def fail(self, error: BaseException) -> None:
        """Gives the stream up, as if its work had raised: what it waits for will never come."""
        ...

    def close(self) -> None:
        """Ends the stream after what is enqueued; fences that it waits for must have been released.

        A stream that failed is left as it is if it does not end.
        """
        ...


class Fence(Protocol):
    """A counter in shared memory that only grows; one stream signals it, others wait for a value."""

    def signal(self, stream: Stream, value: int) -> None:
        """Sets the counter when the stream gets there."""
        ...

    def wait(self, stream: Stream, value: int) -> None:
        """Holds the stream until the counter is at least `value`. The signal may be enqueued later than this."""
        ...

    def poll(self) -> int:
        """The counter now. Whatever was written before that value was signalled can be read."""
        ...

    def wait_on_host(self, value: int, timeout_s: float) -> bool:
        """Blocks the calling thread until the counter is at least `value`; False if the time is over first."""
        ...

    def release(self, value: int) -> None:
        """Sets the counter in place of a producer that is gone, if it is below `value`."""
        ...

    @property
    def is_releasable(self) -> bool:
        """Whether that ends waits of streams; else a stream that waits for a dead producer is lost."""
        ...


class Arena(Protocol):
    """The memory that the processes share."""

    @property
    def manifest(self) -> Manifest:
        """Where what is, for the other processes."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer, as a view. Raises ManifestError if there is none of that name."""
        ...

    def fence(self, name: FenceName) -> Fence:
        """A fence of the arena. Raises ManifestError if it is not there."""
        ...

    def seal(self) -> None:
        """Called by the owner once everybody has attached: nobody else can from now on."""
        ...

    def close(self) -> None:
        """Gives the memory back once the views are gone."""
        ...


class HostCopy(Protocol):
    """Brings rows of shared buffers to the host behind a fence, on a private stream with no other work."""

    def start(self, value: int, row: int) -> None:
        """Begins to copy `row` of every buffer once the fence reaches `value`. One copy at a time a row."""
        ...

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        """Blocks until that copy is there and returns the rows; None if the time is over first.

        The rows are the caller's until the next copy of the same row is started.
        """
        ...

    def close(self) -> None:
        """Ends the stream. What it still waits for is released: nobody else may wait for that any more."""
        ...


class Device(Protocol):
    """Makes all of it."""

    @property
    def identity(self) -> str:
        """ "cpu", or the GPU's UUID: two processes with the same one can share an arena."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this process live."""
        ...

    @property
    def fence_kind(self) -> str:
        """ "host", "timeline" or "event"."""
        ...

    @property
    def under_mps(self) -> bool:
        """Whether this process shares a GPU under NVIDIA MPS."""
        ...

    @property
    def has_stream_threads(self) -> bool:
        """Whether streams work on threads of their own, so that to enqueue is no more than to hand over a closure."""
        ...

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> Stream:
        """`on_failure` is called once, from the stream's thread, when work raises."""
        ...

    def create_arena(self, specs: Iterable[BufferSpec], fences: Iterable[FenceName]) -> Arena:
        """An arena that this process owns, all zero."""
        ...

    def open_arena(self, manifest: Manifest) -> Arena:
        """An arena of another process. Raises ManifestError if the manifest cannot be trusted."""
        ...

    def stamp(self, stream: Stream, target: torch.Tensor) -> None:
        """Writes the time in nanoseconds into `target` ([] int64) when the stream gets there."""
        ...

    def stamp_row(self, stream: Stream, targets: torch.Tensor, row: torch.Tensor) -> None:
        """As `stamp`, into the row of `targets` ([rows] int64) that `row` ([1] int64) says by then."""
        ...

    def sample_clock(self) -> ClockSample:
        """The clock of the stamps against the host's, now. Touches no stream that waits for anybody; any thread."""
        ...

    def fetch(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Brings what the host has written to the device, as work of the stream; called in the stream's work.

        Contiguous, of the same size, in whole words of 64 bits; `source` is pinned. On a GPU by a kernel that reads
        the host's memory: less of the host's time than a copy takes, and no other engine to wait for.
        """
        ...

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Small contiguous tensors as the host can read them, now: behind nothing that is enqueued anywhere."""
        ...

    def host_copy(self, fence: Fence, sources: Sequence[Sequence[torch.Tensor]]) -> HostCopy:
        """A private copy stream behind `fence` for buffers of one arena, as their rows, as many of each."""
        ...
