"""The interface of a device: streams, fences, an arena, a clock.

A stream runs work in order and apart from the host's threads. On a CPU it is a thread that runs closures; on a GPU the
closure runs at once and *its kernels* are what is enqueued. So work given to a stream must not return anything to the
host, and must hold everything it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.common.wire.trace import ClockSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from slipstream.common.wire.manifest import BufferSpec, Manifest
    from slipstream.common.wire.step import FenceName


class Stream(Protocol):
    """Work in order. A worker has one for its whole life."""

    name: str
    """The name in messages and logs."""
    failure: BaseException | None
    """The error that broke the stream; nothing that was enqueued after it ran."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Appends work; returns at once.

        Where streams have no threads, work may enqueue more: that becomes a part of it, and its error ends the whole.
        """

    def synchronize(self, timeout_s: float) -> None:
        """Blocks the host until all is done. Raises DeadlineExceededError, or the stream's failure."""

    def bind_thread(self) -> None:
        """Puts tensor operations of the calling thread on this stream from now on, where that is possible."""

    def fail(self, error: BaseException) -> None:
        """Gives the stream up, as if its work had raised: what it waits for will never happen."""

    def close(self) -> None:
        """Ends the stream after what is enqueued; fences that it waits for must have been released.

        A stream that failed is left as it is if it does not end.
        """


class PollTime(NamedTuple):
    """When to poll for what is expected."""

    first_s: float = 0.0
    """The first poll, by `time.monotonic`."""
    usual_s: float = 0.0
    """Seconds that it usually takes: a small part of them may pass between two polls. 0 if nothing is known."""


ANY_TIME = PollTime()


class Fence(Protocol):
    """A counter in shared memory that only grows; one stream signals it, others wait for a value."""

    is_releasable: bool
    """True if `release` ends waits of streams; else a stream that waits for a dead producer is lost."""

    def signal(self, stream: Stream, value: int) -> None:
        """Sets the counter when the stream gets there."""

    def wait(self, stream: Stream, value: int) -> None:
        """Holds the stream until the counter is at least `value`. The signal may be enqueued later than this."""

    def poll(self) -> int:
        """Returns the counter. All that was written before that value was signalled can be read."""

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        """Blocks the calling thread until the counter is at least `value`. Returns False after `timeout_s`."""

    def release(self, value: int) -> None:
        """Raises the counter to `value` in place of a producer that is gone."""


class Arena(Protocol):
    """The memory that the processes share."""

    manifest: Manifest
    """The layout, for the other processes."""

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of a buffer. Raises ManifestError if there is none of that name."""

    def fence(self, name: FenceName) -> Fence:
        """Returns a fence. Raises ManifestError if it is not there."""

    def seal(self) -> None:
        """Called by the owner once all processes have attached: no other can attach from now on."""

    def close(self) -> None:
        """Gives the memory back once its views are gone."""


class Device(Protocol):
    """Factory for streams, fences and arenas on one device."""

    identity: str
    """ "cpu", or the GPU's UUID: two processes with the same one can share an arena."""
    torch_device: torch.device
    """The device of this process's tensors."""
    fence_kind: str
    """ "host", "timeline" or "event"."""
    has_stream_threads: bool
    """True if streams work on threads of their own, so that to enqueue is no more than to hand over a closure."""

    @property
    def under_mps(self) -> bool:
        """True if this process shares a GPU under NVIDIA MPS."""

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> Stream:
        """Makes a stream. `on_failure` is called once, from the stream's thread, when work raises."""

    def create_arena(self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False) -> Arena:
        """Makes an arena that this process owns, all zero.

        `on_host`: in memory of the host, between a GPU and processes without one. Its tensors are the host's here, and
        the GPU's where it is opened. No stream can wait for its fences here, and where it is opened only one of a
        device with fences of kind "timeline".
        """

    def open_arena(self, manifest: Manifest, *, read_only: bool = False) -> Arena:
        """Opens an arena of another process. Raises ManifestError if the manifest cannot be trusted.

        `read_only`, on a CPU: writing to one of its tensors is a fault that ends this process, its fences cannot be
        signalled, and `Fence.release` ends only this process's waits. A GPU has no such mappings: there it changes
        nothing, and memory that must not be written has to stay with its owner.
        """

    def stamp(self, stream: Stream, target: torch.Tensor) -> None:
        """Writes the time in nanoseconds into `target` ([] int64) when the stream gets there."""

    def stamp_row(self, stream: Stream, targets: torch.Tensor, row: torch.Tensor) -> None:
        """As `stamp`, into the row of `targets` ([rows] int64) that `row` ([1] int64) says by then."""

    def sample_clock(self) -> ClockSample:
        """Reads both clocks. Touches no stream that waits for another process; any thread may call."""

    def fetch(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies what the host has written to the device, as work of the stream; called in the stream's work.

        Both are contiguous, of the same size, in whole words of 64 bits; `source` is pinned. On a GPU a kernel reads
        the host's memory: it takes less of the host's time than a copy, and waits for no copy engine.
        """

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns small contiguous tensors as they are now in host memory, without waiting for enqueued work."""


def bounded_clock(readings: Iterable[tuple[int, int, int]]) -> ClockSample:
    """Returns both clocks at the last of several readings, and bounds their distance by all of them.

    Each reading is a moment of the host's clock, the device's clock at some time after it, and a moment of the host's
    after that, which bounds the distance from both sides. The two tightest bounds need not come from the same reading.
    If the clocks drifted meanwhile, the bounds may cross.
    """
    readings = list(readings)
    least = max(before_ns - device_ns for before_ns, device_ns, _ in readings)
    most = min(after_ns - device_ns for _, device_ns, after_ns in readings)
    last_ns = readings[-1][1]
    return ClockSample(last_ns, last_ns + (least + most) // 2, (abs(most - least) + 1) // 2)
