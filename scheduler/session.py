"""The thread that attaches verify, runs the step loop, and starts over when verify was lost."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import (
    CheckpointError,
    ConfigError,
    ManifestError,
    MismatchError,
    OutOfMemoryError,
    SlipstreamError,
)
from slipstream.common.host import STEP_LOOP, name_this_thread
from slipstream.common.rpc.listener import is_claimed
from slipstream.common.wire.step import Role
from slipstream.scheduler.attachment import check_fits, check_sharing
from slipstream.scheduler.draft_session import FIRST_TRY_S, DraftSession
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.grammar_session import GrammarSession
from slipstream.scheduler.link import Heartbeats, Link, LinkThread
from slipstream.scheduler.metrics import DraftMetrics, StepMetrics
from slipstream.scheduler.sizes import EpochSizes, Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.results import Outgoing
    from slipstream.scheduler.waiting_queue import WaitingQueue

    MakeLink = Callable[[Role, str], Link]

logger = logging.getLogger(__name__)

FINAL_ERRORS = (MismatchError, ConfigError, CheckpointError, ManifestError, OutOfMemoryError)
"""Errors of verify that a retry cannot fix. No error of a draft ends the scheduler."""
DRAFT_LOADS_S = 60.0
"""How long the first epoch waits, once verify has loaded, for a draft that is loading, and then for its attachment.

Verify plans memory and captures graphs for the draft that it knows of: for a later one it captures them again.
"""
DRAFT_COMES_S = 20.0
"""How long, from the start on, the first epoch on a GPU waits for a draft of which there is no process yet."""
RETRY_S, LONGEST_RETRY_S = 0.2, 5.0
"""Between two tries to open an epoch: the time doubles while verify is lost before a step was done."""


class SessionListener(Protocol):
    """Gets the events of a session, on the session's thread; must return at once."""

    def attached(self, epoch: Epoch) -> None:
        """Called when sequences can run."""
        ...

    def detached(self, reason: str) -> None:
        """Called when verify was lost."""
        ...

    def failed(self, error: SlipstreamError) -> None:
        """Called for an error that a retry cannot fix: verify does not fit the scheduler, or a setting is wrong."""
        ...


class EpochNumbers:
    """Numbers of epochs and of attachments, each of which is new. Called on any thread."""

    def __init__(self) -> None:
        self._last_epoch = 0
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def of_epoch(self, seen: int) -> int:
        """Returns a number above `seen`, which is verify's word, and above those of all epochs."""
        with self._lock:
            self._last_epoch = self._take(max(self._last_epoch, seen))
            return self._last_epoch

    def of_attachment(self, seen: int) -> int:
        """Returns a number above `seen`, which is the word of a draft: no other number depends on it."""
        with self._lock:
            return self._take(max(self._last_epoch, seen))

    def _take(self, below: int) -> int:
        """The first number above this one that is new."""
        number = below + 1
        while number in self._taken:
            number += 1
        self._taken.add(number)
        return number


