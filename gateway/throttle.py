"""Hands output from the step loop's thread to the gateway's event loop, at a bounded rate of messages."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from slipstream.common.api.sequence import Outputs, SequenceOutput, SubmittedSequence

Bundle = dict["SubmittedSequence", list["SequenceOutput"]]
"""The output of several steps, in order, by sequence."""

MESSAGE_S = 0.001
"""Between messages on average, over all streams: the step loop shares the interpreter with them."""
PATIENCE = 2
"""Turns that a sequence waits if no more steps come that would bring it its own."""


class _Waiting(NamedTuple):
    """Output that was not handed over yet."""

    since: float
    outputs: list[SequenceOutput]


class OutputThrottle:
    """Hands over at once, but each sequence at most once an interval, and only so many sequences at a time.

    Implements `OutputSink`. Steps may be faster than messages should be, and messages to dozens of streams at once
    would hold up several short steps. So sequences take turns, the longest waiting first. Steps that are longer than
    that are handed over one by one, without delay. First tokens and ends are never held back.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval_s: float,
        receive: Callable[[Bundle], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`receive` is called on `loop`."""
        self._loop = loop
        self._interval_s = interval_s
        self._receive = receive
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[SubmittedSequence, _Waiting] = {}
        """In the order of their turns."""
        self._sent_at: dict[SubmittedSequence, float] = {}
        self._outgoing: Bundle = {}
        self._credit = 0.0
        """Messages that may go out."""
        self._credited_at = 0.0
        self._is_woken = False
        self._is_timed = False

    def put(self, outputs: Outputs) -> None:
        """See `OutputSink.put`."""
        if not outputs:
            return
        now = self._clock()
        waiting, sent_at = self._waiting, self._sent_at
        with self._lock:
            for sequence, output in outputs:
                if sequence in waiting:
                    waiting[sequence].outputs.append(output)
                else:
                    waiting[sequence] = _Waiting(now, [output])
                if output.is_last:
                    self._take(sequence, now)
                    del sent_at[sequence]
                elif sequence not in sent_at:
                    self._take(sequence, now)
            self._take_due(now)
            has_no_timer = bool(self._waiting) and not self._is_timed
            if self._is_woken or not (self._outgoing or has_no_timer):
                return
            self._is_woken = True
        self._loop.call_soon_threadsafe(self._wake)

    def _take_due(self, now: float) -> None:
        self._credit = min(self._credit + (now - self._credited_at) / MESSAGE_S, len(self._waiting))
        self._credited_at = now
        if self._credit < 1:
            return
        latest = now - self._interval_s
        due = [sequence for sequence in self._waiting if self._sent_at[sequence] <= latest][: int(self._credit)]
        self._credit -= len(due)
        for sequence in due:
            self._take(sequence, now)

    def _take(self, sequence: SubmittedSequence, now: float) -> None:
        outputs = self._waiting.pop(sequence).outputs
        self._sent_at[sequence] = now
        if sequence in self._outgoing:
            self._outgoing[sequence] += outputs
        else:
            self._outgoing[sequence] = outputs

    def _wake(self) -> None:
        with self._lock:
            self._is_woken = False
            bundle = self._take_outgoing()
        if bundle:
            self._receive(bundle)

    def _take_outgoing(self) -> Bundle:
        bundle, self._outgoing = self._outgoing, {}
        if self._waiting and not self._is_timed:
            self._is_timed = True
            self._loop.call_later(self._patience_s, self._flush_late)
        return bundle

    @property
    def _patience_s(self) -> float:
        return PATIENCE * max(self._interval_s, MESSAGE_S * len(self._waiting))

    def _flush_late(self) -> None:
        """Flushes sequences that have waited too long because no more steps come for them."""
        now = self._clock()
        with self._lock:
            self._is_timed = False
            latest = now - self._patience_s
            for sequence in [sequence for sequence, waiting in self._waiting.items() if waiting.since <= latest]:
                self._take(sequence, now)
            bundle = self._take_outgoing()
        if bundle:
            self._receive(bundle)
