"""The thread that attaches a grammar worker beside the running steps, again after each loss, and has it compile.

No error of a grammar worker ends the scheduler: sequences without a constraint go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.common.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.host import name_this_thread
from slipstream.common.wire.layout import GrammarShape
from slipstream.scheduler.constraints import CompileState, GrammarState, GrammarWorker
from slipstream.scheduler.metrics import GRAMMAR_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from slipstream.common.device.interface import Device
    from slipstream.scheduler.constraints import Compilation
    from slipstream.scheduler.epoch import Epoch
    from slipstream.scheduler.link import Link

logger = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 0.1, 2.0
"""Seconds between two tries to attach a grammar worker, at first and at most: they double while the tries fail."""
LONGEST_AFTER_LOSS_S = 30.0
"""Longest such time, in seconds, for a worker that is lost again and again: each loss costs the steps that wait."""
STEADY_S = 5.0
"""A worker that took part for so many seconds is tried again soon after its loss."""


class GrammarSession:
    """Implements `ConstraintsListener`."""

    def __init__(
        self,
        device: Device,
        *,
        make_link: Callable[[], Link] | None,
        next_number: Callable[[int], int],
        registry: CollectorRegistry,
        wake: Callable[[], None],
    ) -> None:
        """`make_link`: makes a link to the grammar worker; None where there is none. Others: see `DraftSession`."""
        self._device = device
        self._make_link = make_link
        self._next_number = next_number
        self._wake = wake
        self._changed = threading.Condition()
        self._epoch: Epoch | None = None
        self._workers: tuple[GrammarWorker, ...] = ()
        """Those that are not detached."""
        self._wanted: deque[tuple[GrammarWorker, Compilation]] = deque()
        self._due, self._wait_s = 0.0, FIRST_S
        self._attached_at, self._after_loss_s = 0.0, FIRST_S
        self._is_stopped = self._is_busy = self._is_changed = False
        self._num_lost = GRAMMAR_LOSSES.counter(registry)
        self._thread = threading.Thread(target=self._run, name="grammars")

    @property
    def is_expected(self) -> bool:
        """True if a grammar worker is configured."""
        return self._make_link is not None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Ends the thread; the last epoch must be over."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()

    def enter(self, epoch: Epoch) -> None:
        """Attaches grammar workers to an epoch that is open from now on."""
        with self._changed:
            self._epoch, self._due, self._wait_s = epoch, 0.0, FIRST_S
            self._changed.notify_all()

    def leave(self) -> None:
        """Ends all attachments of the epoch, whose loop has ended."""
        with self._changed:
            self._epoch = None
            self._wanted.clear()
            for worker in self._workers:
                worker.state = GrammarState.LEFT
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._is_busy or self._workers), LONGEST_S)

    def wants(self, worker: GrammarWorker, compilation: Compilation) -> None:
        with self._changed:
            self._wanted.append((worker, compilation))
            self._changed.notify_all()

    def lost(self, worker: GrammarWorker, reason: str) -> None:
        logger.warning("sequences with a constraint wait for another grammar worker: %s", reason)
        with self._changed:
            self._num_lost.inc()
            now = time.monotonic()
            is_steady = now - self._attached_at >= STEADY_S
            self._after_loss_s = FIRST_S if is_steady else min(2 * self._after_loss_s, LONGEST_AFTER_LOSS_S)
            self._due, self._is_changed = now + self._after_loss_s, True
            self._changed.notify_all()

    def gone(self, worker: GrammarWorker) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        name_this_thread("grammars")
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work, self._until_try_s())
                if self._is_stopped:
                    return
                epoch, self._is_busy, self._is_changed = self._epoch, True, False
            try:
                self._work(epoch)
            except Exception:
                logger.exception("the grammar worker's session failed")
                self._back_off()
            finally:
                del epoch

    def _has_work(self) -> bool:
        # After a change the thread looks anew how long to wait.
        return (
            self._is_stopped
            or self._is_changed
            or bool(self._wanted)
            or self._until_try_s() == 0.0
            or bool(self._left())
        )

    def _left(self) -> list[GrammarWorker]:
        return [worker for worker in self._workers if worker.state is GrammarState.LEFT]

    def _until_try_s(self) -> float | None:
        is_there = any(worker.state is GrammarState.ACTIVE for worker in self._workers)
        if self._epoch is None or self._make_link is None or is_there:
            return None
        return max(0.0, self._due - time.monotonic())

    def _work(self, epoch: Epoch | None) -> None:
        for worker in self._left():
            self._detach(worker, epoch)
        with self._changed:
            wanted = self._wanted.popleft() if self._wanted else None
        if wanted is not None:
            self._prepare(*wanted)
        if epoch is not None and self._until_try_s() == 0.0:
            self._try(epoch)

    def _try(self, epoch: Epoch) -> None:
        constraints = epoch.constraints
        assert self._make_link is not None, "a grammar worker is expected"
        assert constraints is not None, "so sequences may have constraints"
        link = self._make_link()
        try:
            worker = self._attached(epoch, link)
        except BaseException as error:
            link.detach(drain=False)
            if not isinstance(error, SlipstreamError):
                raise
            is_new = self._wait_s == FIRST_S
            logger.log(logging.INFO if is_new else logging.DEBUG, "no grammar worker: %s", error)
            self._back_off()
            if isinstance(error, MismatchError):
                constraints.refuse(FailedPreconditionError(f"no output can be constrained: {error}"))
                self._wake()
            return
        with self._changed:
            self._wait_s, self._attached_at = FIRST_S, time.monotonic()
            self._workers = (*self._workers, worker)
            if self._epoch is not epoch:
                worker.state = GrammarState.LEFT
                return
            constraints.offer(worker)
        self._wake()

    def _back_off(self) -> None:
        self._due = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_S)

    def _attached(self, epoch: Epoch, link: Link) -> GrammarWorker:
        description = link.describe()
        description.check_version()
        if description.has_scheduler:
            raise FailedPreconditionError("the grammar worker has another scheduler")
        shape, results = epoch.attachment.shape, epoch.attachment.manifest
        number = self._next_number(description.last_epoch)
        sizes = GrammarShape(
            num_slots=shape.num_slots, num_draft_tokens=shape.num_draft_tokens, vocab_size=epoch.verify.vocab_size
        )
        worker = GrammarWorker(number, link, description, sizes, self._device, epoch=epoch.number)
        own, given = worker.region.own, worker.region.given
        try:
            link.attach(
                replace(
                    epoch.attachment,
                    epoch=number,
                    protocol_version=link.role.protocol_version,
                    manifest=own,
                    given=given,
                    results=results,
                    peer=replace(epoch.verify, weights=None, last_epoch=epoch.number),
                    expected_draft=None,
                    measures_step_tokens=False,
                )
            )
            epoch.link.attach_region(worker.region)
            worker.seal()
        except BaseException:
            worker.close()
            raise
        return worker

    def _prepare(self, worker: GrammarWorker, compilation: Compilation) -> None:
        if worker.state is not GrammarState.ACTIVE:
            return
        if not compilation.drop_if_unwanted():
            try:
                worker.link.prepare(compilation.grammar)
            except UnavailableError:
                return  # it is lost, which its link says
            except InvalidArgumentError as error:
                compilation.fault = error
            except SlipstreamError as error:
                # No other answer follows, and nothing else would end the wait of its sequences.
                compilation.fault = InternalError(f"the grammar worker did not compile the grammar: {error}")
            compilation.state = CompileState.OVER
        compilation.waiting.clear()  # it may be known for longer than these run
        # Another sequence may wait for one that is dropped.
        self._wake()

    def _detach(self, worker: GrammarWorker, epoch: Epoch | None) -> None:
        with self._changed:
            self._workers = tuple(one for one in self._workers if one is not worker)
        with suppress(SlipstreamError):
            if epoch is not None:
                epoch.link.detach_draft(worker.region.epoch, worker.number)
        with suppress(SlipstreamError):
            worker.link.detach(drain=False)
        worker.close()
        with self._changed:
            self._changed.notify_all()
