"""How a worker carries out a step: wait, stamp, work, signal, all enqueued on its one stream.

`RoleEngine` is what differs between draft and verify; `Engine` is what they share. Everything here runs on the
thread that owns the device (`enqueue` may run on another), and nothing here waits for the stream but `drain`,
`abandon` and `synchronize`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.common.errors import (
    DeadlineExceededError,
    DeviceError,
    FailedPreconditionError,
    InvalidArgumentError,
    StaleEpochError,
)
from slipstream.common.worker.access_log import LogOp
from slipstream.common.worker.captured_step import CapturedStep
from slipstream.common.worker.layout import BufferName
from slipstream.common.worker.recorder import FlightRecorder, Site
from slipstream.common.worker.step import FenceName, Role
from slipstream.services.worker.attachment_check import check_attachment
from slipstream.services.worker.future_map import FutureMap
from slipstream.services.worker.graphed_step import GraphedStep
from slipstream.services.worker.graphs import CudaCapture, HostCapture
from slipstream.services.worker.host_stalls import ACKNOWLEDGEMENT, ATTACH, DRAIN, STAGING, HostStalls
from slipstream.services.worker.memory import allocated_bytes, first_line, measured, no_room
from slipstream.services.worker.slots import SlotTable
from slipstream.services.worker.staging import HostStaging, PinnedStaging, staged_bytes
from slipstream.services.worker.waited_fences import WaitedFences

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.interface import Arena, Device, Fence, Stream
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.contract import Attachment, WorkerDescription
    from slipstream.common.worker.step import FencePoint, SlotUpdate, StepCommand
    from slipstream.services.worker.staging import Staging

RELEASE_INTERVAL_S = 0.05
DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step's work and the fence that is signalled behind it."""

    work: Callable[[], None]
    fence: FenceName
    is_stamped: bool = False
    """Whether the work of the first phase stamps its start, and that of the last one its end, by itself."""


@dataclass(frozen=True, slots=True)
class EpochState:
    """What a role works with between attach and detach."""

    attachment: Attachment
    future_map: FutureMap
    slots: SlotTable
    staging: Staging = field(default_factory=HostStaging)
    graphs: GraphedStep | None = None
    """What graphs are made with; None where steps run without."""


class RoleEngine(Protocol):
    """What a draft or a verify service does on the device."""

    def describe(self) -> WorkerDescription:
        """What this worker is."""
        ...

    def open(self, state: EpochState) -> None:
        """Allocates what an epoch needs and warms up. Raises MismatchError, FailedPreconditionError."""
        ...

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """The step's work in order; each part is stream work and holds all it needs."""
        ...

    def close(self) -> None:
        """Frees what `open` allocated."""
        ...


