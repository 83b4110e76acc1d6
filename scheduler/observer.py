"""Observes the steps of an epoch: for traces, metrics, the comparison of two drafts, and the choice of draft tokens.

The loop says that a step was sent, that its result arrived, and that nothing runs. What the workers do not wait for is
counted after the next step's commands have been sent. The time of a step is in the stamps that the workers leave in
the arena.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.common.errors import RETRY_AFTER_MS, UnavailableError
from slipstream.common.wire.events import Event, LogOp, Site
from slipstream.common.wire.layout import DECODE_PART, PREFILL_PART, BufferName
from slipstream.common.wire.server import DraftFigures
from slipstream.common.wire.step import FenceName, Role
from slipstream.common.wire.trace import MAX_STEPS, TracedStep
from slipstream.scheduler.metrics import DRAFTED, DRAFTED_NONE, PLAIN, RESTING, phase_of, time_step
from slipstream.scheduler.records import NO_OUTCOME

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from numpy.typing import NDArray

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.layout import EpochShape
    from slipstream.common.wire.step import FenceOps, FencePoint
    from slipstream.scheduler.draft import Draft
    from slipstream.scheduler.draft_choice import DraftChoice
    from slipstream.scheduler.metrics import StepMetrics
    from slipstream.scheduler.records import Interval, Step, StepOutcome, StepResult

    _Sizes = tuple[int, int, int, int]
    """Of a step: sequences that it decodes, chunks of prompts, most draft tokens of a sequence, and prompt tokens."""
    _CompleteStep = tuple[int, _Sizes, FenceOps | None, FenceOps, Interval, Interval | None, Interval | None]

TIDY_STEPS = 32
"""Steps that are counted together, so that what they touch is fetched from memory once."""
RESOLUTION_NS = 10**6
"""Coarsest resolution of a GPU's clock, in nanoseconds."""
LONGEST_STEP_NS = 600 * 10**9
"""Longest plausible time of a step, in nanoseconds; stamps beyond it are left out."""
TRACED_STEPS = MAX_STEPS + 64
"""Steps that are kept for traces."""
KEPT_STEPS = 4096
"""Drafted steps, and plain ones, that are kept for the comparison of two drafts."""


# Not frozen: what is known of a step grows until its stamps are read, and it is one record all the time.
@dataclass(slots=True, eq=False)
class SentStep:
    """A step that was sent, and its outcome. Written by the loop's thread."""

    step: Step
    draft: Draft | None
    """The draft that it refers to."""
    draft_ops: FenceOps | None
    """Waits and signals of draft's command; None if it has none."""
    verify_ops: FenceOps
    awaited: FencePoint | None
    """The last point of draft that verify waits for in it."""
    decided_ns: int
    sent_ns: int
    """When its commands were handed over."""
    grammar: int = 0
    """Number of the grammar worker's attachment, if a row has a constraint."""
    num_brought: int = 0
    """Tokens of outputs in the grammar worker's command."""
    masks_since: float = 0.0
    """Until when verify is known to have kept the grammar worker waiting, on time.monotonic's clock."""
    is_first: bool = False
    """True after an idle time, which belongs to no step."""
    gap_ns: int = 0
    """From the result before to its own, where that is the time of decoding alone; else 0."""
    is_resting: bool = False
    """True if a draft rested meanwhile, or took part again."""
    wait_ns: int = 0
    """When the loop began to wait for its result."""
    arrived_ns: int = 0
    """When the result was on the host."""
    applied_ns: int = 0
    """When the loop had made progress of it."""
    outcome: StepOutcome = NO_OUTCOME
    """Its outcome for the sequences that still run."""


