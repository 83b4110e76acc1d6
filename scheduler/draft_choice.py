"""How many tokens are drafted for each sequence in the next step: as many as bring tokens fastest.

A step is to maximise its expected tokens per second, `(N + sum of survivals) / (draft + verify)`, by the costs and
survivals of `costs.py`, which results bring one step late. For each length of draft's chain the tokens that are most
likely to be accepted are taken, whichever sequences they belong to, as long as the quotient grows; the best length is
taken. No tokens at all is plain decoding, and where that stays the best, the draft rests.

What is not run cannot be known. One rule: TRIAL_SHARE of the time is saved up, and once what was run longest ago is
expected to lose no more than is saved, it is tried.

Under steady arrivals, when every step would take in prompts, which says little of decoding, ALONE_STEPS only decode
after every MIXED_STEPS, or after each until everything was tried once; the last of them is measured.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.scheduler.costs import KEPT, RESTING, CostTable, Survivals
from slipstream.scheduler.records import RestCause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from slipstream.common.wire.worker import StepCost
    from slipstream.scheduler.costs import Floats
    from slipstream.scheduler.records import Counts, Step, StepOutcome, StepSlots

TRIAL_SHARE = 1 / 256
"""Share of the time that trials may lose."""
MOST_SAVED = 16
"""The most that is saved, in steps. Until everything was tried once with a new draft, trials need no savings."""
FIRST_STEPS, LEAST_PAUSE = 24, 256
"""Steps with a new draft before anything else is tried, and between two trials of the same."""
FIRST_TOKENS = 4
"""Draft tokens of each sequence in steps before any drafted step was measured."""
TRIAL_STEPS = 8
"""Steps of a trial for which the draft has to rest, or to take part again."""
MARGIN, PATIENCE = 0.03, 16
"""Least gain, in so many steps in turn, for which the draft rests or takes part again."""
MIXED_STEPS, ALONE_STEPS = 16, 2
"""Mixed steps in a row, and the steps after them that only decode."""
_SETTLING = 2
"""The first steps of a rest, which say nothing: those before them were drafted."""


class _Option(NamedTuple):
    """A way to make the next step."""

    chain: int
    """Length of draft's chain; KEPT or RESTING without one."""
    tokens: float
    """Expected."""
    seconds: float
    counts: Counts | None = None
    """Draft tokens of each sequence; None if each has as many as the chain, if it may."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def loss_s(self, best: _Option) -> float:
        """Seconds that it takes longer for its tokens than the best."""
        return max(0.0, self.seconds - self.tokens / best.rate)


def _fastest(options: Iterable[_Option]) -> _Option:
    return max(options, key=lambda option: option.rate)


class DraftChoice:
    """Chooses for one epoch. Belongs to the loop's thread, but for `held`."""

    def __init__(
        self, num_slots: int, num_draft_tokens: int, on_rest: Callable[[RestCause], None] = lambda _: None
    ) -> None:
        """`num_draft_tokens`: the most of a draft. `on_rest` is told of each rest, of a trial's when it ends."""
        self.drafts = True
        """Whether the draft should take part in steps. It takes some steps until it does."""
        self.is_held = False
        """See `held`."""
        self.costs = CostTable()
        self.survivals = Survivals(num_slots, num_draft_tokens)
        self._on_rest = on_rest
        self._most = num_draft_tokens
        """K of the draft that took part last."""
        self._evens: tuple[int, ...] = ()
        """See `ChooseDraftTokens`."""
        self._saved_s = 0.0
        """Seconds that trials may lose."""
        self._step = 0
        self._begun, self._is_new = 0, True
        """The step when this draft began; whether not everything was tried since."""
        self._run_at: dict[int, int] = {}
        """By length of the chain, KEPT and RESTING: the last step of that kind."""
        self._num_against = 0
        """The last steps after which it seemed better to rest, or to take part again."""
        self._num_stayed = 0
        """Steps of the present rest."""
        self._trial_left = 0
        """Steps until the end of a rest that is a trial; or of drafted steps after a rest, which are to be measured."""
        self._num_back = 0
        """Steps until the draft took part again, when it last did."""
        self._num_mixed = self._num_alone = 0
        """Mixed steps that were sent since ALONE_STEPS only decoded, and steps that have only decoded since."""

    def joined(self, costs: Iterable[StepCost] = ()) -> None:
        """Begins anew with another draft: only what is known of plain steps still holds. `costs`: what it measured."""
        self.costs.begin_draft(costs)
        self.survivals.forget_draft()
        self._turn(drafts=True)
        self._saved_s, self._trial_left, self._begun = 0.0, 0, self._step
        self._is_new = not self.costs.knows_drafts
        # What was measured need not be tried soon.
        self._run_at = {} if self._is_new else dict.fromkeys(range(RESTING, self.survivals.most + 1), self._step)

    @property
    def rests(self) -> bool:
        """True if the draft is to take part in no step. Any thread."""
        return not (self.drafts or self.is_held)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Each step has draft tokens meanwhile: a draft is judged. Any thread."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def decodes_alone(self) -> bool:
        """Whether the next step is to take in no prompts if it can decode, so that it can be measured."""
        return self._num_mixed >= (1 if self._is_new else MIXED_STEPS)

    def sending(self, *, decodes: bool, takes_prompts: bool) -> None:
        """Takes notice of the next step."""
        if decodes and takes_prompts:
            self._num_mixed, self._num_alone = self._num_mixed + 1, 0
        elif decodes:
            self._num_alone += 1
            if self._num_alone >= ALONE_STEPS:
                self._num_mixed = 0

    def choose(self, slots: StepSlots, most: Counts, *, evens: tuple[int, ...]) -> Counts:
        """Implements `ChooseDraftTokens`."""
        self._most, self._evens = int(most.max()), evens
        if not self.costs.knows_drafts:
            first = [even for even in evens if even <= FIRST_TOKENS] or evens[:1] or (FIRST_TOKENS,)
            return np.minimum(most, first[-1])
        self._step += 1
        survivals = self._survivals(slots, most)
        evenly = self._evenly(survivals)
        if self.is_held:
            return self._run(_fastest(evenly), most)
        kept, resting = self._undrafted(KEPT, slots), self._undrafted(RESTING, slots)
        options = [kept, *evenly]
        best = _fastest(options)
        if not evens and (likely := self._most_likely(survivals)).rate > best.rate:
            best = likely
        if self._trial_left:
            self._trial_left -= 1
            return self._run(_fastest(evenly), most)
        is_against = best.chain == KEPT or resting.rate > (1 + MARGIN) * best.rate
        self._num_against = self._num_against + 1 if is_against else 0
        if self._num_against >= PATIENCE:
            self._turn(drafts=False)
            self._on_rest(RestCause.SLOWER)
            return self._run(kept, most)
        self._is_new = not {option.chain for option in (resting, *options)} <= self._run_at.keys()
        return self._run(self._tried([resting, *options], best) or best, most)

    def take_in(self, outcome: StepOutcome) -> None:
        """Takes in the outcome of a step's draft tokens."""
        self.survivals.take_in(outcome.rows, outcome.num_accepted, outcome.num_drafted)

    def took(self, step: Step, seconds: float, verify_s: float, *, has_draft: bool) -> None:
        """Takes in the time of a step that decodes, from the result before, and verify's part of it.

        `has_draft`: whether a draft took part in it, or was stashed for.
        """
        chain = (step.most_draft_tokens or KEPT) if step.is_kept else RESTING
        if chain == RESTING and has_draft:
            return
        if chain == RESTING:
            self._num_stayed += 1
            self._num_back += self.drafts
            if self._num_stayed <= _SETTLING:
                return
            self._run_at[RESTING] = self._step
        rows = len(step.decoded.slots)
        self.costs.add(seconds, verify_s, rows=rows, tokens=step.num_decoded_tokens, chain=chain)
        self._saved_s = min(self._saved_s + seconds * TRIAL_SHARE, MOST_SAVED * seconds)
        if chain == RESTING and self.rests:
            self._step += 1
            self._rest_on(step.decoded)

    def _rest_on(self, slots: StepSlots) -> None:
        """Decides whether the draft rests on."""
        if not self.costs.knows_drafts:
            return
        resting, most = self._undrafted(RESTING, slots), np.full(len(slots.slots), self._most, np.int32)
        drafted = _fastest(self._evenly(self._survivals(slots, most)))
        if self._trial_left:
            self._trial_left -= 1
            if not self._trial_left:
                is_slower = drafted.rate > resting.rate
                self._on_rest(RestCause.PROBE if is_slower else RestCause.SLOWER)
                if is_slower:
                    self._turn(drafts=True)
            return
        self._num_against = self._num_against + 1 if drafted.rate > (1 + MARGIN) * resting.rate else 0
        is_trial = self._tried([drafted], resting) is not None
        if is_trial or self._num_against >= PATIENCE:
            self._turn(drafts=True)
            self._trial_left = TRIAL_STEPS

    def _turn(self, *, drafts: bool) -> None:
        if drafts and not self.drafts:
            self._num_back = 0
        self.drafts = drafts
        self._num_stayed = self._num_against = 0

    def _survivals(self, slots: StepSlots, most: Counts) -> Floats:
        """[slots, K]: survivals, 0 after the draft tokens that a sequence may have."""
        places = np.arange(self._most)
        found: Floats = np.where(places < most[:, None], self.survivals.of(slots, self._most), 0.0)
        return found

    def _undrafted(self, kind: int, slots: StepSlots) -> _Option:
        rows = len(slots.slots)
        return _Option(kind, rows, self.costs.undrafted(kind, rows))

    def _evenly(self, survivals: Floats) -> list[_Option]:
        """As many tokens for each sequence as the chain has, if it may have them."""
        rows, most = len(survivals), self._most
        # Not those that are longer than any sequence may have, but for the shortest of them.
        lengths = np.arange(1, most + 1)
        if self._evens:
            lengths = np.array([even for before, even in pairwise((0, *self._evens)) if before < most])
        tokens = rows + survivals.sum(axis=0).cumsum()[np.minimum(lengths, most) - 1]
        chosen = rows * lengths if self._evens else np.count_nonzero(survivals, axis=0).cumsum()
        chains = self.costs.chains(rows, int(lengths[-1]))[lengths - 1]
        seconds = chains + self.costs.verify(rows, (rows + chosen).astype(np.float64))
        return list(map(_Option, lengths.tolist(), tokens.tolist(), seconds.tolist()))

    def _most_likely(self, survivals: Floats) -> _Option:
        """The best with the most likely tokens, whichever sequences they belong to."""
        # Sorted where they are in the order of positions, and stably: a token follows those before it.
        rows, values = len(survivals), survivals.T.ravel()
        order = np.argsort(-values, kind="stable")[: np.count_nonzero(values > 0)]
        values, places = values[order], order // rows
        verify_s = self.costs.verify(rows, np.arange(rows, rows + len(order) + 1, dtype=np.float64))
        best, num_chosen = _Option(KEPT, rows, np.inf), 0
        for length, chain_s in enumerate(self.costs.chains(rows, self._most).tolist(), start=1):
            tokens = rows + values[places < length].cumsum()
            if not len(tokens):
                break
            seconds = chain_s + verify_s[1 : len(tokens) + 1]
            at = int((tokens / seconds).argmax())
            option = _Option(length, float(tokens[at]), float(seconds[at]))
            if option.rate > best.rate:
                best, num_chosen = option, at + 1
        chosen = order[places < best.chain][:num_chosen] % rows
        return best._replace(counts=np.bincount(chosen, minlength=rows).astype(np.int32))

    def _tried(self, options: list[_Option], best: _Option) -> _Option | None:
        """What is tried in place of the best, if it is time: what was run longest ago, once its loss is saved."""
        if self._step - self._begun < FIRST_STEPS or (self._num_mixed and not self._num_alone):
            return None  # too little is known of the draft, or its time would be that of prompts
        oldest = min(options, key=lambda option: self._run_at.get(option.chain, -1))
        is_turn = RESTING in (oldest.chain, best.chain)
        loss_s = oldest.loss_s(best) * (TRIAL_STEPS + self._num_back if is_turn else 1)
        last = self._run_at.get(oldest.chain)
        is_early = last is not None and self._step - last < LEAST_PAUSE
        is_dear = loss_s > self._saved_s and not self._is_new
        if oldest.chain == best.chain or is_dear or is_early:
            return None
        self._saved_s = max(0.0, self._saved_s - loss_s)
        self._run_at[oldest.chain] = self._step
        return oldest

    def _run(self, option: _Option, most: Counts) -> Counts:
        """The numbers of draft tokens; has the draft rest, if that is the option."""
        if option.chain == RESTING:
            self._turn(drafts=False)
            self._trial_left = TRIAL_STEPS
        self._run_at[option.chain] = self._step
        return np.minimum(most, max(option.chain, 0)) if option.counts is None else option.counts