class Engine:
    """The device side of a worker."""

    def __init__(
        self,
        role: RoleEngine,
        device: Device,
        stream: Stream,
        log: AccessLog,
        *,
        uses_graphs: bool = True,
        refuses_waits: bool = False,
        on_stuck: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        """`uses_graphs`: whether steps are captured where the device has graphs; only to find out what they change.

        `refuses_waits`: a wait of PyTorch's for the device, while a step is enqueued, breaks the stream.

        `on_stuck` is called, on the device's thread, before anything is freed when the stream does not come to its end:
        what frees something of a GPU's waits for the stream, so it has to end the process without.
        """
        self._role = role
        self._device = device
        self._stream = stream
        self._log = log
        self._uses_graphs = uses_graphs
        self._refuses_waits = refuses_waits and device.torch_device.type == "cuda"
        self._on_stuck = on_stuck
        self._state: EpochState | None = None
        self._arena: Arena | None = None
        self._fences: dict[FenceName, Fence] = {}
        self.last_epoch = 0
        """The largest epoch that was attached."""
        self.last_step = 0
        """Number of the last step of the open epoch."""
        self.stalls = HostStalls()
        """Where the thread that owns the device was blocked on it."""
        self.recorder = FlightRecorder()
        """When steps were enqueued."""
        # Held while a command is enqueued: an epoch does not end in the middle of one.
        self._enqueueing = threading.Lock()
        self._is_ending = False
        self._waited = WaitedFences()
        self.description = role.describe()
        self._weights = allocated_bytes(device.torch_device)
        self.enqueues_at_once = device.has_stream_threads
        """Whether `enqueue` takes next to no time, so that it need not run on the thread that owns the device."""

    def describe(self) -> WorkerDescription:
        """What this worker is, and what it has at the moment. Raises DeviceError."""
        try:
            memory = measured(self.description.memory, self._device.torch_device, self._weights)
        except RuntimeError as error:
            failure = DeviceError(f"the GPU failed: {first_line(error)}")
            self._lose_device(failure)
            raise failure from error
        return replace(self.description, last_epoch=self.last_epoch, memory=memory)

    def attach(self, attachment: Attachment) -> None:
        """Opens an epoch. Raises FailedPreconditionError (and its kinds), ConfigError, ManifestError."""
        with self.stalls.at(ATTACH):
            try:
                self._attach(attachment)
            except DeviceError as error:
                self._lose_device(error)
                raise

    def _attach(self, attachment: Attachment) -> None:
        if self._state is not None:
            raise FailedPreconditionError(f"attached in epoch {self._state.attachment.epoch}: drain it first")
        check_attachment(attachment, self.description, self.last_epoch)
        arena = self._device.open_arena(attachment.manifest)
        try:
            fences = {name: arena.fence(name) for name in FenceName}
            future_map = self._future_map_class()(
                attachment.shape,
                arena,
                role=self.description.role,
                vocab_size=self.description.vocab_size,
                log=self._log,
                is_debug=attachment.is_debug,
            )
            slots = SlotTable(attachment, self.description.vocab_size, self._device.torch_device)
            staging = self._staging(attachment)
            state = EpochState(
                attachment, future_map, slots, staging, self._graphed_step(future_map, staging, attachment)
            )
            self._stream.bind_thread()
            self._role.open(state)
        except BaseException as error:
            self._role.close()
            arena.close()
            if isinstance(error, torch.OutOfMemoryError):
                raise no_room(self.description, attachment, self._weights, error) from error
            raise
        self.last_epoch, self.last_step = attachment.epoch, 0
        self.recorder.begin_epoch(attachment.epoch)
        self._is_ending = False
        self._arena, self._fences, self._state = arena, fences, state

    def enqueue(self, command: StepCommand) -> None:
        """Enqueues a step and returns. Raises before anything is enqueued if the command makes no sense."""
        begun_ns = time.monotonic_ns()
        with self._enqueueing:
            if self._refuses_waits:
                torch.cuda.set_sync_debug_mode("error")
            try:
                self._enqueue(self._epoch_of(command), command)
            finally:
                if self._refuses_waits:
                    torch.cuda.set_sync_debug_mode("default")
        self.recorder.add(Site.ENQUEUE, command.step, begun_ns, time.monotonic_ns())

    def _enqueue(self, state: EpochState, command: StepCommand) -> None:
        state.slots.check(command)
        state.staging.begin(command.step % state.attachment.shape.ring, command.slots)
        take_over = self._taking_over(state, command.updates)
        phases = self._role.phases(command, state)
        _check_signals(command, phases)
        self.last_step = command.step
        if self._log.is_enabled:
            self._stream.enqueue(lambda: self._log.recv(epoch=command.epoch, step=command.step))
        if not self.enqueues_at_once:
            self._stream.enqueue(state.staging.flush)
        if command.updates:
            self._stream.enqueue(take_over)
        for point in command.ops.waits:
            self._wait(point, command.step)
        self._enqueue_phases(state, command, phases)

    def _enqueue_phases(self, state: EpochState, command: StepCommand, phases: list[Phase]) -> None:
        start, end = state.future_map.stamps(self.description.role, command.step)
        if not phases[0].is_stamped:
            self._device.stamp(self._stream, start)
        for number, phase in enumerate(phases, start=1):
            self._stream.enqueue(phase.work)
            if number == len(phases):
                if not phase.is_stamped:
                    self._device.stamp(self._stream, end)
                self._log_stamps(state, command.step)
            for point in command.ops.signals:
                if point.fence is phase.fence:
                    self._signal(point, command.step)

    def _taking_over(self, state: EpochState, updates: tuple[SlotUpdate, ...]) -> Callable[[], None]:
        """Stream work that takes over what changed. What has to be staged for it is put now."""
        if self.enqueues_at_once:
            return lambda: state.slots.take_over(state.slots.changes(updates, state.staging))
        return partial(state.slots.take_over, state.slots.changes(updates, state.staging)) if updates else _do_nothing

    def synchronize(self) -> None:
        """Blocks until everything enqueued is done: only for a worker told to acknowledge work that is done."""
        with self.stalls.at(ACKNOWLEDGEMENT):
            self._stream.synchronize(DRAIN_TIMEOUT_S)

    def drain(self, epoch: int = 0) -> None:
        """Finishes what is enqueued and ends the epoch; no effect if it is not open. 0 is whichever is."""
        if self._state is not None and epoch in (0, self.epoch):
            self._take_no_more()
            with self.stalls.at(DRAIN):
                self._stream.synchronize(DRAIN_TIMEOUT_S)
            self._close_epoch()

    @property
    def epoch(self) -> int | None:
        """The open epoch."""
        return None if self._state is None else self._state.attachment.epoch

    def abandon(self, epoch: int | None) -> None:
        """Ends the epoch after its scheduler was lost: what the stream waits for may never be signalled.

        No effect if another epoch is open by now, or none. The release is repeated, because a late producer's
        write may set a word back. A stream that does not come to its end is given up, and with it the process.
        """
        if self._state is None or self.epoch != epoch:
            return
        self._take_no_more()
        deadline = time.monotonic() + self._waited.timeout_s
        # What is enqueued on a broken stream is dropped: there is nothing to wait for.
        while self._stream.failure is None and not self._is_released():
            if time.monotonic() > deadline:
                self._on_stuck(self)
                self._stream.fail(DeadlineExceededError("what the stream waits for does not come, nor can be released"))
        self._close_epoch()

    def _is_released(self) -> bool:
        try:
            self._waited.release()
            with self.stalls.at(DRAIN):
                self._stream.synchronize(RELEASE_INTERVAL_S)
        except DeadlineExceededError:
            return False
        except DeviceError as error:
            self._lose_device(error)
        except Exception:
            # Work that the release let go broke the stream, which has reported it.
            if self._stream.failure is None:
                raise
        return True

    def _lose_device(self, error: DeviceError) -> None:
        """Ends the process: a GPU's context that failed, with another client of MPS perhaps, is of no use any more."""
        self._stream.fail(error)

    def close(self) -> None:
        """Ends whichever epoch is open, so that the stream can be closed."""
        self.abandon(self.epoch)

    def _take_no_more(self) -> None:
        with self._enqueueing:
            self._is_ending = True

    def _close_epoch(self) -> None:
        assert self._arena is not None, "an epoch is open"
        self._role.close()
        self._arena.close()
        self._state = self._arena = None
        allocated_bytes(self._device.torch_device)  # what the epoch had is others' now
        self._fences.clear()
        self._waited.clear()

    def _staging(self, attachment: Attachment) -> Staging:
        if self.enqueues_at_once:
            return HostStaging()
        return PinnedStaging(
            num_slots=attachment.shape.num_slots,
            num_bytes=staged_bytes(attachment),
            depth=attachment.shape.ring,
            device=self._device.torch_device,
            fetch=partial(self._device.fetch, self._stream),
            blocked=partial(self.stalls.at, STAGING),
        )

    def _future_map_class(self) -> type[FutureMap]:
        if self._device.torch_device.type == "cpu":
            return FutureMap
        # Here, as there is no triton where there is no GPU.
        from slipstream.services.worker.fused_future_map import FusedFutureMap

        return FusedFutureMap

    def _graphed_step(self, future_map: FutureMap, staging: Staging, attachment: Attachment) -> GraphedStep | None:
        # In debug mode rows are looked at on the host, which a graph cannot.
        if not isinstance(staging, PinnedStaging) or attachment.is_debug or not self._uses_graphs:
            return None
        start, end = future_map.stamp_columns(self.description.role)
        return GraphedStep(
            capture=CudaCapture() if self._device.torch_device.type == "cuda" else HostCapture(),
            slots=staging.slots,
            step=CapturedStep(staging.ring_row),
            stamp_start=partial(self._device.stamp_row, self._stream, start, staging.ring_row),
            stamp_end=partial(self._device.stamp_row, self._stream, end, staging.ring_row),
        )

    def _epoch_of(self, command: StepCommand) -> EpochState:
        if self._stream.failure is not None:
            raise FailedPreconditionError(f"the stream is broken: {self._stream.failure!r}")
        if self._state is None or self._is_ending:
            raise FailedPreconditionError("not attached")
        if command.epoch != self._state.attachment.epoch:
            raise StaleEpochError(f"epoch {command.epoch}: attached in epoch {self._state.attachment.epoch}")
        if command.step <= self.last_step:
            raise InvalidArgumentError("step", command.step, f"above {self.last_step}, the last one")
        return self._state

    def _wait(self, point: FencePoint, step: int) -> None:
        fence = self._fences[point.fence]
        self._waited.add(fence, point.value)
        fence.wait(self._stream, point.value)
        if self._log.is_enabled:
            self._stream.enqueue(lambda: self._log.fence(LogOp.WAIT, point.fence, point.value, step=step))

    def _signal(self, point: FencePoint, step: int) -> None:
        if self._log.is_enabled:
            self._stream.enqueue(lambda: self._log.fence(LogOp.SIGNAL, point.fence, point.value, step=step))
        self._fences[point.fence].signal(self._stream, point.value)

    def _log_stamps(self, state: EpochState, step: int) -> None:
        if self._log.is_enabled:
            is_draft = self.description.role is Role.DRAFT
            name = BufferName.DRAFT_STAMPS if is_draft else BufferName.VERIFY_STAMPS
            row = step % state.attachment.shape.ring
            self._stream.enqueue(lambda: self._log.access(name, [row], is_write=True, step=step))


def _do_nothing() -> None:
    """Nothing has changed."""


def _check_signals(command: StepCommand, phases: list[Phase]) -> None:
    own = [phase.fence for phase in phases]
    for point in command.ops.signals:
        if point.fence not in own:
            raise InvalidArgumentError("signals", point.fence.name, ", ".join(fence.name for fence in own))