class StepObserver:
    """Belongs to the loop's thread; traces, metrics and swaps read what it keeps on others.

    It takes in the stamps of each step one step late. As a rule they arrive with the next step's result. Those of
    draft's prefill part may arrive later: they are read from its own memory once it has signalled.
    """

    def __init__(
        self,
        device: Device,
        arena: Arena,
        shape: EpochShape,
        log: EventLog,
        metrics: StepMetrics,
        trace: StepTrace,
        decodes: DecodeRecord,
        choice: DraftChoice | None = None,
    ) -> None:
        """`trace` is told the stamps of each step, in order, and `metrics` how they are taken apart.

        `choice`: is told the outcome of draft tokens, and how long steps take.
        """
        self._device = device
        self._ring = shape.ring
        self._log = log
        self._metrics = metrics
        self._trace = trace
        self._decodes = decodes
        self._choice = choice
        self.add = log.add
        """Adds an event of the loop: its site, step, begin and end."""
        self.stall = log.stall
        """Adds an event in which the loop was blocked."""
        self.tidy = metrics.tidy
        """Counts what was observed by now, of many steps at once."""
        self._verify_stamps = arena.tensor(BufferName.VERIFY_STAMPS)
        self._draft_stamps = arena.tensor(BufferName.DRAFT_STAMPS)
        self._unread: deque[SentStep] = deque()
        self._uncounted: SentStep | None = None
        """The last step whose result arrived, until it is counted."""
        self._is_idle = True
        self._last_result = 0
        """The last step whose result arrived: verify has stamped those before it."""
        self._before: Interval = (0, 0)

    def on_sent(self, sent: SentStep) -> None:
        """Called when the commands of a step have been sent."""
        number = self._trace.last_sent = sent.step.number
        self._log.add(Site.SEND, number, sent.decided_ns, sent.sent_ns)
        sent.is_first = self._is_idle
        self._unread.append(sent)
        self._is_idle = False
        self.count()

    def on_result(self, sent: SentStep, result: StepResult) -> None:
        """Called when the loop has applied the result of a step."""
        self.count()
        self._log.stall(Site.WAIT, sent.step.number, sent.wait_ns, sent.arrived_ns)
        self._log.add(Site.TAKE_IN, sent.step.number, sent.arrived_ns, sent.applied_ns)
        self._take_in_stamps(sent, result.stamps_before)
        self._uncounted = sent

    def on_idle(self) -> None:
        """Called when nothing runs: the time until the next step belongs to none."""
        self.count()
        self._is_idle = True
        self._decodes.on_idle()

    def count(self) -> None:
        """Counts the last result, if that was not done yet, and tells the choice of draft tokens their outcome.

        Called once more when the epoch is over.
        """
        sent, self._uncounted = self._uncounted, None
        if sent is None:
            return
        step, outcome = sent.step, sent.outcome
        decoded = self._decodes.add(sent)
        skips_drafting = step.is_kept and not step.most_draft_tokens
        plain_mode = DRAFTED_NONE if skips_drafting else RESTING if sent.is_resting else PLAIN
        mode = "" if decoded is None else DRAFTED if decoded.attachment else plain_mode
        self._metrics.decoded(mode, outcome.num_accepted, outcome.num_drafted)
        if decoded is not None and not decoded.has_prompts:
            sent.gap_ns = decoded.gap_ns
        if self._choice is not None and step.most_draft_tokens:
            self._choice.take_in(outcome)

    def collect(self, up_to_step: int, *, is_last_chance: bool = False) -> None:
        """Reads the stamps of steps up to this one that are there by now.

        `is_last_chance`: the next step overwrites verify's. Then those of draft's prefill part are left out where they
        are not there.
        """
        while self._unread and self._unread[0].step.number <= min(up_to_step, self._last_result - 1):
            sent = self._unread[0]
            number, row = sent.step.number, sent.step.number % self._ring
            has_decoded, has_prefilled = _parts(sent)
            prefilled: Interval | None = None
            if has_prefilled and sent.draft is not None:
                if self._has_prefilled(number, sent.draft):
                    (own,) = self._device.to_host([sent.draft.attachment.stamps[row, PREFILL_PART]])
                    prefilled = _interval(own)
                elif not is_last_chance:
                    return
            self._log_reads(number, has_decoded=has_decoded)
            decoded = _interval(self._draft_stamps[row, DECODE_PART]) if has_decoded else None
            self._take(_interval(self._verify_stamps[row]), decoded, prefilled)

    def _take_in_stamps(self, sent: SentStep, stamps_before: tuple[Interval, ...]) -> None:
        """Takes in the stamps of the step before, which arrive with the result of `sent`: verify's and draft's.

        Verify's are complete, and so are those of draft's decode part. Those of its prefill part are if verify has
        waited for a later part of draft by then: in this step.
        """
        number = self._last_result = sent.step.number
        if self._unread and self._unread[0].step.number < number - 1:
            self.collect(number - 2)
        if not self._unread or self._unread[0].step.number != number - 1:
            return
        has_decoded, has_prefilled = _parts(self._unread[0])
        if has_prefilled and not sent.step.is_kept:
            self.collect(number - 1)
            return
        verify, decoded, prefilled = stamps_before
        self._log_reads(number - 1, has_decoded=has_decoded, has_prefilled=has_prefilled)
        self._take(verify, decoded if has_decoded else None, prefilled if has_prefilled else None)

    def _take(self, verify: Interval, decoded: Interval | None, prefilled: Interval | None) -> None:
        """Takes in the stamps of the first unread step: verify's, and those of draft's parts."""
        sent = self._unread.popleft()
        step, is_drafted = sent.step, sent.step.most_draft_tokens > 0
        if decoded is not None and not _is_plausible(verify, decoded, is_before=is_drafted):
            decoded = None
        if prefilled is not None and not _is_plausible(verify, prefilled):
            prefilled = None
        self._trace.add(sent, verify, decoded, prefilled)
        if self._choice is not None and sent.gap_ns:
            verify_s = max(0, verify[1] - verify[0]) / 1e9
            self._choice.took(step, sent.gap_ns / 1e9, verify_s, has_draft=sent.draft is not None)
        before = None if sent.is_first else self._before
        timing = partial(time_step, phase_of(step), before, verify, decoded, prefilled, is_drafted=is_drafted)
        self._metrics.observe(timing)
        draft_ends = [part[1] for part in (decoded, prefilled) if part is not None] or [self._before[1]]
        self._before = (verify[1], max(verify[1], *draft_ends))

    def _has_prefilled(self, number: int, draft: Draft) -> bool:
        """Returns whether the stamps of draft's prefill part are there, which are to be read then."""
        prefilled = FenceName.DRAFT_PREFILLED
        if draft.attachment.fences[prefilled].poll() < number:
            return False
        if self._log.is_enabled:
            self._log.fence(LogOp.POLL, prefilled, number, step=number, attachment=draft.number)
            rows = [2 * (number % self._ring) + PREFILL_PART]
            self._log.access(BufferName.DRAFT_STAMPS, rows, is_write=False, step=number, attachment=draft.number)
        return True

    def _log_reads(self, number: int, *, has_decoded: bool, has_prefilled: bool = False) -> None:
        """Logs reads of a step's stamps among the results. In the log each part of draft has a row of its own."""
        if self._log.is_enabled:
            row = number % self._ring
            self._log.access(BufferName.VERIFY_STAMPS, [row], is_write=False, step=number)
            for part, has_part in ((DECODE_PART, has_decoded), (PREFILL_PART, has_prefilled)):
                if has_part:
                    self._log.access(BufferName.DRAFT_STAMPS, [2 * row + part], is_write=False, step=number)


