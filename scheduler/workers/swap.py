"""A swap of the draft under load: the new one joins beside the old one, is judged, and may have to give way again."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from slipstream.common.api.draft_swap import DraftFigures, SwapOutcome
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.scheduler.telemetry.decode_record import KEPT_STEPS, figures

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.api.draft_swap import DraftSwap
    from slipstream.scheduler.telemetry.decode_record import DecodedStep
    from slipstream.scheduler.workers.epoch import Epoch
    from slipstream.scheduler.workers.held import DraftTarget, Held

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""A comparison ends when no step was counted for so long."""
LOOK_S = 0.02
REJOIN_S = 30.0
"""The answer waits so long for the draft before to draft again."""


class Drafts(Protocol):
    """The means of a swap; `DraftSession` has them."""

    def attach(self, epoch: Epoch, target: DraftTarget) -> Held:
        """Attaches a draft to verify and has it join. Raises FailedPreconditionError (and its kinds) and others."""
        ...

    def want(self, target: DraftTarget | None) -> None:
        """Changes the draft that is wanted."""
        ...

    def wait_for(self, epoch: Epoch, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until something holds that the loop decides; False if the time is over.

        Raises UnavailableError if the epoch is over first.
        """
        ...

    def take_away(self, epoch: Epoch, *, but: Held | None = None) -> None:
        """Has all drafts leave but one, those that catch up too, and waits until they are detached.

        Raises UnavailableError if the epoch is over first.
        """
        ...


class Swap:
    """One swap. Runs on the thread of the draft's session."""

    def __init__(
        self,
        session: Drafts,
        epoch: Epoch,
        request: DraftSwap,
        before: Held | None,
    ) -> None:
        """`before`: the attachment that drafts now."""
        self._session = session
        self._epoch = epoch
        self._request = request
        self._before = before

    def run(self, wanted: DraftTarget | None, target: DraftTarget | None) -> SwapOutcome:
        """Puts `target` in the place of `wanted`, the draft that was wanted until now. None is no draft.

        Raises UnavailableError, FailedPreconditionError (and its kinds).
        """
        record = self._epoch.decodes
        record.restart_longest_gap()
        before = self._figures_before()
        if target is None:
            after = self._take_away()
            return SwapOutcome(before=before, after=after, longest_pause_ms=record.longest_gap_ms)
        held = self._session.attach(self._epoch, target)
        self._session.want(target)
        self._session.wait_for(self._epoch, lambda: held.has_joined or held.cause is not None)
        after = self._judge(held)
        if held.cause is not None:
            raise UnavailableError(f"the new draft was lost: {held.reason}")
        reason = self._reason_against(before, after)
        if reason and wanted is not None:
            reason += self._roll_back(wanted)
        return SwapOutcome(
            before=before,
            after=after,
            rolled_back=bool(reason),
            reason=reason,
            longest_pause_ms=record.longest_gap_ms,
        )

    def _figures_before(self) -> DraftFigures:
        before, record, num_steps = self._before, self._epoch.decodes, self._request.terms.judge_steps
        if before is None:
            return figures("none", 0, record.last(0, num_steps))
        return _figures_of(before, record.last(before.attachment.number, num_steps))

    def _take_away(self) -> DraftFigures:
        self._session.want(None)
        since = self._epoch.decodes.position
        self._session.take_away(self._epoch)
        return figures("none", 0, self._compared(0, since, None))

    def _judge(self, held: Held) -> DraftFigures:
        return _figures_of(held, self._compared(held.attachment.number, held.position, held))

    def _compared(self, number: int, since: int, held: Held | None) -> list[DecodedStep]:
        """The first steps of a draft, as many as the comparison wants, or as come."""
        record, wanted = self._epoch.decodes, min(self._request.terms.judge_steps, KEPT_STEPS)
        steps: list[DecodedStep] = []
        moved_at = time.monotonic()
        while len(steps) < wanted and time.monotonic() - moved_at < IDLE_S:
            is_lost = held is not None and self._session.wait_for(self._epoch, lambda: held.cause is not None, LOOK_S)
            if is_lost:
                break
            if held is None:
                self._session.wait_for(self._epoch, lambda: False, LOOK_S)
            found = record.first(number, wanted, since=since)
            if len(found) > len(steps):
                steps, moved_at = found, time.monotonic()
        return steps

    def _reason_against(self, before: DraftFigures, after: DraftFigures) -> str:
        """Why the draft before is better; empty if it is not, or if that cannot be said."""
        terms = self._request.terms
        if self._before is None or not before.num_steps or after.num_steps < min(terms.judge_steps, KEPT_STEPS):
            return ""
        if after.accept_length - 1 >= terms.rollback_below * (before.accept_length - 1):
            return ""
        lengths = f"accept length {after.accept_length:.2f} after {before.accept_length:.2f}"
        return f"{lengths}: fewer than {terms.rollback_below:g} times the accepted tokens"

    def _roll_back(self, wanted: DraftTarget) -> str:
        """Has the draft before join again; returns what to add to the reason.

        If it cannot, the new one leaves all the same, and the session goes on to try.
        """
        logger.warning("the new draft is worse: the one before comes back")
        self._session.want(wanted)
        back, problem = None, ""
        try:
            back = self._session.attach(self._epoch, wanted)
            self._session.wait_for(self._epoch, lambda: back.has_joined or back.cause is not None, REJOIN_S)
        except SlipstreamError as error:
            problem = str(error)
        if back is not None and back.cause is None and back.has_joined:
            return ""
        self._session.take_away(self._epoch, but=back)
        problem = problem or (back and back.reason) or "it still catches up"
        return f"; the new one was taken away, and the one before did not come back yet: {problem}"


def _figures_of(held: Held, steps: list[DecodedStep]) -> DraftFigures:
    return figures(held.attachment.description.algorithm, held.target.num_draft_tokens, steps)
