"""The scheduler's links to simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.wire.step import Role, StepCommand
from slipstream.common.wire.trace import HostRecords
from slipstream.common.wire.worker import Attachment, OfferedRegion, WorkerDescription
from slipstream.scheduler.link import DRAIN_TIMEOUT_S
from tests.simulator.threads import Signal
from tests.simulator.workers import SimulatedWorker
from tests.simulator.world import Process

T = TypeVar("T")
CALL_TIMEOUT_S = 60.0
ATTACH_S = 0.05
"""At most so long a worker needs to open an epoch."""


class SimulatedLink:
    """Implements `Link`: a stream of commands over an ordered connection that may break, and calls beside it."""

    def __init__(
        self,
        scheduler: Process,
        role: Role,
        find: Callable[[], SimulatedWorker | None],
        *,
        on_failure: Callable[[], None],
    ) -> None:
        """`find` returns the worker that listens at the address now. `on_failure`: see `Link`."""
        self.role = role
        self.failure: SlipstreamError | None = None
        self.has_refused = False
        """See `Link.has_refused`."""
        self._on_failure = on_failure
        self._refusals: list[Callable[[], None]] = []
        """Each ends a call that is under way."""
        self._scheduler = scheduler
        self._world = scheduler.world
        self._find = find
        self._worker: SimulatedWorker | None = None
        self._changed = Signal(self._world)
        self._acknowledged = 0
        self._epoch = self._described_pid = 0
        self.is_open = self._is_closed = False
        self._last_up = self._last_down = 0.0

    def describe(self) -> WorkerDescription:
        """See `Link.describe`."""
        found: WorkerDescription = self._call(lambda worker, answer: answer(worker.describe(), None))
        self._described_pid = found.pid
        return found

    def attach(self, attachment: Attachment) -> None:
        """See `Link.attach`."""

        def attach(worker: SimulatedWorker, answer: Callable[[None, SlipstreamError | None], None]) -> None:
            opening_s = self._world.random.random() * ATTACH_S
            meant = replace(attachment, pid=self._described_pid)
            worker.at(opening_s, worker.attach, meant, lambda error: answer(None, error))

        self._call(attach)
        if self._is_closed:
            raise UnavailableError("the connection was closed")
        self._world.may_be_interrupted()
        self._worker, self._epoch, self.is_open = self._find(), attachment.epoch, True
        worker = self._worker
        if worker is None or not worker.is_alive:
            self.lost("it died")
            return
        self._arrive_in_order(worker, worker.open_stream, self)

        def broken() -> None:
            self.lost("the connection broke")
            self._arrive_in_order(worker, worker.end_stream, self)

        worker.on_lost.append(broken)
        self._scheduler.on_lost.append(broken)

    def attach_region(self, region: OfferedRegion) -> None:
        """See `Link.attach_region`."""

        def attach(worker: SimulatedWorker, answer: Callable[[None, SlipstreamError | None], None]) -> None:
            if region.draft is None:
                worker.attach_grammar(region, lambda error: answer(None, error))
                return
            opening_s = self._world.random.random() * ATTACH_S
            worker.at(opening_s, worker.attach_draft, region, lambda error: answer(None, error))

        self._call(attach)

    def prepare(self, grammar: str) -> None:
        """See `Link.prepare`."""
        self._call(lambda worker, answer: worker.prepare(grammar, lambda error: answer(None, error)))

    def release_draft(self, epoch: int, attachment: int) -> None:
        """See `Link.release_draft`."""
        worker = self._find()
        if worker is not None and worker.is_alive and self._scheduler.is_alive:
            worker.soon(worker.release_draft, epoch, attachment)

    def detach_draft(self, epoch: int, attachment: int) -> None:
        """See `Link.detach_draft`."""
        self._call(lambda worker, answer: worker.detach_draft(epoch, attachment, lambda: answer(None, None)))

    def send(self, command: StepCommand) -> None:
        """See `Link.send`."""
        self._world.may_be_interrupted()
        if self.failure is not None:
            raise self.failure
        assert self._worker is not None, "a link is attached before it sends"
        self._arrive_in_order(self._worker, self._worker.take, self, command)
        self._world.may_be_interrupted()

    def wait_for_acknowledgement(self, step: int, timeout_s: float) -> bool:
        """See `Link.wait_for_acknowledgement`."""
        came = self._changed.wait_for(lambda: self._acknowledged >= step or self.failure is not None, timeout_s)
        if self.failure is not None:
            raise self.failure
        return came

    def read_records(self, from_step: int) -> HostRecords | None:
        """See `Link.read_records`."""
        return None

    def detach(self, *, drain: bool) -> None:
        """See `Link.detach`."""
        worker, self._worker = self._worker, None
        if worker is None:
            self._close()
            return
        if drain and self.failure is None:
            with suppress(UnavailableError):
                self._call(
                    lambda found, answer: found.drain(self._epoch, lambda: answer(None, None)),
                    timeout_s=DRAIN_TIMEOUT_S[self.role],
                )
        self._close()
        self._arrive_in_order(worker, worker.end_stream, self)

    def _close(self) -> None:
        self.is_open, self._is_closed = False, True
        for refuse in self._refusals:
            refuse()

    def acknowledge(self, step: int) -> None:
        """Called by the worker: it has enqueued a step."""
        self._last_down = max(self._last_down, self._world.now + self._world.latency())
        self._scheduler.at(self._last_down - self._world.now, self._acknowledge, step)

    def lost(self, reason: str) -> None:
        """The connection broke; the scheduler learns of it soon."""
        self._scheduler.soon(self._fail, reason)

    def _acknowledge(self, step: int) -> None:
        if self.is_open:
            self._acknowledged = step
            self._changed.changed()

    def _fail(self, reason: str) -> None:
        if self.failure is None and self.is_open:
            self.failure = UnavailableError(f"the {self.role.value} service is lost: {reason}")
            self._changed.changed()
            self._on_failure()

    def _arrive_in_order(self, worker: SimulatedWorker, call: Callable[..., None], *arguments: object) -> None:
        """The order of the stream; its end comes last."""
        self._last_up = max(self._last_up, self._world.now + self._world.latency())
        if self._scheduler.is_alive or call == worker.end_stream:
            worker.at(self._last_up - self._world.now, call, *arguments)

    def _call(
        self,
        ask: Callable[[SimulatedWorker, Callable[[T, SlipstreamError | None], None]], None],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> T:
        """A call beside the stream. Blocks; raises the worker's error, or UnavailableError."""
        world, worker = self._world, self._find()
        world.may_be_interrupted()
        answered: list[tuple[T | None, SlipstreamError | None]] = []
        changed = Signal(world)

        def arrive(result: T | None, error: SlipstreamError | None) -> None:
            if not answered:
                answered.append((result, error))
                changed.changed()

        def refuse() -> None:
            self._scheduler.soon(arrive, None, UnavailableError(f"the {self.role.value} service is not there"))

        if worker is None or not worker.is_alive:
            refuse()
        else:
            worker.on_lost.append(refuse)
            self._refusals.append(refuse)
            worker.soon(ask, worker, lambda result, error: self._scheduler.soon(arrive, result, error))
        if not changed.wait_for(lambda: bool(answered), timeout_s):
            answered.append((None, UnavailableError(f"the {self.role.value} service did not answer in time")))
        result, error = answered[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