def _parts(sent: SentStep) -> tuple[bool, bool]:
    """Returns whether draft's decode part and its prefill part will be stamped.

    A draft that was lost leaves none, and the memory of one that no step refers to is gone.
    """
    draft = sent.draft
    if sent.draft_ops is None or draft is None or not draft.is_readable:
        return False, False
    return sent.step.is_kept, bool(sent.step.chunks)


def _interval(stamps: torch.Tensor) -> Interval:
    """[2] int64."""
    start, end = stamps.tolist()
    return start, end


def _is_plausible(verify: Interval, draft: Interval, *, is_before: bool = False) -> bool:
    """Returns whether stamps may be those of work: a draft may write anything there.

    `is_before`: draft's work preceded verify's.
    """
    if is_before and draft[1] > verify[0] + RESOLUTION_NS:
        return False
    return verify[0] - LONGEST_STEP_NS < draft[0] <= draft[1] < verify[0] + LONGEST_STEP_NS


class StepTrace:
    """The last steps of an epoch and the events of its loop. The loop's thread adds; any other may read."""

    def __init__(self, log: EventLog) -> None:
        self.is_closed = False
        """True once the epoch is over."""
        self.last_sent = 0
        """The last step that was sent."""
        self._log = log
        self._steps: deque[_CompleteStep] = deque(maxlen=TRACED_STEPS)

    def add(self, sent: SentStep, verify: Interval, decoded: Interval | None, prefilled: Interval | None) -> None:
        """Adds a step that is complete, with the stamps of verify and of draft's parts."""
        # Its numbers only: the step itself has much more.
        step = sent.step
        sizes = len(step.decoded.slots), len(step.chunks), step.most_draft_tokens, step.num_prompt_tokens
        self._steps.append((step.number, sizes, sent.draft_ops, sent.verify_ops, verify, decoded, prefilled))

    @property
    def last_complete(self) -> int:
        """The last step whose stamps were read; 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    def steps(self, first: int, last: int) -> list[TracedStep]:
        """Returns the complete steps among these. Raises UnavailableError if the epoch is over."""
        if self.is_closed:
            reason = "the workers were lost, or the server ends, while steps were traced"
            raise UnavailableError(reason, retry_after_ms=RETRY_AFTER_MS)
        return [
            TracedStep(
                step=step,
                num_slots=num_decoding + num_chunks,
                has_draft=draft_ops is not None,
                num_decoding=num_decoding,
                num_draft_tokens=num_draft_tokens,
                num_prompt_tokens=num_prompt_tokens,
                draft_waits=() if draft_ops is None else draft_ops.waits,
                verify_waits=verify_ops.waits,
            )
            for step, sizes, draft_ops, verify_ops, *_ in self._steps.copy()
            for num_decoding, num_chunks, num_draft_tokens, num_prompt_tokens in [sizes]
            if first <= step <= last
        ]

    def host_events(self, first: int) -> list[Event]:
        """The loop's events from this step on, in the order in which they ended."""
        events = self._log.since(first)
        sent_ns = {event.step: event.end_ns for event in events if event.site is Site.SEND}
        results = [
            Event(Site.RESULT, event.step, sent_ns[event.step], event.end_ns)
            for event in events
            if event.site is Site.WAIT and event.step in sent_ns
        ]
        return sorted(events + results, key=lambda event: event.end_ns)

    def stream_events(self, role: Role, first: int) -> list[Event]:
        """A worker's stamps, from this step on."""
        stamps = [
            [(Site.STREAM, step, verify)]
            if role is Role.VERIFY
            else [(Site.STREAM, step, decoded), (Site.PREFILL, step, prefilled)]
            for step, *_, verify, decoded, prefilled in self._steps.copy()
            if step >= first
        ]
        return [Event(site, step, *stamp) for parts in stamps for site, step, stamp in parts if stamp is not None]


