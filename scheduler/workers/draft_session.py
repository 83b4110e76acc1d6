"""The thread that attaches a draft beside the running steps, again after each loss, and that swaps it for another.

No error of a draft ends the scheduler: it serves on without, and tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError, SlipstreamError, UnavailableError
from slipstream.common.host import name_this_thread
from slipstream.scheduler.records import LossCause
from slipstream.scheduler.telemetry.metrics import SwapResult
from slipstream.scheduler.workers.attachment import DraftAttachment, Retired, draft_sizes
from slipstream.scheduler.workers.held import DraftStatus, DraftTarget, Held, Retries, drafting, state_of
from slipstream.scheduler.workers.sharing import Admission
from slipstream.scheduler.workers.swap import Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.server import DraftSwap, SwapOutcome
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.telemetry.metrics import DraftMetrics
    from slipstream.scheduler.workers.epoch import Epoch
    from slipstream.scheduler.workers.link import Link

logger = logging.getLogger(__name__)

DESCRIBE_S = 1.0
"""An epoch is opened without the description of a draft that does not answer within this time."""
FIRST_TRY_S = 3.0
"""How long an epoch that is open waits for its draft; one that needs longer joins beside the steps."""
LOOK_S = 0.05
_VERIFY_LOST = "verify was lost meanwhile"


class DraftSession:
    """Implements `SpeculationListener`."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        *,
        make_link: Callable[[str], Link],
        next_number: Callable[[int], int],
        metrics: DraftMetrics,
        wake: Callable[[], None],
    ) -> None:
        """`make_link` makes a link to the draft at an address. `wake` has the step loop look around.

        `next_number` returns the number of a new attachment, above the draft's `last_epoch`.
        """
        self.last_known: WorkerDescription | None = None
        """The last draft that answered."""
        self._config = config
        self._device = device
        self._make_link = make_link
        self._next_number = next_number
        self._metrics = metrics
        self._wake = wake
        self._changed = threading.Condition()
        num_draft_tokens = config.swapped_draft_tokens or config.most_draft_tokens
        self._target = None if config.draft is None else DraftTarget(config.draft, num_draft_tokens)
        self._epoch: Epoch | None = None
        self._held: dict[int, Held] = {}
        self._retired = Retired()
        self._admission = Admission(device, self._retired)
        self._swap: tuple[DraftSwap, Future[SwapOutcome]] | None = None
        self._link_in_use: Link | None = None
        self._is_busy = self._is_stopped = self._has_tried = False
        self._is_asked = False
        """True while `describe` waits for an answer."""
        self._retries = Retries()
        self._last_problem = ""
        self.status = DraftStatus("", time.monotonic(), "")
        self._thread = threading.Thread(target=self._run, name="drafts")

    @property
    def target(self) -> DraftTarget:
        """The draft that is wanted; an empty address and no draft tokens for none."""
        return self._target or DraftTarget("", 0)

    @property
    def address(self) -> str:
        """The address of the draft that drafts, else of the one that is wanted; empty for none. Any thread."""
        with self._changed:
            held = drafting(self._held.values())
            return (self.target if held is None else held.target).address

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Ends the thread; the last epoch must be over."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._retired.close()

    def describe(self) -> WorkerDescription | None:
        """Asks the wanted draft for its description, before an epoch is opened; else it is the last known."""
        with self._changed:
            if self._target is not None:
                self._is_asked = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_asked, DESCRIBE_S)
            return self.last_known

    def enter(self, epoch: Epoch, is_stopped: Callable[[], bool], patience_s: float = FIRST_TRY_S) -> None:
        """Attaches drafts to an epoch that is open from now on. Returns when the first try is over, or `patience_s` is.

        It is not waited for if verify is lost, or once `is_stopped` returns True.
        """
        until = time.monotonic() + patience_s
        with self._changed:
            self._epoch, self._has_tried, self._retries = epoch, False, Retries()
            self._changed.notify_all()
            while self._target is not None and time.monotonic() < until and epoch.link.failure is None:
                if is_stopped() or self._changed.wait_for(lambda: self._has_tried, LOOK_S):
                    break
            else:
                if self._target is not None and epoch.link.failure is None:
                    logger.info("the draft is not attached after %.0f s: steps go without it until it is", patience_s)
            self._update_status()

    def leave(self) -> None:
        """Attaches no further draft to the epoch, and breaks off what is under way. Its loop has ended."""
        with self._changed:
            self._epoch = None
            link = self._link_in_use
            self._changed.notify_all()
        if link is not None:
            link.detach(drain=False)

    def detach_all(self, last_sent: int, *, drain: bool) -> None:
        """Ends all attachments after `leave`; verify has let them go. `last_sent`: the last step that was sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy)
            held, self._held = list(self._held.values()), {}
            self._update_status()
        for one in held:
            if not drain or not one.is_well:
                one.attachment.release_draft(last_sent)
            self._detach(one.attachment, None, drain=drain and one.is_well)

    def swap(self, request: DraftSwap) -> SwapOutcome:
        """Puts another draft in the place of the one that drafts, or takes it away; blocks until it is judged.

        Raises InvalidArgumentError, FailedPreconditionError (and its kinds) and UnavailableError.
        """
        most = self._config.most_draft_tokens
        if (request.terms.num_draft_tokens or 0) > most:
            accepted = f"1 to {most}, the scheduler's --num-draft-tokens"
            raise InvalidArgumentError("num_draft_tokens", request.terms.num_draft_tokens, accepted)
        with self._changed:
            if self._epoch is None or self._is_stopped:
                raise UnavailableError("there is no verify service")
            if self._swap is not None:
                raise FailedPreconditionError("another swap of the draft is under way")
            result: Future[SwapOutcome] = Future()
            self._swap = request, result
            self._changed.notify_all()
        return result.result()

    def joined(self, attachment: DraftAttachment, catch_up_s: float) -> None:
        with self._changed:
            held = self._held[attachment.number]
            held.joined_at = time.monotonic()
            self._retries.joined()
            if self._epoch is not None:
                held.position = self._epoch.decodes.position
            self._metrics.joined(catch_up_s)
            self._update_status()
        logger.info("draft %s takes part, after %.3f s of catching up", attachment.description.model, catch_up_s)

    def left(self, attachment: DraftAttachment, cause: LossCause, reason: str) -> None:
        with self._changed:
            held = self._held[attachment.number]
            held.cause, held.reason = cause, reason
            if held.has_joined:
                self._metrics.lost(cause, has_other=drafting(self._held.values()) is not None)
            self._retries.left(cause, held.joined_at)
            self._update_status(reason)
        if cause in (LossCause.DIED, LossCause.TIMEOUT, LossCause.REFUSED):
            logger.warning("steps go on without a draft: %s", reason)

    def let_go(self, attachment: DraftAttachment) -> None:
        with self._changed:
            self._held[attachment.number].is_let_go = True
            self._changed.notify_all()

    def _run(self) -> None:
        name_this_thread("drafts")
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work, self._until_try_s())
                if self._is_stopped and self._swap is None:
                    return
                epoch, swap, self._is_busy = self._epoch, self._swap, True
            try:
                self._work(epoch, swap)
            except Exception:
                logger.exception("the draft's session failed")
                self._fail_try("the draft's session failed")
            finally:
                # They would keep the memory of an epoch that is over until the next one is opened.
                del epoch, swap

    def _work(self, epoch: Epoch | None, swap: tuple[DraftSwap, Future[SwapOutcome]] | None) -> None:
        self.detach_let_go()
        if self._is_asked:
            self._ask()
        if epoch is not None and self._until_try_s() == 0 and (swap is None or not self._has_tried):
            self._try(epoch)  # which the epoch's first step waits for, and a swap for that
        elif swap is not None:
            self._answer(epoch, *swap)

    def _has_work(self) -> bool:
        has_request = self._is_stopped or self._is_asked or self._swap is not None
        return has_request or self._until_try_s() == 0 or bool(self._let_go())

    def _until_try_s(self) -> float | None:
        """Time until a draft is to be attached; None if none is."""
        if self._epoch is None or self._target is None or any(held.cause is None for held in self._held.values()):
            return None
        return max(0.0, self._retries.due - time.monotonic())

    def _ask(self) -> None:
        link = self._make_link(self.target.address)
        try:
            with self._breakable(link):
                self.last_known = link.describe()
        except SlipstreamError as error:
            logger.debug("no draft yet: %s", error)
        finally:
            link.detach(drain=False)
            with self._changed:
                self._is_asked = False
                self._changed.notify_all()

    def _try(self, epoch: Epoch) -> None:
        target = self._target
        assert target is not None, "a draft is wanted"
        try:
            self.attach(epoch, target)
        except SlipstreamError as error:
            self._fail_try(str(error))
        else:
            with self._changed:
                self._has_tried, self._last_problem = True, ""
                self._changed.notify_all()

    def _fail_try(self, problem: str) -> None:
        with self._changed:
            self._has_tried = True
            self._retries.failed()
            is_new = problem != self._last_problem and self._epoch is not None
            self._last_problem = problem
            self._update_status(problem)
        logger.log(logging.WARNING if is_new else logging.DEBUG, "serving without a draft: %s", problem)

    def attach(self, epoch: Epoch, target: DraftTarget) -> Held:
        link = self._make_link(target.address)
        try:
            with self._breakable(link, epoch):
                attachment = self._attached(epoch, target, link)
        except BaseException:
            link.detach(drain=False)
            raise
        held = Held(attachment, target)
        with self._changed:
            self._held[attachment.number] = held
            if self._epoch is not epoch:
                raise UnavailableError(_VERIFY_LOST)
            epoch.speculation.offer(attachment)
            self._update_status()
        self._wake()
        return held

    def _attached(self, epoch: Epoch, target: DraftTarget, link: Link) -> DraftAttachment:
        description = link.describe()
        self._admission.check(epoch, description, target)
        number = self._next_number(description.last_epoch)
        sizes = draft_sizes(description, target.num_draft_tokens)
        shape = sizes.shape(epoch.attachment.shape, epoch.verify.torch_dtype)
        attachment = DraftAttachment(number, link, description, shape, self._device, epoch=epoch.number, log=epoch.log)
        try:
            attachment.attach(epoch.attachment, epoch.link, epoch.verify)
        except BaseException as error:
            self._admission.refuse(epoch, description, target, error)
            self._detach(attachment, epoch.link, drain=False)
            raise
        self._retired.supersede(attachment)
        self.last_known = description
        return attachment

    def detach_let_go(self) -> None:
        """Ends the attachments that no step refers to any more."""
        with self._changed:
            gone, epoch = self._let_go(), self._epoch
            for held in gone:
                del self._held[held.attachment.number]
        for held in gone:
            try:
                self._detach(held.attachment, None if epoch is None else epoch.link, drain=held.is_well)
            finally:
                held.is_detached = True
        self._retired.free()

    def _let_go(self) -> list[Held]:
        return [held for held in self._held.values() if held.is_let_go]

    def _detach(self, attachment: DraftAttachment, verify: Link | None, *, drain: bool) -> None:
        with self._breakable(attachment.link):
            attachment.detach(verify, drain=drain)
        self._retired.add(attachment)

    @contextmanager
    def _breakable(self, link: Link, epoch: Epoch | None = None) -> Iterator[None]:
        """`leave` ends a call of the link meanwhile. Raises UnavailableError if it came before, for an epoch's link."""
        with self._changed:
            if epoch is not None and self._epoch is not epoch:
                raise UnavailableError(_VERIFY_LOST)
            self._link_in_use = link
        try:
            yield
        finally:
            self._link_in_use = None

    def _answer(self, epoch: Epoch | None, request: DraftSwap, result: Future[SwapOutcome]) -> None:
        before = self._target
        try:
            if epoch is None:
                raise UnavailableError("there is no verify service")
            target = DraftTarget(request.address, request.terms.num_draft_tokens or self._config.most_draft_tokens)
            swap = Swap(self, epoch, request, drafting(self._held.values()))
            outcome = swap.run(before, target if request.address else None)
        except Exception as error:
            with self._changed:
                self._target, self._swap = before, None
            self._metrics.swapped(SwapResult.FAILED)
            result.set_exception(error.with_traceback(None))
        else:
            with self._changed:
                self._swap = None
            self._metrics.swapped(SwapResult.ROLLED_BACK if outcome.rolled_back else SwapResult.SWAPPED)
            result.set_result(outcome)

    def take_away(self, epoch: Epoch, *, but: Held | None = None) -> None:
        with self._changed:
            leaving = [held for held in self._held.values() if held is not but]
        for held in leaving:
            epoch.speculation.withdraw(held.attachment, LossCause.LEFT)
        self._wake()
        self.wait_for(epoch, lambda: all(held.is_detached for held in leaving))

    def want(self, target: DraftTarget | None) -> None:
        with self._changed:
            if target != self._target:
                self._target, self._retries = target, Retries()
            self._update_status()

    def wait_for(self, epoch: Epoch, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Drafts.wait_for`. Called on the session's own thread."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                left = None if until is None else until - time.monotonic()
                self._changed.wait_for(lambda: is_so() or self._epoch is not epoch or bool(self._let_go()), left)
                if self._epoch is not epoch:
                    raise UnavailableError("verify was lost meanwhile")
            self.detach_let_go()
            if is_so():
                return True
            if until is not None and time.monotonic() >= until:
                return False

    def _update_status(self, problem: str | None = None) -> None:
        """Called under the lock, after each change."""
        self._changed.notify_all()
        is_expected = self._target is not None
        state = state_of(self._held.values(), is_expected=is_expected)
        self._metrics.set_missing(is_missing=is_expected and self._epoch is not None and state != "attached")
        since = self.status.since if state == self.status.state else time.monotonic()
        told = self.status.problem if problem is None else problem
        self.status = DraftStatus(state, since, told if state == "missing" else "")
