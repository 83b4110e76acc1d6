"""The time of a step and its parts.

For consecutive steps while requests run (all on one clock):

    wall(n)              = verify.end(n) - verify.end(n-1)
    bubble verify->draft = draft.start(n)  - verify.end(n-1)
    bubble draft->verify = verify.start(n) - draft.end(n)

A bubble is time in which neither worker worked: measured from the end of the work before it, so that a command
that was sent too late counts. In a step without a draft on its path the gap is between verify and itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.worker.step import StepKind

if TYPE_CHECKING:
    from slipstream.scheduler.core.results import Interval

VERIFY_TO_DRAFT = "verify_to_draft"
DRAFT_TO_VERIFY = "draft_to_verify"
VERIFY_TO_VERIFY = "verify_to_verify"
EDGES = (VERIFY_TO_DRAFT, DRAFT_TO_VERIFY, VERIFY_TO_VERIFY)


class StepTiming(NamedTuple):
    """The time of one step, in nanoseconds."""

    kind: StepKind
    draft_ns: int
    verify_ns: int
    bubbles_ns: dict[str, int]
    """By edge."""
    wall_ns: int | None = None
    """None for the first step after an idle time."""


def time_step(kind: StepKind, before: Interval | None, verify: Interval, draft: Interval | None) -> StepTiming:
    """`before`: when verify ended the step before, and when the last of both workers did; None after an idle time."""
    # The workers may stamp anything: no time is negative, and bubbles are no longer than their step.
    bubbles: dict[str, int] = {}
    wall_ns: int | None = None
    if before is not None:
        verify_end, all_end = before
        wall_ns = max(0, verify[1] - verify_end)
        if draft is not None and kind is StepKind.DECODE:
            bubbles[VERIFY_TO_DRAFT] = min(max(0, draft[0] - all_end), wall_ns)
            bubbles[DRAFT_TO_VERIFY] = min(max(0, verify[0] - draft[1]), wall_ns - bubbles[VERIFY_TO_DRAFT])
        else:
            bubbles[VERIFY_TO_VERIFY] = min(max(0, verify[0] - all_end), wall_ns)
    return StepTiming(
        kind=kind,
        draft_ns=0 if draft is None else max(0, draft[1] - draft[0]),
        verify_ns=max(0, verify[1] - verify[0]),
        wall_ns=wall_ns,
        bubbles_ns=bubbles,
    )
