"""The time of each step, from the stamps that the workers leave in the arena.

`StepRecorder` keeps the last steps for a trace at all times: a handful of tuples a step.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.errors import RETRY_AFTER_MS, UnavailableError
from slipstream.common.wire.access_log import LogOp
from slipstream.common.wire.layout import DECODE_PART, PREFILL_PART, BufferName
from slipstream.common.wire.recorder import FlightRecorder, Record, Site
from slipstream.common.wire.step import FenceName, Role
from slipstream.common.wire.trace import MAX_STEPS, TracedStep
from slipstream.scheduler.telemetry.step_metrics import phase_of, time_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.wire.access_log import AccessLog
    from slipstream.common.wire.layout import EpochShape
    from slipstream.common.wire.step import FenceOps
    from slipstream.scheduler.records import Interval, SentStep, StepDraft
    from slipstream.scheduler.telemetry.step_metrics import StepTiming


_RESOLUTION_NS = 10**6
"""Of the clocks of all GPUs."""
_LONGEST_NS = 600 * 10**9
"""No step takes longer."""


class StepTimings:
    """Takes in the stamps of each step, one step late.

    As a rule they come with the next step's result. Those of draft's prefill part may come later: they are read from
    its own memory once it has signalled.
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
        self._draft_stamps = arena.tensor(BufferName.DRAFT_STAMPS)
        self._unread: deque[SentStep] = deque()
        self._is_idle = True
        self._came = 0
        """The last step whose result came: verify has stamped those before it."""
        self._before: Interval = (0, 0)

    def sent(self, sent: SentStep) -> None:
        """Notes a step that was sent, whose stamps are to be read."""
        sent.is_first = self._is_idle
        self._unread.append(sent)
        self._is_idle = False

    def idle(self) -> None:
        """There is nothing to do: the time until the next step is not counted."""
        self._is_idle = True

    def came(self, sent: SentStep, stamps_before: tuple[Interval, ...]) -> None:
        """Takes in the stamps of the step before, which come with the result of `sent`: verify's and draft's.

        Verify's are complete, and so are those of draft's decode part. Those of its prefill part are if verify has
        waited for a later part of draft by then: in this step.
        """
        number = self._came = sent.step.number
        if self._unread and self._unread[0].step.number < number - 1:
            self.collect(number - 2)
        if not self._unread or self._unread[0].step.number != number - 1:
            return
        has_decoded, has_prefilled = _parts(self._unread[0])
        if has_prefilled and not sent.step.is_kept:
            self.collect(number - 1)
            return
        verify, decoded, prefilled = stamps_before
        self._log_read(number - 1, BufferName.VERIFY_STAMPS)
        self._log_parts(number - 1, has_decoded=has_decoded, has_prefilled=has_prefilled)
        self._take(verify, decoded if has_decoded else None, prefilled if has_prefilled else None)

    def collect(self, up_to_step: int, *, is_last_chance: bool = False) -> None:
        """Reads the stamps of steps up to this one that are there by now.

        `is_last_chance`: the next step overwrites verify's. Then those of draft's prefill part are left out where they
        are not there.
        """
        while self._unread and self._unread[0].step.number <= min(up_to_step, self._came - 1):
            sent = self._unread[0]
            number, row = sent.step.number, sent.step.number % self._ring
            has_decoded, has_prefilled = _parts(sent)
            prefilled: Interval | None = None
            if has_prefilled and sent.draft is not None:
                if self._has_prefilled(number, sent.draft):
                    self._log_parts(number, has_prefilled=True, attachment=sent.draft.number)
                    (own,) = self._device.to_host([sent.draft.stamps[row, PREFILL_PART]])
                    prefilled = _interval(own)
                elif not is_last_chance:
                    return
            self._log_read(number, BufferName.VERIFY_STAMPS)
            self._log_parts(number, has_decoded=has_decoded)
            decoded = _interval(self._draft_stamps[row, DECODE_PART]) if has_decoded else None
            self._take(_interval(self._verify_stamps[row]), decoded, prefilled)

    def _take(self, verify: Interval, decoded: Interval | None, prefilled: Interval | None) -> None:
        """Takes in the stamps of the first unread step: verify's, and those of draft's parts."""
        sent = self._unread.popleft()
        step, is_drafted = sent.step, sent.step.most_draft_tokens > 0
        if decoded is not None and not _is_plausible(verify, decoded, is_before=is_drafted):
            decoded = None
        if prefilled is not None and not _is_plausible(verify, prefilled):
            prefilled = None
        self._recorder.stamped(step.number, verify, decoded, prefilled)
        before = None if sent.is_first else self._before
        self._observe(partial(time_step, phase_of(step), before, verify, decoded, prefilled, is_drafted=is_drafted))
        draft_ends = [part[1] for part in (decoded, prefilled) if part is not None] or [self._before[1]]
        self._before = (verify[1], max(verify[1], *draft_ends))

    def _has_prefilled(self, number: int, draft: StepDraft) -> bool:
        prefilled = FenceName.DRAFT_PREFILLED
        if draft.fence(prefilled).poll() < number:
            return False
        if self._log.is_enabled:
            self._log.fence(LogOp.POLL, prefilled, number, step=number, attachment=draft.number)
        return True

    def _log_parts(
        self, number: int, *, has_decoded: bool = False, has_prefilled: bool = False, attachment: int = 0
    ) -> None:
        """Logs reads of draft's stamps. In the log each part has a row of its own."""
        for part, has_part in ((DECODE_PART, has_decoded), (PREFILL_PART, has_prefilled)):
            if has_part and self._log.is_enabled:
                row = 2 * (number % self._ring) + part
                self._log.access(BufferName.DRAFT_STAMPS, [row], is_write=False, step=number, attachment=attachment)

    def _log_read(self, number: int, name: BufferName) -> None:
        if self._log.is_enabled:
            self._log.access(name, [number % self._ring], is_write=False, step=number)


