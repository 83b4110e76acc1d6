"""A swap of the draft under load: the new one joins beside the old one, is judged, and may have to give way again."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.wire.server import DraftFigures, SwapOutcome
from slipstream.scheduler.observer import KEPT_STEPS, accepted_of_first, figures

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.wire.server import DraftSwap
    from slipstream.scheduler.draft import Draft
    from slipstream.scheduler.epoch import Epoch
    from slipstream.scheduler.observer import DecodedStep
    from slipstream.scheduler.records import DraftTarget

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""A comparison ends when no step was counted for so long."""
LOOK_S = 0.02
REJOIN_S = 30.0
"""The answer waits so long for the draft before to draft again."""


class Drafts(Protocol):
    """The means of a swap; `DraftSession` has them."""

    def attach(self, epoch: Epoch, target: DraftTarget) -> Draft:
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

    def take_away(self, epoch: Epoch, *, but: Draft | None = None) -> None:
        """Has all drafts leave but one, those that catch up too, and waits until they are detached.

        Raises UnavailableError if the epoch is over first.
        """
        ...


@dataclass(frozen=True, slots=True)
class Swap:
    """One swap. Runs on the thread of the draft's session."""

    session: Drafts
    epoch: Epoch
    request: DraftSwap
    before: Draft | None
    """The attachment that drafts now."""

    def run(self, wanted: DraftTarget | None, target: DraftTarget | None) -> SwapOutcome:
        """Puts `target` in the place of `wanted`, the draft that was wanted until now. None: no draft.

        Raises UnavailableError, FailedPreconditionError (and its kinds).
        """
        record, num_steps = self.epoch.decodes, self.request.terms.judge_steps
        record.restart_longest_gap()
        old = self.before
        steps_before = record.last(0 if old is None else old.number, num_steps)
        before = _figures_of(old, steps_before)
        if target is None:
            after = _figures_of(None, self._take_away())
            return SwapOutcome(before=before, after=after, longest_pause_ms=record.longest_gap_ms)
        choice = self.epoch.choice
        # The new draft drafts until it is judged.
        with nullcontext() if choice is None else choice.held():
            new = self.session.attach(self.epoch, target)
            self.session.want(target)
            self.session.wait_for(self.epoch, lambda: new.has_joined or new.cause is not None)
            steps = self._compared(new.number, 0, new)
        if new.cause is not None:
            raise UnavailableError(f"the new draft was lost: {new.reason}")
        reason = "" if old is None else self._reason_against(old, steps_before, new, steps)
        if reason and wanted is not None:
            reason += self._roll_back(wanted)
        return SwapOutcome(
            before=before,
            after=_figures_of(new, steps),
            rolled_back=bool(reason),
            reason=reason,
            longest_pause_ms=record.longest_gap_ms,
        )

    def _take_away(self) -> list[DecodedStep]:
        self.session.want(None)
        since = self.epoch.decodes.position
        self.session.take_away(self.epoch)
        return self._compared(0, since, None)

    def _compared(self, number: int, since: int, draft: Draft | None) -> list[DecodedStep]:
        """The first steps of a draft, as many as the comparison wants, or as there are."""
        record, wanted = self.epoch.decodes, min(self.request.terms.judge_steps, KEPT_STEPS)
        steps: list[DecodedStep] = []
        moved_at, num_seen = time.monotonic(), 0
        while len(steps) < wanted and time.monotonic() - moved_at < IDLE_S:
            if self.session.wait_for(self.epoch, lambda: draft is not None and draft.cause is not None, LOOK_S):
                break
            steps = record.first(number, wanted, since=since)
            # Steps that draft none say nothing of the draft, but it guesses again after them.
            if len(steps) + record.num_drafting_none > num_seen:
                moved_at, num_seen = time.monotonic(), len(steps) + record.num_drafting_none
        return steps

    def _reason_against(
        self, before: Draft, steps_before: list[DecodedStep], after: Draft, steps: list[DecodedStep]
    ) -> str:
        """Why the draft before is better; empty if it is not, or if that cannot be said.

        Only draft tokens that both have in most steps count: a draft is not worse for drafting fewer, nor better for
        drafting more.
        """
        terms = self.request.terms
        if not steps_before or len(steps) < min(terms.judge_steps, KEPT_STEPS):
            return ""
        common = min(before.num_draft_tokens, after.num_draft_tokens)
        common = min(common, _usually_drafted(steps_before), _usually_drafted(steps))
        was, now = accepted_of_first(common, steps_before), accepted_of_first(common, steps)
        if now >= terms.rollback_below * was:
            return ""
        tokens = "draft token" if common == 1 else f"{common} draft tokens"
        found = f"of the first {tokens} of a step {now:.2f} are accepted, {was:.2f} were"
        return f"{found}: fewer than {terms.rollback_below:g} times as many"

    def _roll_back(self, wanted: DraftTarget) -> str:
        """Has the draft before join again; returns what to add to the reason.

        If it cannot, the new one leaves all the same, and the session goes on to try.
        """
        logger.warning("the new draft is worse: the draft before takes its place again")
        self.session.want(wanted)
        back, problem = None, ""
        try:
            back = self.session.attach(self.epoch, wanted)
            self.session.wait_for(self.epoch, lambda: back.has_joined or back.cause is not None, REJOIN_S)
        except SlipstreamError as error:
            problem = str(error)
        if back is not None and back.cause is None and back.has_joined:
            return ""
        self.session.take_away(self.epoch, but=back)
        problem = problem or (back and back.reason) or "it still catches up"
        return f"; the new draft was taken away, and the draft before is not back yet: {problem}"


def _usually_drafted(steps: list[DecodedStep]) -> int:
    """The draft tokens that at least half of the steps have for some sequence."""
    return int(np.median([step.num_drafted.max(initial=0) for step in steps]))


def _figures_of(draft: Draft | None, steps: list[DecodedStep]) -> DraftFigures:
    if draft is None:
        return figures("none", 0, steps)
    return figures(draft.attachment.description.algorithm, draft.num_draft_tokens, steps)
