"""The thread that attaches a draft beside the running steps, again after each loss, and that swaps it for another.

No error of a draft ends the scheduler: it serves on without, and tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    MismatchError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.host import name_this_thread
from slipstream.scheduler.attachment import DraftAttachment, Retired, check_fits
from slipstream.scheduler.draft import Draft, DraftState
from slipstream.scheduler.metrics import SwapResult
from slipstream.scheduler.records import DraftTarget, LossCause
from slipstream.scheduler.sizes import check_draft_memory
from slipstream.scheduler.swap import Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.server import DraftSwap, SwapOutcome
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.epoch import Epoch
    from slipstream.scheduler.link import Link
    from slipstream.scheduler.metrics import DraftMetrics

logger = logging.getLogger(__name__)

DESCRIBE_S = 1.0
"""An epoch is opened without the description of a draft that does not answer within this time."""
FIRST_TRY_S = 3.0
"""How long an epoch that is open waits for its draft; one that needs longer joins beside the steps."""
LOOK_S = 0.05
_VERIFY_LOST = "verify was lost meanwhile"
FIRST_S, LONGEST_S = 0.2, 5.0
"""Between two tries to attach a draft: the time doubles while they fail."""
LONGEST_AFTER_TIMEOUT_S = 60.0
"""The same for a draft that is slower than the watchdog again and again: each try costs the steps that wait for it."""
STEADY_S = 10.0
"""A draft that was lost after it took part for so long is tried again at once; sooner than that the time doubles."""


class DraftStatus(NamedTuple):
    """What drafts now, for people."""

    state: str
    """ "attached", "catching up" or "missing"; empty where no draft is expected."""
    since: float
    """On time.monotonic's clock."""
    problem: str
    """While it is missing: why the last one left or was refused."""


class Retries:
    """The time of the next try. Belongs to the session's lock."""

    def __init__(self) -> None:
        self.due = 0.0
        """On time.monotonic's clock."""
        self._after_failure_s = self._after_loss_s = FIRST_S

    def failed(self) -> None:
        """A try has failed."""
        self.due = time.monotonic() + self._after_failure_s
        self._after_failure_s = min(2 * self._after_failure_s, LONGEST_S)

    def joined(self) -> None:
        """A draft takes part: tries succeed again."""
        self._after_failure_s = FIRST_S

    def left(self, cause: LossCause, joined_at: float) -> None:
        """A draft takes part no more. `joined_at`: since when it did, infinity if it never did."""
        now = time.monotonic()
        if cause in (LossCause.SWAPPED, LossCause.LEFT):
            self.due = now + FIRST_S
            return
        if now - joined_at >= STEADY_S:
            self._after_loss_s = FIRST_S
        longest = LONGEST_AFTER_TIMEOUT_S if cause is LossCause.TIMEOUT else LONGEST_S
        self.due = now + min(self._after_loss_s, longest)
        self._after_loss_s = min(2 * self._after_loss_s, longest)


MOST_OF_A_DRAFT = {"last_epoch": 2**62 - 1, "tokens_ahead": 64}
"""Numbers of a draft's description that others depend on. Those of epochs must fit the 64 bits of messages and fences;
the pages of a prompt's last `tokens_ahead` tokens are not shared while the draft takes part."""


