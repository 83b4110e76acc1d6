"""Whether the draft drafts in the next decode step: as long as drafted steps bring tokens faster than plain ones.

Both costs are measured, as mean times of a decode step for batches of about the same size and of a prompt's token, and
so are the tokens that a drafted step brings each sequence. A token of the output costs its part of a decode step, and
of the prompts that are taken in meanwhile. The draft rests where plain steps are faster, and comes back where they are
not.

What is not seen cannot be known, so the other kind of step is tried now and then: once for each size of batch, and
otherwise in one of PROBE_SHARE steps at most, those in which the draft catches up included. In between, what is known
of it goes up and down with the steps that are seen: a host that is slower for some seconds is so for both.

The time of a mixed step is that of its chunks more than of decoding, so under steady arrivals, when every step would
take in prompts, some decode alone (`decodes_alone`): ALONE_STEPS behind every MIXED_STEPS, and behind each mixed one
while it matters: in a probe, at a size of batch that is new, and while the other kind seems faster. Only the last of
them counts as a decode step, because the chunks of a mixed step may be taken in during the step behind it: by a head,
and on a CPU by verify. What mixed steps take beyond a decode step, a plain one if they draft none, is the time of their
prompts; what they accept counts as anywhere else. No step waits for that: decoding is done in any case, and prompts
come in with every other step at worst of three.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.scheduler.records import RestCause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.scheduler.records import Counts, StepSlots

MARGIN = 0.03
"""The other kind of step has to be faster by so much."""
PATIENCE = 16
"""In so many decode steps, one after the other."""
LEAST_STAY = 64
"""Decode steps between two changes, at least."""
LONG_STAY, MOST_STAYS = 1024, 16
"""A change after fewer steps doubles the next stay, up to so many times: costs that go up and down are no reason."""
STAY_PER_STEP_BACK = 8
"""The same for each step that the draft took to come back last: its way has to pay."""
PROBE_STEPS = {False: 8, True: 16}
"""Steps that are measured in a probe of plain and of drafted ones, which also say how much is accepted."""
CLOSE = 0.25
"""Where the two kinds differ by less, a probe goes on for CLOSE_PROBES times as many steps."""
CLOSE_PROBES = 3
PROBE_SHARE = 128
FIRST_LOOK = 32
"""Decode steps of a batch size, before the other kind of step is looked at there for the first time."""
MOST_BACKOFF = 4
"""Probes that change nothing become rarer, up to so many times."""
MIXED_STEPS, ALONE_STEPS = 16, 2
"""So many mixed steps one behind the other, then so many that decode alone."""

_SETTLING = 2
"""The first steps after a change that say nothing: the pipeline was filled with others."""
_ASSUMED_RATIO = 1.1
"""Time of a drafted step to that of a plain one, as long as one of them was never seen."""
_TIME_WINDOW, _TOKENS_WINDOW, _PROMPT_WINDOW = 64.0, 512.0, 8192.0
"""Steps, sequences of steps, and tokens that a mean goes back over, about."""
_MOST_GROWTH, _FEW = 4.0, 4.0
"""A step counts at most as so many times the mean of more than a few: a pause of the host is no step."""


class _Mean:
    """A mean that forgets slowly."""

    __slots__ = ("reference", "value", "weight", "window")

    def __init__(self, window: float) -> None:
        self.value = self.weight = 0.0
        self.reference = 0.0
        """The value when steps of the other kind were seen last; 0 if they are seen now."""
        self.window = window

    def add(self, value: float, weight: float = 1.0) -> None:
        self.weight = min(self.weight + weight, max(self.window, weight))
        self.value += (value - self.value) * weight / self.weight

    def add_time(self, seconds: float, weight: float = 1.0) -> None:
        self.add(seconds if self.weight < _FEW else min(seconds, _MOST_GROWTH * self.value), weight)

    def age(self, weight: float) -> None:
        """Has what comes now count for more: what is known weighs so much at most."""
        self.weight = min(self.weight, weight)


class DraftPolicy:
    """Decides for one epoch. Belongs to the loop's thread, but for `held`."""

    def __init__(self, on_rest: Callable[[RestCause], None] = lambda _: None) -> None:
        """`on_rest` is told of each rest, a probe's once it is over."""
        self.drafts = True
        """Whether the draft should draft. It takes some steps until it does."""
        self.is_held = False
        """See `held`."""
        self._on_rest = on_rest
        self._seconds: dict[bool, dict[int, _Mean]] = {False: {}, True: {}}
        """Time of a plain and of a drafted step, by bucket of batch sizes."""
        self._tokens = _Mean(_TOKENS_WINDOW)
        """That a drafted step brings a sequence."""
        self._prompt_seconds = {False: _Mean(_PROMPT_WINDOW), True: _Mean(_PROMPT_WINDOW)}
        """Time of a prompt's token, without and with a draft that takes it in, too."""
        self._prompt_tokens = _Mean(_PROMPT_WINDOW)
        """Taken in for each token of output."""
        self._num_prompt_tokens = 0
        """Taken in since the last decode step."""
        self._beside_s, self._num_beside = 0.0, 0
        """Seconds that mixed steps took beyond decoding, and their prompt tokens; summed since the last decode step."""
        self._is_behind_mixed = False
        """Whether the last step was mixed."""
        self._num_mixed = self._num_alone = 0
        """Mixed steps that were sent since ALONE_STEPS decoded alone, and steps that have decoded alone since."""
        self._is_unsure = True
        """Whether decode steps are to be measured more often."""
        self._looked: set[tuple[bool, int]] = set()
        """Kinds of steps and buckets that were probed."""
        self._num_back = 0
        """Decode steps until the draft drafted again, when it came back last."""
        self._num_stayed = 0
        """Decode steps since the draft does as it should."""
        self._num_against = 0
        """The last decode steps after which the other kind seemed faster."""
        self._probe_left = 0
        """Steps to measure until the end of a probe."""
        self._is_long_probe = False
        self._num_disturbed: int | None = None
        """Steps since a probe began; None once all is as before."""
        self._stays = self._backoff = 1
        self._until_probe = self._first_probe

    def joined(self) -> None:
        """Begins anew with another draft: only what is known of plain steps still holds."""
        self._seconds[True], self._prompt_seconds[True] = {}, _Mean(_PROMPT_WINDOW)
        self._tokens = _Mean(_TOKENS_WINDOW)
        self._looked = {(is_drafted, bucket) for is_drafted, bucket in self._looked if not is_drafted}
        self._change(drafts=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing changes meanwhile: a draft that begins to draft goes on. Any thread."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def choose(self, slots: StepSlots, most: Counts, *, is_ragged: bool) -> Counts:
        """Implements `ChooseDraftTokens`."""
        return most

    def decodes_alone(self) -> bool:
        """Whether the next step is to take in no prompts if it can decode, so that it can be measured."""
        return self._num_mixed >= (1 if self._is_unsure else MIXED_STEPS)

    def sending(self, *, decodes: bool, takes_prompts: bool) -> None:
        """Takes notice of the next step."""
        if decodes and takes_prompts:
            self._num_mixed, self._num_alone = self._num_mixed + 1, 0
        elif decodes:
            self._num_alone += 1
            if self._num_alone >= ALONE_STEPS:
                self._num_mixed = 0

    def take_in(
        self,
        seconds: float,
        num_rows: int,
        num_tokens: int,
        *,
        is_drafted: bool,
        num_prompt_tokens: int = 0,
        has_guesses: bool = True,
    ) -> None:
        """Takes in a decode step of `num_rows` sequences that brought `num_tokens`, `seconds` after the step before.

        `num_prompt_tokens`: those that it took in beside, in a mixed step. `has_guesses`: False for one that drafts
        none, and so takes as long as a plain one beyond its prompts; it says nothing of the tokens of drafted ones.
        """
        if self._num_disturbed is not None:
            self._num_disturbed += 1
        self._count_output(num_tokens, num_prompt_tokens)
        if is_drafted is not self.drafts:
            self._num_back += self.drafts
            return
        self._num_stayed += 1
        if self._num_stayed <= _SETTLING:
            return
        bucket, known = _bucket(num_rows), self._seconds[is_drafted and has_guesses]
        if is_drafted and has_guesses:
            self._tokens.add(num_tokens / num_rows, num_rows)
        self._until_probe -= not self.is_held
        was_mixed, self._is_behind_mixed = self._is_behind_mixed, num_prompt_tokens > 0
        if was_mixed or num_prompt_tokens:
            self._take_in_beside(seconds - known[bucket].value if bucket in known else None, num_prompt_tokens)
            return
        known.setdefault(bucket, _Mean(_TIME_WINDOW)).add_time(seconds)
        if not self.is_held:
            if self._probe_left:
                self._go_on_with_probe(num_rows)
            else:
                self._decide(num_rows)
        self._is_unsure = self._probe_left > 0 or known[bucket].weight < FIRST_LOOK or 0 < self._num_against < PATIENCE

    def _take_in_beside(self, seconds: float | None, num_prompt_tokens: int) -> None:
        """Takes in a mixed step, or the step behind one, by its time beyond that of decoding, if that is known."""
        if seconds is not None:
            self._beside_s += seconds
            self._num_beside += num_prompt_tokens
        if not num_prompt_tokens or seconds is None:
            if self._num_beside:
                mean = self._prompt_seconds[self.drafts]
                mean.add_time(max(0.0, self._beside_s) / self._num_beside, self._num_beside)
            self._beside_s, self._num_beside = 0.0, 0

    def _count_output(self, num_tokens: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens
        self._prompt_tokens.add(self._num_prompt_tokens / max(1, num_tokens), num_tokens)
        self._num_prompt_tokens = 0

    def take_in_prompts(self, seconds: float, num_tokens: int, *, is_drafted: bool) -> None:
        """Takes in a prefill step of so many tokens, `seconds` after the step before.

        `is_drafted`: whether draft took them in, too.
        """
        self._num_prompt_tokens += num_tokens
        if is_drafted is self.drafts and self._num_stayed > _SETTLING:
            self._prompt_seconds[is_drafted].add_time(seconds / num_tokens, num_tokens)

    def _decide(self, num_rows: int) -> None:
        if self._num_disturbed is not None:
            self._until_probe = PROBE_SHARE * self._num_disturbed * self._backoff
            self._backoff, self._num_disturbed = min(2 * self._backoff, MOST_BACKOFF), None
        self._num_against = self._num_against + 1 if self._is_other_faster(num_rows) else 0
        if self._num_against >= PATIENCE and self._num_stayed >= self._stay:
            self._stays = min(2 * self._stays, MOST_STAYS) if self._num_stayed < LONG_STAY else 1
            self._change(drafts=not self.drafts)
            if not self.drafts:
                self._on_rest(RestCause.SLOWER)
        elif self._until_probe <= 0 or self._is_first_look(_bucket(num_rows)):
            self._probe(_bucket(num_rows))

    def _change(self, *, drafts: bool) -> None:
        self._turn(drafts=drafts)
        self._probe_left, self._num_disturbed = 0, None
        self._until_probe, self._backoff = self._first_probe, 1

    def _turn(self, *, drafts: bool, is_probe: bool = False) -> None:
        if drafts is not self.drafts:
            for bucket, mean in self._seconds[drafts].items():
                mean.value *= self._drift(bucket)
        for mean in self._seconds[drafts].values():
            mean.reference = 0.0 if is_probe else mean.value
        self.drafts = drafts
        self._num_stayed = self._num_against = 0
        self._beside_s, self._num_beside = 0.0, 0
        self._is_behind_mixed, self._is_unsure = False, True
        if drafts:
            self._num_back = 0

    def _drift(self, bucket: int) -> float:
        """How much longer steps take than when the other kind was seen last."""
        own = self._seconds[self.drafts].get(bucket)
        return own.value / own.reference if own is not None and own.reference else 1.0

    @property
    def _stay(self) -> int:
        return self._stays * max(LEAST_STAY, STAY_PER_STEP_BACK * self._num_back)

    @property
    def _first_probe(self) -> int:
        """Steps until the first probe after a change."""
        return PROBE_SHARE * (PROBE_STEPS[not self.drafts] + _SETTLING + self._num_back)

    def _probe(self, bucket: int) -> None:
        other = not self.drafts
        self._looked.add((other, bucket))
        self._probe_left, self._num_disturbed, self._is_long_probe = PROBE_STEPS[other], 0, False
        for mean in self._seconds[other].values():
            mean.age(PROBE_STEPS[other] / 2)
        if other:
            self._tokens.age(PROBE_STEPS[other] / 2)
        self._turn(drafts=other, is_probe=True)

    def _go_on_with_probe(self, num_rows: int) -> None:
        self._probe_left -= 1
        if self._probe_left:
            return
        if abs(self._gain(num_rows) - 1) < CLOSE and not self._is_long_probe:
            self._probe_left, self._is_long_probe = CLOSE_PROBES * PROBE_STEPS[self.drafts], True
            return
        is_rest, has_failed = not self.drafts, self._is_other_faster(num_rows, margin=-MARGIN)
        if has_failed:
            self._turn(drafts=not self.drafts)
        else:
            self._change(drafts=self.drafts)
        if is_rest:
            self._on_rest(RestCause.PROBE if has_failed else RestCause.SLOWER)

    def _is_first_look(self, bucket: int) -> bool:
        other = not self.drafts
        if bucket in self._seconds[other] or (other, bucket) in self._looked:
            return False
        if other and self._tokens.weight and self._tokens.value < 1 + MARGIN:
            return False  # hardly a token is accepted, whatever a draft costs here
        return self._seconds[self.drafts][bucket].weight >= FIRST_LOOK

    def _is_other_faster(self, num_rows: int, *, margin: float = MARGIN) -> bool:
        gain = self._gain(num_rows)
        return (1 / gain if self.drafts else gain) > 1 + margin

    def _gain(self, num_rows: int) -> float:
        """Tokens per second of drafted steps to those of plain ones, as far as is known."""
        plain, drafted = self._seconds[False], self._seconds[True]
        known = plain.keys() & drafted.keys()
        if not self._tokens.weight:
            return 1.0
        if not known:
            return self._tokens.value / _ASSUMED_RATIO
        nearest = min(known, key=lambda other: abs(other - _bucket(num_rows)))
        times = {is_drafted: means[nearest].value for is_drafted, means in self._seconds.items()}
        times[not self.drafts] *= self._drift(nearest)
        seconds = times[False] + num_rows * self._prompts_of_token(False)
        with_draft = times[True] + num_rows * self._tokens.value * self._prompts_of_token(True)
        return self._tokens.value * seconds / with_draft

    def _prompts_of_token(self, is_drafted: bool) -> float:
        """Time of the prompts that are taken in for each token of output."""
        mean, other = self._prompt_seconds[is_drafted], self._prompt_seconds[not is_drafted]
        return self._prompt_tokens.value * (mean if mean.weight else other).value


def _bucket(num_rows: int) -> int:
    """Sizes of batches for which a step takes about as long: 1, 2, 3 to 4, 5 to 8 and so on."""
    return (num_rows - 1).bit_length()
