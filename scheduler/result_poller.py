"""When to poll for a step's result, and how long to hold back the next step, by the times of the steps before."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from slipstream.common.device.interface import ANY_TIME, PollTime
from slipstream.scheduler.sizes import leading_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.scheduler.observer import SentStep
    from slipstream.scheduler.records import Step, StepSlots

HOLD_SHARE = 0.75
"""Most of a step's time, as a share, for which the next step is held back."""
GPU_LEAD_S, CPU_LEAD_S = 0.0035, 0.006
"""Least seconds left for the next step's commands: more on a CPU, where the step has the cores that they need."""
MOST_HOLD_S = 0.04
"""Most seconds that a step is held back: meanwhile nobody checks the workers, so a draft that hangs is found later."""
GAP_STEPS, LAST_STEPS = 8, 5
"""Steps of a size that are remembered for holding back, and for expecting the next result."""
SIZE_BITS = 3
"""Leading bits of their numbers of tokens in which steps of a size are equal."""
LATE_PART, EARLY_S = 0.01, 0.00006
"""The first poll is at the expected end, plus this share of the step's time, less these seconds: so it is late only in
steps of more than 6 ms, which hide it."""
UNSURE_PART = 0.005
"""Where the end is only guessed from gaps, the first poll is this share of the step before it, at least `EARLY_S`."""
EARLY_POLLS, OFFSETS = 8, 32
"""Every EARLY_POLLS-th first poll is too early, to measure the delay from verify's end stamp to the sight of it; the
least of the last OFFSETS delays counts. Without that each poll would be late by the last delay and its own."""


