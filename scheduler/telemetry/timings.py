"""The time of each step, from the stamps that the workers leave in the arena.

`StepRecorder` keeps the last steps for a trace at all times: a handful of tuples a step.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.common.errors import RETRY_AFTER_MS, UnavailableError
from slipstream.common.worker.access_log import LogOp
from slipstream.common.worker.layout import BufferName
from slipstream.common.worker.recorder import FlightRecorder, Record, Site
from slipstream.common.worker.step import FenceName, Role, StepKind
from slipstream.common.worker.trace import MAX_STEPS, TracedStep
from slipstream.scheduler.telemetry.step_metrics import time_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from slipstream.common.device.interface import Arena, Device, Fence
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.layout import EpochShape
    from slipstream.common.worker.step import FenceOps
    from slipstream.scheduler.records import Interval, PlannedStep, Step
    from slipstream.scheduler.telemetry.step_metrics import StepTiming


_RESOLUTION_NS = 10**6
"""Of the clocks of all GPUs."""
_LONGEST_NS = 600 * 10**9
"""No step takes longer."""


class StampedDraft(Protocol):
    """An attachment of a draft, as far as its stamps go."""

    @property
    def number(self) -> int:
        """Its number."""
        ...

    @property
    def done(self) -> Fence:
        """`draft.done`."""
        ...

    @property
    def stamps(self) -> torch.Tensor:
        """[ring, 2] int64, as draft wrote them: any numbers."""
        ...

    @property
    def is_released(self) -> bool:
        """True once steps may have gone on without it."""
        ...

    @property
    def is_let_go(self) -> bool:
        """True once no step refers to it: its memory may be gone."""
        ...


class _Unread(NamedTuple):
    """A step whose stamps were not taken in."""

    step: Step
    attachment: StampedDraft | None
    """The draft that has a command in it."""
    is_first: bool
    """True behind an idle time."""

    @property
    def draft(self) -> StampedDraft | None:
        """The draft whose stamps are to come: one that was lost leaves none, and the memory of one let go is gone."""
        attachment = self.attachment
        return None if attachment is None or attachment.is_released or attachment.is_let_go else attachment


class StepTimings:
    """Takes in the stamps of each step, one step late.

    As a rule they come with the next step's result. Draft's stamps of a prefill may come later: they are read from its
    own memory once it has signalled.
    """

    def __init__(
        self,
        device: Device,
        arena: Arena,
        shape: EpochShape,
        log: AccessLog,
        observe: Callable[[Callable[[], StepTiming]], None],
        recorder: StepRecorder,
    ) -> None:
        """`observe` is called once for each step, in order, with what takes it apart when its times are wanted.

        `recorder` gets the stamps themselves.
        """
        self._device = device
        self._ring = shape.ring
        self._log = log
        self._observe = observe
        self._recorder = recorder
        self._verify_stamps = arena.tensor(BufferName.VERIFY_STAMPS)
        self._unread: deque[_Unread] = deque()
        self._is_idle = True
        self._came = 0
        """The last step whose result came: verify has stamped those before it."""
        self._before: Interval = (0, 0)
        self._drafted: dict[int, Interval] = {}
        """By mixed step: draft's stamps of its first command, which come with the step's own result."""

    def sent(self, step: Step, attachment: StampedDraft | None) -> None:
        """Notes a step that was sent, whose stamps are to be read. `attachment`: the draft that has a command in it."""
        self._unread.append(_Unread(step, attachment, self._is_idle))
        self._is_idle = False

    def idle(self) -> None:
        """There is nothing to do: the time until the next step is not counted."""
        self._is_idle = True

    def came(self, step: Step, stamps_before: tuple[Interval, ...]) -> None:
        """Takes in the stamps of the step before, which come with the result of `step`: verify's and draft's.

        Verify's are complete. Draft's are if verify has waited for them by then: in that step or in this one.
        """
        self._came = step.number
        if step.is_mixed and step.kind is StepKind.DECODE:
            self._log_read(step.number - 1, BufferName.DRAFT_STAMPS)
            self._drafted[step.number] = stamps_before[1]
        if self._unread and self._unread[0].step.number < step.number - 1:
            self.collect(step.number - 2)
        if not self._unread or self._unread[0].step.number != step.number - 1:
            return
        before, has_draft = self._unread[0].step, self._unread[0].draft is not None
        is_decode = StepKind.DECODE in (before.kind, step.kind) and not before.is_mixed
        if has_draft and not is_decode:
            self.collect(before.number)
            return
        verify, draft = stamps_before
        if self._log.is_enabled:
            self._log_read(before.number, BufferName.VERIFY_STAMPS)
            if has_draft:
                self._log_read(before.number, BufferName.DRAFT_STAMPS)
        self._take(verify, draft if has_draft else None)

    def collect(self, up_to_step: int, *, is_last_chance: bool = False) -> None:
        """Reads the stamps of steps up to this one that are there by now.

        `is_last_chance`: the next step overwrites verify's. Then draft's are left out where they are not there.
        """
        while self._unread and self._unread[0].step.number <= min(up_to_step, self._came - 1):
            step, draft = self._unread[0].step, self._unread[0].draft
            if draft is not None and not self._is_done(step, draft):
                if not is_last_chance:
                    return
                draft = None  # it rests, and nothing waits for it
            self._take(*self._read(step, draft))

    def _take(self, verify: Interval, draft: Interval | None) -> None:
        """Takes in the stamps of the first unread step."""
        step, _, is_first = self._unread.popleft()
        prompts: Interval | None = None
        if (drafted := self._drafted.pop(step.number, None)) is not None and draft is not None:
            draft, prompts = drafted, draft if _is_plausible(StepKind.PREFILL, verify, draft) else None
        if draft is not None and not _is_plausible(step.kind, verify, draft):
            draft = prompts = None
        self._recorder.stamped(step.number, verify, draft, prompts)
        before = None if is_first else self._before
        self._observe(partial(time_step, step.kind, before, verify, draft, prompts, is_mixed=step.is_mixed))
        draft_end = self._before[1] if draft is None else draft[1]
        self._before = (verify[1], max(verify[1], draft_end, draft_end if prompts is None else prompts[1]))

    def _is_done(self, step: Step, draft: StampedDraft) -> bool:
        if draft.done.poll() < step.number:
            return False
        if self._log.is_enabled:
            self._log.fence(LogOp.POLL, FenceName.DRAFT_DONE, step.number, step=step.number, attachment=draft.number)
        return True

    def _read(self, step: Step, draft: StampedDraft | None) -> tuple[Interval, Interval | None]:
        """Reads verify's stamps from the results, and draft's from its own memory."""
        row = step.number % self._ring
        self._log_read(step.number, BufferName.VERIFY_STAMPS)
        verify = _interval(self._verify_stamps[row])
        if draft is None:
            return verify, None
        self._log_read(step.number, BufferName.DRAFT_STAMPS, draft.number)
        (own,) = self._device.to_host([draft.stamps[row]])
        return verify, _interval(own)

    def _log_read(self, number: int, name: BufferName, attachment: int = 0) -> None:
        if self._log.is_enabled:
            self._log.access(name, [number % self._ring], is_write=False, step=number, attachment=attachment)


def _interval(stamps: torch.Tensor) -> Interval:
    """[2] int64."""
    start, end = stamps.tolist()
    return start, end


def _is_plausible(kind: StepKind, verify: Interval, draft: Interval) -> bool:
    """False for stamps that no work left: a draft may write anything there."""
    if kind is StepKind.DECODE and draft[1] > verify[0] + _RESOLUTION_NS:
        return False
    return verify[0] - _LONGEST_NS < draft[0] <= draft[1] < verify[0] + _LONGEST_NS


_KEPT_STEPS = MAX_STEPS + 64


class _SentStep(NamedTuple):
    """A step that was sent, as a trace tells of it; a mixed one that is drafted has two."""

    step: int
    kind: StepKind
    num_slots: int
    num_prompt_tokens: int
    verify: FenceOps | None
    draft: FenceOps | None
    begin_ns: int
    end_ns: int


class StepRecorder:
    """Records of one epoch. The loop's thread adds; any other may read."""

    def __init__(self) -> None:
        self._host = FlightRecorder()
        self.add = self._host.add
        """Adds an activity of the loop."""
        # One item a step in each, of which its records are made when they are read.
        self._consumed: deque[tuple[int, int, int, int, int]] = deque(maxlen=_KEPT_STEPS)
        self._stamped: deque[tuple[int, Interval, Interval | None, Interval | None]] = deque(maxlen=_KEPT_STEPS)
        self._sent: deque[_SentStep] = deque(maxlen=_KEPT_STEPS)
        self._lock = threading.Lock()
        self._watchers: dict[Callable[[], None], int] = {}
        self.is_closed = False
        """True once the epoch is over."""
        self.last_sent = 0
        """The last step that was sent."""
        self.last_complete = 0
        """The last step whose stamps were read."""

    def sent(self, step: Step, planned: PlannedStep, begin_ns: int, end_ns: int) -> None:
        """Adds a step that was decided on at `begin_ns`, with its commands handed over until `end_ns`."""
        number, num_slots, draft = step.number, len(step.members.slots), planned.draft
        if planned.draft_prompts is not None:
            self._sent.append(_SentStep(number - 1, step.kind, num_slots, 0, None, draft, begin_ns, begin_ns))
            draft = planned.draft_prompts
        num_prompt_tokens = step.num_prompt_tokens
        self._sent.append(
            _SentStep(number, step.kind, num_slots, num_prompt_tokens, planned.verify, draft, begin_ns, end_ns)
        )
        self.last_sent = number

    def consumed(self, step: int, sent_ns: int, wait_ns: int, landed_ns: int, end_ns: int) -> None:
        """Adds the result of a step: waited for from `wait_ns` on, on the host at `landed_ns`, taken in at `end_ns`."""
        self._consumed.append((step, sent_ns, wait_ns, landed_ns, end_ns))

    def stamped(self, step: int, verify: Interval, draft: Interval | None, prompts: Interval | None = None) -> None:
        """Adds the stamps of a step, which complete its records. `prompts`: of a second command of draft."""
        self._stamped.append((step, verify, draft, prompts))
        self.last_complete = step
        if self._watchers:
            self._notify(step)

    def watch(self, step: int, call: Callable[[], None]) -> None:
        """Calls `call` once this step is complete or the epoch is over, at once if it is."""
        with self._lock:
            self._watchers[call] = step
        # Checked after the registration: a step that is complete by now may have found no watcher.
        if self.is_closed or self.last_complete >= step:
            self.forget(call)
            call()

    def forget(self, call: Callable[[], None]) -> None:
        """Takes back a `watch`."""
        with self._lock:
            self._watchers.pop(call, None)

    def close(self) -> None:
        """Ends the epoch: calls all watchers."""
        self.is_closed = True
        self._notify(None)

    def steps(self, first: int, last: int) -> list[TracedStep]:
        """Returns the complete steps among these. Raises UnavailableError if the epoch is over."""
        if self.is_closed:
            reason = "the workers were lost, or the server ends, while steps were traced"
            raise UnavailableError(reason, retry_after_ms=RETRY_AFTER_MS)
        last = min(last, self.last_complete)
        return [
            TracedStep(
                step=sent.step,
                kind=sent.kind,
                num_slots=sent.num_slots,
                num_prompt_tokens=sent.num_prompt_tokens,
                has_draft=sent.draft is not None,
                draft_waits=() if sent.draft is None else sent.draft.waits,
                verify_waits=() if sent.verify is None else sent.verify.waits,
            )
            for sent in self._sent.copy()
            if first <= sent.step <= last
        ]

    def host_records(self, first: int) -> list[Record]:
        """The loop's activities, from this step on, in the order in which they ended."""
        records = self._host.since(first)
        records += [Record(Site.SEND, sent.step, sent.begin_ns, sent.end_ns) for sent in self._sent.copy()]
        for step, sent_ns, wait_ns, landed_ns, end_ns in self._consumed.copy():
            records.append(Record(Site.WAIT, step, wait_ns, landed_ns))
            records.append(Record(Site.RESULT, step, sent_ns, landed_ns))
            records.append(Record(Site.TAKE_IN, step, landed_ns, end_ns))
        return sorted((record for record in records if record.step >= first), key=lambda record: record.end_ns)

    def stream_records(self, role: Role, first: int) -> list[Record]:
        """A worker's stamps, from this step on."""
        records: list[Record] = []
        for step, verify, draft, prompts in self._stamped.copy():
            if role is Role.VERIFY:
                records.append(Record(Site.STREAM, step, *verify))
                continue
            if draft is not None:
                records.append(Record(Site.STREAM, step if prompts is None else step - 1, *draft))
            if prompts is not None:
                records.append(Record(Site.STREAM, step, *prompts))
        return [record for record in records if record.step >= first]

    def _notify(self, step: int | None) -> None:
        with self._lock:
            due = [call for call, wanted in self._watchers.items() if step is None or wanted <= step]
            for call in due:
                del self._watchers[call]
        for call in due:
            call()
