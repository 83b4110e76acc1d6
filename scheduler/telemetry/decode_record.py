"""How drafting did in the last steps, for the comparison of two drafts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.api.draft_swap import DraftFigures
from slipstream.common.worker.step import StepKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.scheduler.core.accounts import TakenIn
    from slipstream.scheduler.core.results import Step
    from slipstream.scheduler.workers.attachment import DraftAttachment

KEPT_STEPS = 4096


class DecodedStep(NamedTuple):
    """The outcome of a decode step."""

    attachment: int
    """Number of the draft's attachment that drafted; 0 if none did."""
    gap_ns: int
    """Since the step before."""
    num_rows: int
    """Sequences that a draft was checked for; of a plain step, all."""
    num_accepted: int
    num_tokens: int


class DecodeRecord:
    """The last decode steps. The loop's thread adds, any other reads."""

    def __init__(self) -> None:
        self._steps: deque[DecodedStep] = deque(maxlen=KEPT_STEPS)
        self._num_added = 0
        self._landed_ns: int | None = None
        self._longest_gap_ns = 0

    def add(self, step: Step, taken_in: TakenIn, attachment: DraftAttachment | None, landed_ns: int) -> None:
        """Adds the outcome of a step; of a prefill only its time counts."""
        before, self._landed_ns = self._landed_ns, landed_ns
        gap_ns = 0 if before is None else landed_ns - before
        self._longest_gap_ns = max(self._longest_gap_ns, gap_ns)
        if step.kind is StepKind.PREFILL or not len(taken_in.rows) or not gap_ns:
            return
        is_drafted = step.kind is StepKind.DECODE and attachment is not None
        rows = taken_in.is_speculating if is_drafted else slice(None)
        accepted = taken_in.num_accepted[rows]
        number = attachment.number if is_drafted and attachment is not None else 0
        outcome = DecodedStep(number, gap_ns, len(accepted), int(accepted.sum()), int(taken_in.num_tokens.sum()))
        self._steps.append(outcome)
        self._num_added += 1

    def idle(self) -> None:
        """Nothing runs: the time until the next step counts as no pause."""
        self._landed_ns = None

    @property
    def position(self) -> int:
        """Steps that were added so far."""
        return self._num_added

    def last(self, attachment: int, num_steps: int, *, since: int = 0) -> list[DecodedStep]:
        """The last steps of a draft, or plain ones for 0; `since`: the position from which on they count."""
        steps = self._added_since(since)
        return [step for step in steps if step.attachment == attachment][-num_steps:] if num_steps else []

    def first(self, attachment: int, num_steps: int, *, since: int) -> list[DecodedStep]:
        """The first steps of a draft, or plain ones for 0, from this position on."""
        return [step for step in self._added_since(since) if step.attachment == attachment][:num_steps]

    def restart_longest_gap(self) -> None:
        """Forgets the longest time between two steps."""
        self._longest_gap_ns = 0

    @property
    def longest_gap_ms(self) -> float:
        """Longest time between two steps since the restart."""
        return self._longest_gap_ns / 1e6

    def _added_since(self, position: int) -> list[DecodedStep]:
        steps = list(self._steps)
        return steps[max(0, len(steps) - (self._num_added - position)) :] if position else steps


def figures(algorithm: str, num_draft_tokens: int, steps: Iterable[DecodedStep]) -> DraftFigures:
    """The means over some steps."""
    counted = list(steps)
    num_rows, wall_ns = sum(step.num_rows for step in counted), sum(step.gap_ns for step in counted)
    if not counted:
        return DraftFigures(algorithm=algorithm, num_draft_tokens=num_draft_tokens)
    return DraftFigures(
        algorithm=algorithm,
        num_draft_tokens=num_draft_tokens,
        num_steps=len(counted),
        accept_length=1 + sum(step.num_accepted for step in counted) / max(1, num_rows),
        tokens_per_second=sum(step.num_tokens for step in counted) / wall_ns * 1e9,
        step_ms=wall_ns / len(counted) / 1e6,
    )
