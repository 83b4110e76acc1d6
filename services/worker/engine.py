"""Carries out a worker's steps: wait, stamp, work, signal, all enqueued on its one stream.

Draft and verify each implement `RoleEngine`, whose device work is a list of `Phase`s, and share `Engine`. Everything
here runs on the thread that owns the device (`enqueue` may run on another). Only `attach`, `drain`, `abandon` and
`synchronize` wait for the stream, and `enqueue` where the device is a whole ring of steps late.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.common.errors import (
    DeadlineExceededError,
    DeviceError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfMemoryError,
    StaleEpochError,
)
from slipstream.common.wire.events import EventLog, LogOp, Site
from slipstream.common.wire.step import FenceName, Role
from slipstream.services.worker.epoch import Epoch, check_attachment, make_state, open_grammar, open_memory, open_region
from slipstream.services.worker.masks import MaskWaits
from slipstream.services.worker.memory import allocated_bytes, first_line, is_out_of_memory, measured, no_room

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from slipstream.common.device.interface import Device, Stream
    from slipstream.common.wire.events import EventLog, FenceLogOp
    from slipstream.common.wire.step import FencePoint, FenceWait, SlotUpdate, StepCommand, WaitPlace
    from slipstream.common.wire.worker import Attachment, Measurements, OfferedRegion, WorkerDescription
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region

RELEASE_INTERVAL_S = 0.05
"""Longest wait for the stream between two releases of its waits, in seconds."""
DRAIN_TIMEOUT_S = 60.0
"""Longest wait for the end of the enqueued work, in seconds."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A piece of a step's work. The waits of its place precede it, the signals of its fences follow it."""

    work: Callable[[], None]
    fences: tuple[FenceName, ...] = ()
    """In the order in which they are signalled."""
    place: WaitPlace | None = None
    """None: no wait stands before it."""
    part: int = 0
    """The place in the worker's stamps of the part that it belongs to; the phases of a part follow each other."""
    is_stamped: bool = False
    """True if the work of the part's first phase stamps its start, and that of the last one its end, by itself."""


class RoleEngine(Protocol):
    """The device work of a draft or a verify service."""

    description: WorkerDescription
    """The worker's description, for the scheduler."""

    def open(self, state: EpochState) -> Measurements | None:
        """Allocates what an epoch needs, warms up, and measures what is asked for. Raises MismatchError, others."""

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """Returns the step's work in order; each part is stream work and holds all it needs."""

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        """Verify: makes what steps with a draft need; other steps may run between two items. Raises MismatchError."""

    def close(self) -> None:
        """Frees what `open` allocated."""