class Admission:
    """Checks a draft before anything is attached. Belongs to the thread of the draft's session."""

    def __init__(self, device: Device, retired: Retired) -> None:
        self._device = device
        self._retired = retired
        self._misfit: tuple[object, list[str]] | None = None
        """A draft that was found not to fit, as `_key` tells it from others, and what differs."""

    def check(self, epoch: Epoch, draft: WorkerDescription, target: DraftTarget) -> None:
        """Raises FailedPreconditionError (and its kinds) if the draft cannot be attached to the epoch."""
        if self._misfit is not None and self._misfit[0] == self._key(epoch, draft, target):
            raise MismatchError(self._misfit[1])
        if draft.has_scheduler:
            raise FailedPreconditionError("the draft service has another scheduler")
        for name, most in MOST_OF_A_DRAFT.items():
            if (value := getattr(draft, name)) > most:
                raise FailedPreconditionError(f"{name} of the draft service: got {value}, accepted: at most {most}")
        self._retired.check(draft.pid)
        try:
            check_fits(self._device, epoch.verify, draft)
            epoch.sizes_of(draft, target.num_draft_tokens)
        except MismatchError as error:
            self.refuse(epoch, draft, target, error)
            raise
        check_draft_memory(draft, epoch.sizes)

    def refuse(self, epoch: Epoch, draft: WorkerDescription, target: DraftTarget, error: object) -> None:
        """Has `check` refuse the same process for this epoch and number of draft tokens, if `error` is a mismatch."""
        if isinstance(error, MismatchError):
            self._misfit = self._key(epoch, draft, target), list(error.differences)

    @staticmethod
    def _key(epoch: Epoch, draft: WorkerDescription, target: DraftTarget) -> object:
        return target, draft.pid, epoch.number


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
        self._target = None if config.draft is None else DraftTarget(config.draft, config.swapped_draft_tokens)
        self._epoch: Epoch | None = None
        self._drafts: tuple[Draft, ...] = ()
        """Those that are not detached."""
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
            joined = self._joined
            return self.target.address if joined is None else joined.address

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
            drafts, self._drafts = self._drafts, ()
            self._update_status()
        for draft in drafts:
            drains = drain and not draft.is_lost
            if not drains:
                draft.attachment.release_draft(last_sent)
            self._detach(draft.attachment, None, drain=drains)

    def swap(self, request: DraftSwap) -> SwapOutcome:
        """Puts another draft in the place of the one that drafts, or takes it away; blocks until it is judged.

        Raises InvalidArgumentError, FailedPreconditionError (and its kinds) and UnavailableError.
        """
        with self._changed:
            if self._epoch is None or self._is_stopped:
                raise UnavailableError("there is no verify service")
            most = self._epoch.sizes.batch.num_draft_tokens
            if (request.terms.num_draft_tokens or 0) > most:
                accepted = f"1 to {most}, the scheduler's --num-draft-tokens"
                raise InvalidArgumentError("num_draft_tokens", request.terms.num_draft_tokens, accepted)
            if self._swap is not None:
                raise FailedPreconditionError("another swap of the draft is under way")
            result: Future[SwapOutcome] = Future()
            self._swap = request, result
            self._changed.notify_all()
        return result.result()

    def joined(self, draft: Draft, catch_up_s: float) -> None:
        self._measure()
        with self._changed:
            self._retries.joined()
            self._metrics.joined(catch_up_s)
            self._update_status()
        model, most = draft.attachment.description.model, draft.num_draft_tokens
        logger.info("draft %s takes part, K = %d, after %.3f s of catching up", model, most, catch_up_s)

    def left(self, draft: Draft, cause: LossCause, reason: str) -> None:
        self._measure()
        with self._changed:
            draft.cause, draft.reason = cause, reason
            if draft.has_joined:
                self._metrics.lost(cause, has_other=self._joined is not None)
            self._retries.left(cause, draft.joined_at)
            self._update_status(reason)
        if cause in (LossCause.DIED, LossCause.TIMEOUT, LossCause.REFUSED):
            logger.warning("steps go on without a draft: %s", reason)

    def gone(self, draft: Draft) -> None:
        with self._changed:
            self._changed.notify_all()

    def _measure(self) -> None:
        if (epoch := self._epoch) is not None:
            epoch.measure()

    @property
    def _joined(self) -> Draft | None:
        """The draft that drafts, or rests."""
        return next((draft for draft in self._drafts if draft.has_joined and draft.cause is None), None)

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
        self.detach_gone()
        if self._is_asked:
            self._ask()
        if epoch is not None and self._until_try_s() == 0 and (swap is None or not self._has_tried):
            self._try(epoch)  # which the epoch's first step waits for, and a swap for that
        elif swap is not None:
            self._answer(epoch, *swap)

    def _has_work(self) -> bool:
        has_request = self._is_stopped or self._is_asked or self._swap is not None
        return has_request or self._until_try_s() == 0 or bool(self._gone())

    def _until_try_s(self) -> float | None:
        """Time until a draft is to be attached; None if none is."""
        if self._epoch is None or self._target is None or any(draft.cause is None for draft in self._drafts):
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

    def attach(self, epoch: Epoch, target: DraftTarget) -> Draft:
        link = self._make_link(target.address)
        try:
            with self._breakable(link, epoch):
                attachment = self._attached(epoch, target, link)
        except BaseException:
            link.detach(drain=False)
            raise
        draft = Draft(attachment, target.address)
        with self._changed:
            self._drafts = (*self._drafts, draft)
            if self._epoch is not epoch:
                raise UnavailableError(_VERIFY_LOST)
            epoch.speculation.offer(draft)
            self._update_status()
        self._wake()
        return draft

    def _attached(self, epoch: Epoch, target: DraftTarget, link: Link) -> DraftAttachment:
        description = link.describe()
        self._admission.check(epoch, description, target)
        number = self._next_number(description.last_epoch)
        sizes = epoch.sizes_of(description, target.num_draft_tokens)
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

    def detach_gone(self) -> None:
        """Ends the attachments that no step refers to any more."""
        with self._changed:
            gone, epoch = self._gone(), self._epoch
            self._drafts = tuple(draft for draft in self._drafts if draft not in gone)
        for draft in gone:
            try:
                self._detach(draft.attachment, None if epoch is None else epoch.link, drain=not draft.is_lost)
            finally:
                draft.enter(DraftState.DETACHED)
        self._retired.free()

    def _gone(self) -> list[Draft]:
        return [draft for draft in self._drafts if draft.state is DraftState.LEFT]

    def _detach(self, attachment: DraftAttachment, verify: Link | None, *, drain: bool) -> None:
        with self._breakable(attachment.link):
            attachment.detach(verify, drain=drain)
        self._retired.add(attachment)

    @contextmanager
    def _breakable(self, link: Link, epoch: Epoch | None = None) -> Iterator[None]:
        """`leave` ends a call of the link meanwhile. Raises UnavailableError after `leave`, for an epoch's link."""
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
            target = DraftTarget(request.address, request.terms.num_draft_tokens)
            swap = Swap(self, epoch, request, self._joined)
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

    def take_away(self, epoch: Epoch, *, but: Draft | None = None) -> None:
        with self._changed:
            leaving = [draft for draft in self._drafts if draft is not but]
        for draft in leaving:
            epoch.speculation.withdraw(draft, LossCause.LEFT)
        self._wake()
        self.wait_for(epoch, lambda: all(draft.state is DraftState.DETACHED for draft in leaving))

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
                self._changed.wait_for(lambda: is_so() or self._epoch is not epoch or bool(self._gone()), left)
                if self._epoch is not epoch:
                    raise UnavailableError(_VERIFY_LOST)
            self.detach_gone()
            if is_so():
                return True
            if until is not None and time.monotonic() >= until:
                return False

    def _update_status(self, problem: str | None = None) -> None:
        """Called under the lock, after each change."""
        self._changed.notify_all()
        is_expected = self._target is not None
        is_attaching = any(draft.cause is None for draft in self._drafts)
        absent = "missing" if is_expected else ""
        state = "attached" if self._joined is not None else "catching up" if is_attaching else absent
        self._metrics.set_missing(is_missing=is_expected and self._epoch is not None and state != "attached")
        since = self.status.since if state == self.status.state else time.monotonic()
        told = self.status.problem if problem is None else problem
        self.status = DraftStatus(state, since, told if state == "missing" else "")