class DecodedStep(NamedTuple):
    """The outcome of a step that decodes, for the sequences that it decodes."""

    attachment: int
    """Number of the draft's attachment that drafted; 0 if none did."""
    gap_ns: int
    """Since the step before."""
    num_sequences: int
    num_accepted: NDArray[np.uint32]
    """[num_sequences] draft tokens."""
    num_drafted: NDArray[np.int32]
    """[num_sequences] draft tokens that verify could accept."""
    num_new: NDArray[np.int32]
    """[num_sequences] tokens."""
    has_prompts: bool = False
    """True if it took in prompts, or the step before it did, which may do so after its tokens: its time is theirs."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        # Cheaper than a sum of NumPy's, whose code is fetched from memory in each step.
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
            # After them are the prompts that end, with their first tokens.
            num_sequences = int(np.isin(outcome.rows, step.decoded.rows).sum())
        if not num_sequences or not gap_ns:
            return None
        number = sent.draft.number if sent.draft is not None and step.most_draft_tokens else 0
        columns = outcome.num_accepted, outcome.num_drafted, outcome.num_tokens
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
    """Mean of the accepted ones among the first draft tokens of each sequence in each step, as if all had so many.

    That is the sum of the shares of chains that survive each position. What was drafted only says how many go on from
    one position to the next (Kaplan and Meier, 1958).
    """
    counted = [(step.num_accepted, step.num_drafted) for step in steps]
    mean, survival = 0.0, 1.0
    for position in range(num_draft_tokens):
        reached = sum(np.count_nonzero((accepted >= position) & (drafted > position)) for accepted, drafted in counted)
        survived = sum(np.count_nonzero((accepted > position) & (drafted > position)) for accepted, drafted in counted)
        survival *= survived / max(1, reached)
        mean += survival
    return mean


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