class Engine:
    """The device side of a worker."""

    def __init__(
        self,
        role: RoleEngine,
        device: Device,
        stream: Stream,
        log: EventLog,
        *,
        refuses_waits: bool = False,
        on_stuck: Callable[[Engine, str], None] = lambda *_: None,
        free_elsewhere: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`refuses_waits`: a wait of PyTorch's for the device, while a step is enqueued, breaks the stream.

        `on_stuck` is called on the device's thread when the stream does not end, with what it waits for and
        before anything is freed: on a GPU freeing waits for the stream, so the process has to end without.
        `free_elsewhere`: bytes that are free on other devices that the role needs as much of, the fewest.
        """
        self._role = role
        self._device = device
        self._stream = stream
        self.log = log
        """Events: steps that were enqueued, waits for the device, and in debug mode the order."""
        self._refuses_waits = refuses_waits and device.torch_device.type == "cuda"
        self._on_stuck = on_stuck
        self._free_elsewhere = free_elsewhere
        self._mask_waits = MaskWaits(device, log)
        self._open: Epoch | None = None
        self.last_epoch = 0
        """The largest epoch that was attached."""
        self.last_step = 0
        """Number of the last step of the open epoch."""
        # Held while a command is enqueued: an epoch does not end in the middle of one.
        self._enqueueing = threading.Lock()
        self._is_ending = False
        self.description = role.description
        lent = 0 if self.description.weights is None else self.description.weights.size
        self._weights = allocated_bytes(device.torch_device) + lent
        self.enqueues_at_once = device.has_stream_threads
        """True if `enqueue` takes next to no time, so that it need not run on the thread that owns the device."""

    def describe(self) -> WorkerDescription:
        """Returns what this worker is, with the memory that it has at the moment. Raises DeviceError."""
        try:
            memory = measured(self.description.memory, self._device.torch_device, self._weights)
        except RuntimeError as error:
            failure = DeviceError(f"the GPU failed: {first_line(error)}")
            self._lose_device(failure)
            raise failure from error
        elsewhere = self._free_elsewhere()
        if elsewhere is not None:
            memory = replace(memory, free=min(memory.free, elsewhere))
        return replace(self.description, last_epoch=self.last_epoch, memory=memory)

    def attach(self, attachment: Attachment) -> Measurements | None:
        """Opens an epoch, see `RoleEngine.open`. Raises FailedPreconditionError and its kinds, ConfigError, others."""
        with self.log.blocked(Site.ATTACH):
            try:
                return self._attach(attachment)
            except DeviceError as error:
                self._lose_device(error)
                raise

    def _attach(self, attachment: Attachment) -> Measurements | None:
        if self._open is not None:
            raise FailedPreconditionError(f"attached in epoch {self.epoch}: drain it first")
        check_attachment(attachment, self.description, self.last_epoch)
        memory = open_memory(attachment, self._device)
        try:
            state = make_state(
                attachment,
                memory,
                self.description,
                self._device,
                self._stream,
                self.log,
                blocked=partial(self.log.blocked, Site.STAGING),
            )
            opened = Epoch(state, memory)
            self._stream.bind_thread()
            measurements = self._role.open(state)
            self._stream.synchronize(5 * DRAIN_TIMEOUT_S)  # Attach may take so long; after it nothing is written
        except BaseException as error:
            self._role.close()
            memory.close()
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise self._no_room(attachment, error) from error
            raise
        self.last_epoch, self.last_step = attachment.epoch, 0
        self.log.begin_epoch(attachment.epoch)
        self._is_ending = False
        self._open = opened
        return measurements

    def _no_room(self, attachment: Attachment, error: RuntimeError) -> OutOfMemoryError:
        return no_room(self.description, attachment, self._device.torch_device, self._weights, error)

    def attach_region(self, offered: OfferedRegion) -> Generator[None, None, None]:
        """Verify: maps the memory of another worker, so that commands may name its attachment once this is at its end.

        Steps may be enqueued between two items. Raises FailedPreconditionError (and its kinds), ManifestError.
        """
        opened = self._verify_epoch(offered.epoch)
        if opened is None:
            raise FailedPreconditionError(f"epoch {offered.epoch} is not open")
        if offered.attachment in opened.attachments:
            raise StaleEpochError(f"attachment {offered.attachment}: there was an epoch or attachment of this number")
        if offered.draft is None:
            masks, memory = open_grammar(offered, opened.state, self.description, self._device, self.log)
            with self._enqueueing:
                opened.add_grammar(offered.attachment, masks, memory)
            return
        region, memory = open_region(offered, offered.draft, opened.state, self.description, self._device, self.log)
        try:
            for _ in self._role.prepare(region, opened.state):
                yield
                if self._open is not opened:
                    raise FailedPreconditionError(f"epoch {offered.epoch} is over")
        except BaseException as error:
            memory.close()
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise self._no_room(opened.state.attachment, error) from error
            if isinstance(error, DeviceError):
                self._lose_device(error)
            raise
        with self._enqueueing:
            opened.add_draft(region, memory)

    def release_draft(self, epoch: int, attachment: int) -> None:
        """Verify: ends its waits for a draft that is lost, also those of later commands; no effect without it."""
        opened = self._verify_epoch(epoch)
        if opened is not None:
            with self._enqueueing:
                opened.release_draft(attachment)

    def detach_draft(self, epoch: int, attachment: int) -> Generator[None, None, None]:
        """Verify: releases what waits for a draft, and closes its memory once the stream is past its last use.

        At its end when that is done; yields while it is not. No effect on an attachment that is not there.
        """
        opened = self._verify_epoch(epoch)
        if opened is None:
            return
        with self._enqueueing:
            memory = opened.retire_draft(attachment)
        if memory is None:
            return
        is_past = self._mark()
        while self._open is opened and self._stream.failure is None:
            # Again and again: a late write of the draft may set the word back.
            memory.release()
            if is_past():
                opened.close_draft(attachment)
                return
            yield

    def _verify_epoch(self, epoch: int) -> Epoch | None:
        if self.description.role is not Role.VERIFY:
            raise InvalidArgumentError("role", self.description.role.value, Role.VERIFY.value)
        return self._open if epoch == self.epoch else None

    def _mark(self) -> Callable[[], bool]:
        """Returns a function that says whether the stream has done what is enqueued now."""
        if self._device.torch_device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._stream.enqueue(event.record)
            return event.query
        reached = threading.Event()
        self._stream.enqueue(reached.set)
        return reached.is_set

    def enqueue(self, command: StepCommand) -> None:
        """Enqueues a step and returns. Raises InvalidArgumentError and others before anything is enqueued."""
        begun_ns = time.monotonic_ns()
        with self._enqueueing:
            if self._refuses_waits:
                torch.cuda.set_sync_debug_mode("error")
            try:
                self._enqueue(self._epoch_of(command), command)
            finally:
                if self._refuses_waits:
                    torch.cuda.set_sync_debug_mode("default")
        self.log.add(Site.ENQUEUE, command.step, begun_ns, time.monotonic_ns())

    def _enqueue(self, opened: Epoch, command: StepCommand) -> None:
        state = opened.state
        opened.check(command)
        state.slots.check(command)
        state.stage(command)
        take_over = self._staged(state, command.updates) if command.updates else None
        phases = self._role.phases(command, state)
        _check_fences(command, phases)
        self.last_step = command.step
        work = partial(self._enqueue_work, opened, command, take_over, phases)
        if self.enqueues_at_once:
            work()
        else:
            # In one piece, so that PyTorch is told of the stream once.
            self._stream.enqueue(work)

    def _enqueue_work(
        self, opened: Epoch, command: StepCommand, take_over: Callable[[], None] | None, phases: list[Phase]
    ) -> None:
        if self.log.is_enabled:
            self._stream.enqueue(lambda: self.log.recv(epoch=command.epoch, step=command.step))
        if not self.enqueues_at_once:
            self._stream.enqueue(opened.state.staging.flush)
        if take_over is not None:
            self._stream.enqueue(take_over)
        before = None
        for phase, after in zip_longest(phases, phases[1:]):
            is_first = before is None or before.part != phase.part
            is_last = after is None or after.part != phase.part
            self._enqueue_phase(opened, command, phase, is_first=is_first, is_last=is_last)
            before = phase

    def _enqueue_phase(
        self, opened: Epoch, command: StepCommand, phase: Phase, *, is_first: bool, is_last: bool
    ) -> None:
        """`is_first`, `is_last`: of its part."""
        if phase.place is not None:
            for wait in command.ops.waits:
                if wait.place is phase.place:
                    self._wait(opened, wait, command)
        start, end = opened.state.memory.stamps(command.step, phase.part)
        if is_first and not phase.is_stamped:
            self._device.stamp(self._stream, start)
        self._stream.enqueue(phase.work)
        if is_last:
            if not phase.is_stamped:
                self._device.stamp(self._stream, end)
            self._log_stamps(opened.state, command.step, phase.part)
        for fence in phase.fences:
            for point in command.ops.signals:
                if point.fence is fence:
                    self._signal(opened, point, command)

    def _staged(self, state: EpochState, updates: tuple[SlotUpdate, ...]) -> Callable[[], None]:
        """Stages changes of slots, and returns the stream work that takes them over."""
        if self.enqueues_at_once:
            return lambda: state.slots.take_over(state.slots.changes(updates, state.staging))
        return partial(state.slots.take_over, state.slots.changes(updates, state.staging))

    def synchronize(self) -> None:
        """Blocks until the enqueued work is done; only for a worker that acknowledges steps when they are done."""
        with self.log.blocked(Site.ACKNOWLEDGEMENT, self.last_step):
            self._stream.synchronize(DRAIN_TIMEOUT_S)

    def drain(self, epoch: int = 0) -> None:
        """Finishes the enqueued work and ends the epoch; no effect if it is not open. 0 stands for the open one."""
        if self._open is not None and epoch in (0, self.epoch):
            self._take_no_more()
            try:
                with self.log.blocked(Site.DRAIN, self.last_step):
                    self._stream.synchronize(DRAIN_TIMEOUT_S)
            except DeadlineExceededError as error:
                raise DeadlineExceededError(f"{error}: it waits for {self._open.unmet()}") from None
            self._close_epoch()

    @property
    def epoch(self) -> int | None:
        """Number of the open epoch."""
        return None if self._open is None else self._open.state.attachment.epoch

    def abandon(self, epoch: int | None) -> None:
        """Ends the epoch after its scheduler was lost: the stream's waits may never be signalled.

        No effect if another epoch is open by now, or none. The release is repeated, because a late producer's
        write may set a word back. A stream that does not end is given up, and with it the process.
        """
        if self._open is None or self.epoch != epoch:
            return
        self._take_no_more()
        deadline = time.monotonic() + self._open.release_timeout_s
        unmet = self._open.unmet()
        # A broken stream drops what is enqueued: there is nothing to wait for.
        while self._stream.failure is None and not self._is_released(self._open):
            if time.monotonic() > deadline:
                self._on_stuck(self, unmet)
                reason = f"what the stream waits for does not happen, nor can be released: {unmet}"
                self._stream.fail(DeadlineExceededError(reason))
        self._close_epoch()

    def _is_released(self, opened: Epoch) -> bool:
        try:
            opened.release()
            with self.log.blocked(Site.DRAIN, self.last_step):
                self._stream.synchronize(RELEASE_INTERVAL_S)
        except DeadlineExceededError:
            return False
        except DeviceError as error:
            self._lose_device(error)
        except Exception:
            # Work that the release let run broke the stream, which has reported it.
            if self._stream.failure is None:
                raise
        return True

    def _lose_device(self, error: DeviceError) -> None:
        """Ends the process: a GPU's context that failed, with another client of MPS perhaps, is of no use any more."""
        self._stream.fail(error)

    def close(self) -> None:
        """Ends the open epoch, if any, so that the stream can be closed."""
        self.abandon(self.epoch)

    def _take_no_more(self) -> None:
        with self._enqueueing:
            self._is_ending = True

    def _close_epoch(self) -> None:
        assert self._open is not None, "an epoch is open"
        self._role.close()
        self._open.close()
        self._open = None
        allocated_bytes(self._device.torch_device)  # gives the epoch's memory back to the device

    def _epoch_of(self, command: StepCommand) -> Epoch:
        if self._stream.failure is not None:
            raise FailedPreconditionError(f"the stream is broken: {self._stream.failure!r}")
        if self._open is None or self._is_ending:
            raise FailedPreconditionError("not attached")
        if command.epoch != self.epoch:
            raise StaleEpochError(f"epoch {command.epoch}: attached in epoch {self.epoch}")
        if command.step <= self.last_step:
            raise InvalidArgumentError("step", command.step, f"above {self.last_step}, the last one")
        return self._open

    def _wait(self, opened: Epoch, wait: FenceWait, command: StepCommand) -> None:
        memory = opened.memory_of(command, wait.fence)
        if wait.fence is FenceName.GRAMMAR_READY:
            with self._mask_waits.timed(self._stream, command.step):
                memory.wait(self._stream, wait)
        else:
            memory.wait(self._stream, wait)
        self._log_point(LogOp.WAIT, wait, command.step, opened.number_of(memory, command))

    def _signal(self, opened: Epoch, point: FencePoint, command: StepCommand) -> None:
        memory = opened.memory_of(command, point.fence)
        self._log_point(LogOp.SIGNAL, point, command.step, opened.number_of(memory, command))
        memory.signal(self._stream, point)

    def _log_point(self, op: FenceLogOp, point: FencePoint | FenceWait, step: int, attachment: int) -> None:
        if self.log.is_enabled:
            self._stream.enqueue(lambda: self.log.fence(op, point.fence, point.value, step=step, attachment=attachment))

    def _log_stamps(self, state: EpochState, step: int, part: int) -> None:
        if self.log.is_enabled:
            self._stream.enqueue(partial(state.memory.log_stamps, step, part))


def _check_fences(command: StepCommand, phases: list[Phase]) -> None:
    own = [fence for phase in phases for fence in phase.fences]
    for point in command.ops.signals:
        if point.fence not in own:
            raise InvalidArgumentError("signals", point.fence.name, ", ".join(fence.name for fence in own))
    places = [phase.place for phase in phases if phase.place is not None]
    for wait in command.ops.waits:
        if wait.fence in own:
            raise InvalidArgumentError("waits", wait.fence.name, "a fence that the other worker signals")
        if wait.place not in places:
            accepted = f"a place in the work of this step: {', '.join(place.name for place in places) or 'none'}"
            raise InvalidArgumentError("waits.place", wait.place.name, accepted)