class StepTimes:
    """The times of the last steps of one size."""

    __slots__ = ("_lead_s", "_num_polls", "gaps_s", "seconds", "varies")

    def __init__(self, lead_s: float, *, varies: bool) -> None:
        """`varies`: True for steps that take in prompts, whose times differ more within a size."""
        self.gaps_s: deque[float] = deque(maxlen=GAP_STEPS)
        """From one result to the next, as they were seen."""
        self.seconds: deque[float] = deque(maxlen=LAST_STEPS)
        """From one end to the next, by verify's stamps."""
        self.varies = varies
        self._lead_s = lead_s
        self._num_polls = 0

    @property
    def hold_s(self) -> float:
        """Seconds from the beginning of a step for which the next may be held back: by the shortest gap."""
        if len(self.gaps_s) < GAP_STEPS:
            return 0.0
        least = min(self.gaps_s)
        return min(HOLD_SHARE * least, least - self._lead_s, MOST_HOLD_S)

    def poll_time(self, since_s: float) -> PollTime:
        """Returns when to poll if the result before was seen, or this step was sent, at `since_s`."""
        if not self.gaps_s:
            return ANY_TIME
        usual_s = min(list(self.gaps_s)[-LAST_STEPS:])
        return PollTime(since_s + usual_s - max(UNSURE_PART * usual_s, EARLY_S), usual_s)

    def exact_poll_time(self, since_s: float) -> PollTime | None:
        """Returns when to poll if the step before ended at `since_s`; None if that says no more than `poll_time`."""
        if self.varies or not self.seconds:
            return None
        # One step that took long says nothing of the next; one that took less may be the first of many.
        usual_s = min(sorted(self.seconds)[len(self.seconds) // 2], self.seconds[-1])
        self._num_polls += 1
        part = -UNSURE_PART if self._num_polls % EARLY_POLLS == 0 else LATE_PART
        return PollTime(since_s + (1 + part) * usual_s - EARLY_S, usual_s)


class ResultPoller:
    """Times steps by their size: says when to poll for a result, and how long to hold back the next step.

    Each sleep of the loop's thread costs CPU time, most of all on a virtual machine. So it wakes once a step, just
    after the result, if it can say when that is. Gaps between results as the loop sees them do not tell: each late poll
    makes one longer. Verify's stamps do, since the results are in memory of the host: the end of the last step is there
    by the time that the loop waits for the next. Belongs to the loop's thread.
    """

    def __init__(self, ended_ns: Callable[[int], int], lead_s: float) -> None:
        """`ended_ns`: returns verify's stamp at the end of a step whose result was seen; 0 if it is not there yet.

        `lead_s`: a step is held back until so long before it is needed at most.
        """
        self._ended_ns = ended_ns
        self._lead_s = lead_s
        self._sizes: dict[tuple[int, ...], StepTimes] = {}
        self._last_found: tuple[StepSlots, tuple[int, ...], StepTimes] | None = None
        """Slots, draft tokens and size of the last step without prompts: as a rule the next one's, too."""
        self._under_way: deque[StepTimes] = deque()
        """Sizes of the steps that were sent, oldest first."""
        self._last: tuple[SentStep, StepTimes, bool] | None = None
        """The last one whose result was seen, and whether it was under way when the one before was; until its stamp is
        taken in."""
        self._last_stamp_ns = 0
        self._end_ns = 0
        """The stamp of the last step; 0 if it was not there."""
        self._offsets_ns: deque[int] = deque(maxlen=OFFSETS)
        """Nanoseconds from verify's end stamp until the loop saw the result."""

    def sent(self, step: Step) -> None:
        """Notes a step that was sent."""
        self._under_way.append(self._of(step))

    @property
    def hold_s(self) -> float:
        """See `StepTimes.hold_s`; of the oldest step under way."""
        return self._under_way[0].hold_s

    def _of(self, step: Step) -> StepTimes:
        """Returns the times of steps that do about as much as this step."""
        decoded, num_draft_tokens, last = step.decoded, step.num_draft_tokens, self._last_found
        if last is not None and last[0] is decoded and last[1] == num_draft_tokens and not step.chunks:
            return last[2]
        num_tokens = step.num_decoded_tokens or len(step.chunks)
        numbers = (leading_bits(number, SIZE_BITS) for number in (num_tokens, step.num_prompt_tokens))
        key = (step.most_draft_tokens, *numbers)
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = StepTimes(self._lead_s, varies=bool(step.chunks))
        if not step.chunks:
            self._last_found = decoded, num_draft_tokens, found
        return found

    def arrived(self, sent: SentStep, before_ns: int) -> float:
        """Notes the result of the oldest step under way. `before_ns`: when the result before it arrived.

        Returns the time since then, or since the step was sent, in seconds.
        """
        if self._last is not None:
            self._settle(*self._last)
        size, gap_s = self._under_way.popleft(), (sent.arrived_ns - max(sent.sent_ns, before_ns)) / 1e9
        size.gaps_s.append(gap_s)
        self._last = sent, size, sent.sent_ns < before_ns
        return gap_s

    def poll_time(self, sent: SentStep, before_ns: int) -> PollTime:
        """Returns when to poll for the oldest step under way. `before_ns`: when the result before it arrived."""
        if self._last is not None:
            self._settle(*self._last)
        if self._end_ns and sent.sent_ns < before_ns:
            exact = self._under_way[0].exact_poll_time((self._end_ns + min(self._offsets_ns)) / 1e9)
            if exact is not None:
                return exact
        return self._under_way[0].poll_time(max(sent.sent_ns, before_ns) / 1e9)

    def _settle(self, sent: SentStep, size: StepTimes, was_under_way: bool) -> None:
        """Takes in the stamp of the last step."""
        self._last, before_ns = None, self._end_ns
        end_ns = self._ended_ns(sent.step.number)
        if end_ns <= self._last_stamp_ns:
            self._end_ns = 0
            return
        self._last_stamp_ns = self._end_ns = end_ns
        self._offsets_ns.append(sent.arrived_ns - end_ns)
        if before_ns and was_under_way:
            size.seconds.append((end_ns - before_ns) / 1e9)