def _parts(sent: SentStep) -> tuple[bool, bool]:
    """Returns whether stamps of draft's decode part and of its prefill part are to come.

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

    `is_before`: draft's work came before verify's.
    """
    if is_before and draft[1] > verify[0] + _RESOLUTION_NS:
        return False
    return verify[0] - _LONGEST_NS < draft[0] <= draft[1] < verify[0] + _LONGEST_NS


_KEPT_STEPS = MAX_STEPS + 64


class StepRecorder:
    """Records of one epoch. The loop's thread adds; any other may read."""

    def __init__(self) -> None:
        self._host = FlightRecorder()
        self.add = self._host.add
        """Adds an activity of the loop."""
        # One item a step in each, of which its records are made when they are read.
        self._consumed: deque[tuple[int, int, int, int, int]] = deque(maxlen=_KEPT_STEPS)
        self._stamped: deque[tuple[int, Interval, Interval | None, Interval | None]] = deque(maxlen=_KEPT_STEPS)
        self._sent: deque[tuple[int, int, int, int, int, FenceOps | None, FenceOps, int, int]]
        self._sent = deque(maxlen=_KEPT_STEPS)
        self._lock = threading.Lock()
        self._watchers: dict[Callable[[], None], int] = {}
        self.is_closed = False
        """True once the epoch is over."""
        self.last_sent = 0
        """The last step that was sent."""
        self.last_complete = 0
        """The last step whose stamps were read."""

    def sent(self, sent: SentStep) -> None:
        """Adds a step that was sent."""
        # Its numbers only: the step itself has much more.
        step = sent.step
        sizes = len(step.decoded.slots), len(step.chunks), step.most_draft_tokens, step.num_prompt_tokens
        self._sent.append((step.number, *sizes, sent.draft_ops, sent.verify_ops, sent.decided_ns, sent.sent_ns))
        self.last_sent = step.number

    def consumed(self, sent: SentStep) -> None:
        """Adds the result of a step."""
        times = sent.step.number, sent.sent_ns, sent.wait_ns, sent.arrived_ns, sent.applied_ns
        self._consumed.append(times)

    def stamped(self, step: int, verify: Interval, decoded: Interval | None, prefilled: Interval | None) -> None:
        """Adds the stamps of a step, which complete its records: verify's, and those of draft's parts."""
        self._stamped.append((step, verify, decoded, prefilled))
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
                step=step,
                num_slots=num_decoding + num_chunks,
                has_draft=draft_ops is not None,
                num_decoding=num_decoding,
                num_draft_tokens=num_draft_tokens,
                num_prompt_tokens=num_prompt_tokens,
                draft_waits=() if draft_ops is None else draft_ops.waits,
                verify_waits=verify_ops.waits,
            )
            for step, num_decoding, num_chunks, num_draft_tokens, num_prompt_tokens, draft_ops, verify_ops, *_ in (
                self._sent.copy()
            )
            if first <= step <= last
        ]

    def host_records(self, first: int) -> list[Record]:
        """The loop's activities, from this step on, in the order in which they ended."""
        records = self._host.since(first)
        records += [Record(Site.SEND, step, begin_ns, end_ns) for step, *_, begin_ns, end_ns in self._sent.copy()]
        for step, sent_ns, wait_ns, landed_ns, end_ns in self._consumed.copy():
            records.append(Record(Site.WAIT, step, wait_ns, landed_ns))
            records.append(Record(Site.RESULT, step, sent_ns, landed_ns))
            records.append(Record(Site.TAKE_IN, step, landed_ns, end_ns))
        return sorted((record for record in records if record.step >= first), key=lambda record: record.end_ns)

    def stream_records(self, role: Role, first: int) -> list[Record]:
        """A worker's stamps, from this step on."""
        records: list[Record] = []
        for step, verify, decoded, prefilled in self._stamped.copy():
            if role is Role.VERIFY:
                records.append(Record(Site.STREAM, step, *verify))
                continue
            if decoded is not None:
                records.append(Record(Site.STREAM, step, *decoded))
            if prefilled is not None:
                records.append(Record(Site.PREFILL, step, *prefilled))
        return [record for record in records if record.step >= first]

    def _notify(self, step: int | None) -> None:
        with self._lock:
            due = [call for call, wanted in self._watchers.items() if step is None or wanted <= step]
            for call in due:
                del self._watchers[call]
        for call in due:
            call()
