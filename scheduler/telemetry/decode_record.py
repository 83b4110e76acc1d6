"""How drafting did in the last steps, for the comparison of two drafts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.common.wire.server import DraftFigures

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from slipstream.scheduler.records import SentStep

KEPT_STEPS = 4096


class DecodedStep(NamedTuple):
    """The outcome of a step that decodes, for the sequences that it decodes."""

    attachment: int
    """Number of the draft's attachment that drafted; 0 if none did."""
    gap_ns: int
    """Since the step before."""
    num_sequences: int
    num_accepted: NDArray[np.uint32]
    """[num_sequences] draft tokens."""
    is_speculating: NDArray[np.bool_]
    """[num_sequences] True where they were drafted for the sequence."""
    num_new: NDArray[np.int32]
    """[num_sequences] tokens."""
    has_prompts: bool = False
    """True if it took in prompts, or the step before it did, which may do so behind its tokens: its time is theirs."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        # Cheaper than a sum of NumPy's, whose code comes from memory in each step.
        return sum(self.num_new.tolist())


class DecodeRecord:
    """The last decode steps. The loop's thread adds, any other reads."""

    def __init__(self) -> None:
        self._plain: deque[tuple[int, DecodedStep]] = deque(maxlen=KEPT_STEPS)
        self._drafted: deque[tuple[int, DecodedStep]] = deque(maxlen=KEPT_STEPS)
        """Each with its position. They are kept while a draft rests."""
        self._num_added = 0
        self.num_drafting_none = 0
        """Steps that drafted none, though there is a draft. They are not kept."""
        self._arrived_ns: int | None = None
        self._longest_gap_ns = 0
        self._had_chunks = False
        """True if the last step took in prompts."""

    def add(self, sent: SentStep) -> DecodedStep | None:
        """Adds the outcome of a step and returns it; of a prefill only its time counts, and there is none."""
        step, outcome = sent.step, sent.outcome
        before, self._arrived_ns = self._arrived_ns, sent.arrived_ns
        gap_ns = 0 if before is None else sent.arrived_ns - before
        self._longest_gap_ns = max(self._longest_gap_ns, gap_ns)
        has_prompts, self._had_chunks = bool(step.chunks) or self._had_chunks, bool(step.chunks)
        num_sequences = len(outcome.rows)
        if step.chunks:
            # After them come the prompts that end, with their first tokens.
            num_sequences = int(np.isin(outcome.rows, step.decoded.rows).sum())
        if not num_sequences or not gap_ns:
            return None
        number = sent.draft.number if sent.draft is not None and step.most_draft_tokens else 0
        columns = outcome.num_accepted, outcome.is_speculating, outcome.num_tokens
        if step.chunks:
            columns = columns[0][:num_sequences], columns[1][:num_sequences], columns[2][:num_sequences]
        decoded = DecodedStep(number, gap_ns, num_sequences, *columns, has_prompts)
        if step.is_kept and not step.most_draft_tokens:  # it says nothing of the draft, nor of steps without one
            self.num_drafting_none += 1
            return decoded
        (self._drafted if number else self._plain).append((self._num_added, decoded))
        self._num_added += 1
        return decoded

    def on_idle(self) -> None:
        """Counts the time until the next step as no pause."""
        self._arrived_ns = None

    @property
    def position(self) -> int:
        """Steps that were added so far."""
        return self._num_added

    def last(self, attachment: int, num_steps: int) -> list[DecodedStep]:
        """The last steps of a draft, or plain ones for 0."""
        return self._added_since(0, attachment)[-num_steps:] if num_steps else []

    def first(self, attachment: int, num_steps: int, *, since: int) -> list[DecodedStep]:
        """The first steps of a draft, or plain ones for 0, from this position on."""
        return self._added_since(since, attachment)[:num_steps]

    def restart_longest_gap(self) -> None:
        """Forgets the longest time between two steps."""
        self._longest_gap_ns = 0

    @property
    def longest_gap_ms(self) -> float:
        """Longest time between two steps since the restart."""
        return self._longest_gap_ns / 1e6

    def _added_since(self, position: int, attachment: int) -> list[DecodedStep]:
        steps = list(self._drafted if attachment else self._plain)
        return [step for added_at, step in steps if added_at >= position and step.attachment == attachment]


def accepted_of_first(num_draft_tokens: int, steps: Iterable[DecodedStep]) -> float:
    """Mean of the accepted ones among the first draft tokens of each sequence in each step."""
    # A token is accepted only behind all before it.
    accepted = [np.minimum(step.num_accepted[step.is_speculating], num_draft_tokens) for step in steps]
    return int(sum(each.sum() for each in accepted)) / max(1, sum(map(len, accepted)))


def figures(algorithm: str, num_draft_tokens: int, steps: Iterable[DecodedStep]) -> DraftFigures:
    """The means over some steps; times are those of steps without prompts, if there are any."""
    counted = list(steps)
    timed = [step for step in counted if not step.has_prompts] or counted
    wall_ns = sum(step.gap_ns for step in timed)
    if not counted:
        return DraftFigures(algorithm=algorithm, num_draft_tokens=num_draft_tokens)
    return DraftFigures(
        algorithm=algorithm,
        num_draft_tokens=num_draft_tokens,
        num_steps=len(counted),
        accept_length=1 + accepted_of_first(num_draft_tokens, counted),
        tokens_per_second=sum(step.num_tokens for step in timed) / wall_ns * 1e9,
        step_ms=wall_ns / len(timed) / 1e6,
    )