class WorkerSession:
    """Runs epochs one after the other until the queue is stopped."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        queue: WaitingQueue,
        *,
        registry: CollectorRegistry,
        listener: SessionListener,
        sink: Callable[[Outgoing], None],
        make_link: MakeLink | None = None,
    ) -> None:
        """`make_link`: makes links to workers other than the services at the addresses of the configuration.

        `sink`: see `StepLoop`.
        """
        self._config = config
        self._device = device
        self._queue = queue
        self._listener = listener
        self._metrics = StepMetrics(registry)
        self._links = LinkThread()
        self._sink = sink
        self._make_link = make_link or self._link_to_service
        self._numbers = EpochNumbers()
        self.drafts = DraftSession(
            config,
            device,
            make_link=lambda address: self._make_link(Role.DRAFT, address),
            next_number=self._numbers.of_attachment,
            metrics=DraftMetrics(registry),
            wake=queue.wake,
        )
        make_grammar_link = None if config.grammar is None else partial(self._make_link, Role.GRAMMAR, config.grammar)
        self.grammars = GrammarSession(
            device,
            make_link=make_grammar_link,
            next_number=self._numbers.of_attachment,
            registry=registry,
            wake=queue.wake,
        )
        addresses = {Role.VERIFY: lambda: config.verify}
        if config.draft is not None:
            addresses[Role.DRAFT] = lambda: self.drafts.address
        if (grammar := config.grammar) is not None:
            addresses[Role.GRAMMAR] = lambda: grammar
        self._heartbeats = Heartbeats(registry, {} if make_link is not None else addresses, self._links)
        self._thread = threading.Thread(target=self._run, name="loop")
        self._last_cause = ""
        self._retry_s = RETRY_S
        self._draft_comes_until = time.monotonic() + DRAFT_COMES_S
        self._draft_loads_until = math.inf
        """Set once verify has loaded."""
        self._is_starting = True
        """Until the first epoch is open."""

    def start(self) -> None:
        """Starts the threads."""
        self._heartbeats.start()
        self.drafts.start()
        self.grammars.start()
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the threads; stop the queue first."""
        self._thread.join()
        self.drafts.join()
        self.grammars.join()
        self._heartbeats.close()
        self._links.close()

    def _run(self) -> None:
        name_this_thread(STEP_LOOP)
        try:
            while not self._queue.is_stopped:
                self._run_once()
        except SlipstreamError as error:
            logger.error("%s", error)
            self._listener.failed(error.with_traceback(None))
        except Exception as error:
            logger.exception("the loop failed")
            self._listener.failed(SlipstreamError(f"the loop failed: {error!r}"))

    def _link_to_service(self, role: Role, address: str) -> Link:
        return Link(role, address, self._links, on_failure=self._queue.wake)

    def _run_once(self) -> None:
        """Runs one epoch if verify is there. Raises errors that a retry cannot fix."""
        link = self._make_link(Role.VERIFY, self._config.verify)
        try:
            epoch = self._epoch_with(link)
        except SlipstreamError as error:
            link.detach(drain=False)
            if isinstance(error, FINAL_ERRORS):
                raise
            logger.debug("waiting for verify: %s", error)
            self._queue.wait_for_stop(RETRY_S)
            return
        reason = None
        try:
            self._run_epoch(epoch)
        except FINAL_ERRORS as error:
            reason = str(error)
            raise
        except SlipstreamError as error:
            reason = f"epoch {epoch.number} is over: {error}"
            self._lose(epoch, reason)
            # The frames of the error's way hold the epoch with its memory.
            clear_frames(error.__traceback__)
        finally:
            self._queue.close()
            self.drafts.leave()
            last_sent = epoch.last_sent
            epoch.close(drain=reason is None)
            self.grammars.leave()
            self.drafts.detach_all(last_sent, drain=reason is None)
        if reason is not None:
            self._back_off(epoch)

    def _back_off(self, epoch: Epoch) -> None:
        """Waits longer each time that verify was lost before it had done a step."""
        self._retry_s = RETRY_S if epoch.trace.last_complete else min(2 * self._retry_s, LONGEST_RETRY_S)
        self._queue.wait_for_stop(self._retry_s)

    def _epoch_with(self, link: Link) -> Epoch:
        workers, sizes = self._decide(link)
        return Epoch(
            self._numbers.of_epoch(workers.verify.last_epoch),
            self._config,
            workers,
            sizes,
            device=self._device,
            link=link,
            queue=self._queue,
            metrics=self._metrics,
            listener=self.drafts,
            grammars=self.grammars if self.grammars.is_expected else None,
            sink=self._sink,
        )

    def _decide(self, link: Link) -> tuple[Workers, EpochSizes]:
        """Decides the sizes with the draft that is expected, if it fits. Raises ConfigError, OutOfMemoryError."""
        verify = link.describe()
        check_sharing(self._device, [verify])
        draft = self._expected_draft(verify)
        if draft is not None:
            verify = link.describe()  # what is free beside the draft is verify's word
        without = Workers(verify=verify, draft=None)
        sizes_without = EpochSizes.decide(self._config, without)
        if draft is not None:
            workers = replace(without, draft=draft, num_draft_tokens=self.drafts.target.num_draft_tokens)
            try:
                check_fits(self._device, verify, draft)
                sizes = EpochSizes.decide(self._config, workers)
                sizes.check_share(sizes_without)
                return workers, sizes
            except (MismatchError, ConfigError, OutOfMemoryError) as error:
                logger.warning("the memory is planned without the draft %s: %s", draft.model, error)
        return without, sizes_without

    def _expected_draft(self, verify: WorkerDescription) -> WorkerDescription | None:
        """The draft that memory and graphs are planned for. The first epoch waits for one that is loading."""
        draft = self.drafts.describe()
        if not self._is_starting or draft is not None or not self._is_draft_coming(verify):
            return draft
        address, begun = self.drafts.address, time.monotonic()
        logger.info("waiting for the draft at %s to load: memory and graphs are planned for both", address)
        while draft is None and self._is_draft_coming(verify) and not self._queue.is_stopped:
            self._queue.wait_for_stop(RETRY_S)
            draft = self.drafts.describe()
        if draft is None:
            waited_s = time.monotonic() - begun
            logger.warning(
                "the draft at %s is not there after %.0f s: steps go without it until it is", address, waited_s
            )
        return draft

    def _is_draft_coming(self, verify: WorkerDescription) -> bool:
        """Returns whether a draft that does not answer is still to be waited for."""
        now, address = time.monotonic(), self.drafts.address
        self._draft_loads_until = min(self._draft_loads_until, now + DRAFT_LOADS_S)
        if address and is_claimed(address):
            return now < self._draft_loads_until
        return bool(address) and verify.memory.total > 0 and now < self._draft_comes_until

    def _run_epoch(self, epoch: Epoch) -> None:
        loop = epoch.open()
        patience_s = DRAFT_LOADS_S if self._is_starting else FIRST_TRY_S
        self.drafts.enter(epoch, lambda: self._queue.is_stopped, patience_s)
        self.grammars.enter(epoch)
        self._is_starting = False
        epoch.speculation.settle()
        self._queue.open(epoch.number)
        self._listener.attached(epoch)
        loop.run()
        loop.finish()

    def _lose(self, epoch: Epoch, reason: str) -> None:
        # The same cause again and again is logged as an error once.
        cause = reason.partition(": ")[2]
        level = logging.DEBUG if cause == self._last_cause else logging.ERROR
        logger.log(level, "%s", reason, extra={"epoch": epoch.number, "step": epoch.batch.last_step})
        self._last_cause = cause
        self._queue.close()
        self._listener.detached(reason)
