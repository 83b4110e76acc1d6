"""What decode steps cost, as measured, and how many drafted tokens survive.

A drafted step takes verify's time for its tokens, by verify's stamps, and the rest of the time from one result to the
next, which is draft's chain and what lies between. Both are means that forget: for batches of about the same size, by
the tokens of the step, and by the length of the chain. Steps without draft tokens are measured as a whole: with a draft
that takes in what was stashed, and with one that rests. What was not measured is read between the nearest measured
places, and beyond them taken to grow by half as much as their tokens.

The workers measure steps of some sizes when they are attached, with which the table begins. By how much either part of
a step takes longer than at first is followed on its own: that workers take turns makes no plain step longer.

Nothing here has a clock: the same measurements give the same answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.scheduler.sizes import leading_bits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from slipstream.common.wire.worker import StepCost
    from slipstream.scheduler.records import Counts, Ints, StepSlots

    Floats = NDArray[np.float64]

RESTING, KEPT = -1, 0
"""In place of the length of a chain: a step without draft tokens, in which the draft rests, or takes in the stash."""
_WINDOW, _LEAST_WEIGHT = 32.0, 3.0
"""Steps that a mean goes back over, and those that what is known counts for after a long time."""
_HALF_LIFE = 256
"""Steps after which half of what is known counts."""
_MOST_GROWTH = 4.0
"""Outlier clamp, as a multiple of the mean: a host pause must not count as step time."""
_GROWTH = 0.5
"""Part of a time that grows with the tokens, beyond what is measured."""
_DRIFT = 1 / _WINDOW
"""Part of what a step takes longer than expected that counts for all that is not measured now: the host is slower.

As much as a mean of a whole window takes in. So the level goes with the means: it returns when they do, and noise,
which these level out, moves it no further.
"""
_PLACE_BITS = 4
"""Leading bits of a number of tokens in which places of one mean are equal."""
_LEAST_PART = 1 / 1024
"""Least part of a step's time that counts as verify's, whose stamps may be equal: no step takes no time."""
_SERVER_WINDOW, _OWN_WINDOW = 1024.0, 64.0
"""Drafts of all sequences, and steps of one, that survivals go back over."""
_FIRST_HAZARD, _SERVER_WEIGHT = 0.3, 2.0
"""Assumed share of first tokens that are refused, and the drafts that it counts for."""
_FACTOR_WEIGHT, _OWN_WEIGHT = 4.0, 16.0
"""Refusals, and drafts, that the server's count for in the estimate of a sequence."""


class _Level:
    """How much longer than at first the work of a kind takes now, for reasons that are those of all its steps."""

    __slots__ = ("_num_compared", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._num_compared = round(1 / _DRIFT)
        """Times that were compared with what was known, since the workers' measurements were taken over."""

    def begin(self) -> None:
        """Has the next steps say by how much the work takes longer than the workers' measurements."""
        self._num_compared = 0

    def follow(self, growth: float, *, is_known: bool) -> None:
        """Takes in how many times as long as expected a step took.

        `is_known`: its place was measured while steps ran. If not, it says less of all others, the more of these were.
        """
        first = 1 / (2 + self._num_compared)
        self.value *= 1 + (max(_DRIFT, first) if is_known else first) * (min(growth, _MOST_GROWTH) - 1)
        self._num_compared += 1


class _Mean:
    """A mean of times that forgets, and the place where they were measured."""

    __slots__ = ("_level", "_step", "_value", "at", "weight")

    def __init__(self) -> None:
        self.at = self.weight = self._value = 0.0
        self._level, self._step = 1.0, 0

    def seconds(self, level: _Level) -> float:
        """The time at the present level."""
        return self._value * level.value / self._level

    def add(self, at: float, seconds: float, level: _Level, step: int, *, moves_level: bool) -> None:
        known = self.seconds(level)
        if moves_level and known > 0:
            level.follow(seconds / known, is_known=self.weight > _LEAST_WEIGHT)
        if self.weight > _LEAST_WEIGHT:
            aged = self.weight * 0.5 ** ((step - self._step) / _HALF_LIFE)
            self.weight, seconds = max(_LEAST_WEIGHT, aged), min(seconds, _MOST_GROWTH * known)
        self.weight = min(self.weight + 1, _WINDOW)
        self._value = known + (seconds - known) / self.weight
        self.at += (at - self.at) / self.weight
        self._level, self._step = level.value, step


class _Curve:
    """Times over a number of tokens, or of rows."""

    def __init__(self, level: _Level, *, place_bits: int | None = _PLACE_BITS) -> None:
        """`place_bits`: see _PLACE_BITS; None: each number is a place of its own."""
        self._level = level
        self._place_bits = place_bits
        self._means: dict[int, _Mean] = {}

    def __bool__(self) -> bool:
        return bool(self._means)

    def add(self, at: int, seconds: float, step: int, *, moves_level: bool = False) -> None:
        """`moves_level`: the time is compared with the one that was known."""
        place = at if self._place_bits is None else leading_bits(at, self._place_bits)
        mean = self._means.setdefault(place, _Mean())
        mean.add(at, seconds, self._level, step, moves_level=moves_level)

    def at(self, places: Floats) -> Floats:
        """The times at some places; they never fall."""
        means = sorted(self._means.values(), key=lambda mean: mean.at)
        known = np.array([mean.at for mean in means])
        seconds = np.maximum.accumulate(np.array([mean.seconds(self._level) for mean in means]))
        found: Floats = np.interp(places, known, seconds)
        # Before the first and after the last that is known.
        nearest = np.clip(places, known[0], known[-1])
        return found * (1 + _GROWTH * (places / nearest - 1))


class CostTable:
    """The costs of steps, in seconds. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._verify_level, self._chain_level = _Level(), _Level()
        self._verify: dict[int, _Curve] = {}
        """By the bucket of rows: verify's time, by the tokens of a step."""
        self._chains: dict[int, _Curve] = {}
        """By the bucket of rows: what a drafted step takes beyond that, by the length of the chain."""
        self._undrafted = {kind: _Curve(self._verify_level) for kind in (RESTING, KEPT)}
        """By rows."""
        self._step = 0

    def begin(self, costs: Iterable[StepCost]) -> None:
        """Takes over what verify measured when the epoch was opened."""
        for rows, num_draft_tokens, ns in costs:
            self._verify_level.begin()
            self._verify_of(rows).add(rows * (num_draft_tokens + 1), ns / 1e9, self._step)
            if not num_draft_tokens:
                self._undrafted[RESTING].add(rows, ns / 1e9, self._step)

    def begin_draft(self, costs: Iterable[StepCost]) -> None:
        """Begins anew with another draft, with what it measured when it was attached."""
        self._chain_level = _Level()
        self._chains, self._undrafted[KEPT] = {}, _Curve(self._verify_level)
        for rows, num_draft_tokens, ns in costs if self._verify else ():
            self._chain_level.begin()
            if num_draft_tokens:
                self._chain_of(rows).add(num_draft_tokens, ns / 1e9, self._step)
            else:
                verify_s = float(self.verify(rows, np.array([float(rows)]))[0])
                self._undrafted[KEPT].add(rows, verify_s + ns / 1e9, self._step)

    @property
    def knows_drafts(self) -> bool:
        """True once a drafted step was measured."""
        return bool(self._chains)

    def add(self, seconds: float, verify_s: float, *, rows: int, tokens: int, chain: int) -> None:
        """Takes in a step that decodes. `verify_s`: verify's part of it. `chain`: KEPT, RESTING, or its length."""
        self._step += 1
        verify_s = min(max(verify_s, _LEAST_PART * seconds), seconds)
        if chain != KEPT:
            self._verify_of(rows).add(tokens, verify_s, self._step, moves_level=True)
        if chain > KEPT:
            self._chain_of(rows).add(chain, seconds - verify_s, self._step, moves_level=True)
        else:
            self._undrafted[chain].add(rows, seconds, self._step)

    def undrafted(self, kind: int, rows: int) -> float:
        """The time of a step without draft tokens; where its kind is not known, that of the other one."""
        curve = self._undrafted[kind] or self._undrafted[RESTING + KEPT - kind]
        if curve:
            return float(curve.at(np.array([float(rows)]))[0])
        return float(self.verify(rows, np.array([float(rows)]))[0])

    def verify(self, rows: int, tokens: Floats) -> Floats:
        """Verify's time for steps of so many tokens, those of `rows` sequences."""
        return _nearest(self._verify, rows).at(tokens)

    def chains(self, rows: int, most: int) -> Floats:
        """The rest of a drafted step's time, for chains of 1 to `most` tokens: [most]."""
        return _nearest(self._chains, rows).at(np.arange(1.0, most + 1))

    def _verify_of(self, rows: int) -> _Curve:
        return self._verify.setdefault(_bucket(rows), _Curve(self._verify_level))

    def _chain_of(self, rows: int) -> _Curve:
        return self._chains.setdefault(_bucket(rows), _Curve(self._chain_level, place_bits=None))


class Survivals:
    """How likely drafted tokens are to be accepted, by position: of the server, and of each sequence.

    A chain goes on from one position to the next or ends there, so what was drafted says how many go on, also where
    chains have different lengths. A sequence begins with the server's hazards, all of which are scaled by how often its
    own tokens are refused, and then become its own, each by its own position.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int) -> None:
        self.most = num_draft_tokens
        """Positions."""
        self._generations = np.zeros(num_slots, np.int64)
        # [2]: chains that have reached a position, and those that have ended there.
        self._own = np.zeros((2, num_slots, num_draft_tokens))
        self._server = np.zeros((2, num_draft_tokens))
        self._places = np.arange(num_draft_tokens)

    def forget_draft(self) -> None:
        """Begins anew with another draft."""
        self._own[:], self._server[:] = 0.0, 0.0

    def take_in(self, rows: Ints, num_accepted: NDArray[np.uint32], num_drafted: Counts) -> None:
        """Takes in a step's outcome: [rows] each."""
        is_drafted = num_drafted > 0
        self._own[:, rows] *= 1 - 1 / _OWN_WINDOW  # also of those without: a sequence once refused is not so for ever
        rows, accepted, drafted = rows[is_drafted], num_accepted[is_drafted, None], num_drafted[is_drafted, None]
        if not len(rows):
            return
        reached = (self._places <= accepted) & (self._places < drafted)
        ended = reached & (self._places == accepted)
        self._own[:, rows] += reached, ended
        self._server *= _SERVER_WINDOW / (_SERVER_WINDOW + len(rows))
        self._server += reached.sum(axis=0), ended.sum(axis=0)

    def of(self, slots: StepSlots, most: int) -> Floats:
        """The probability that each of the first `most` tokens is accepted: [slots, most]."""
        rows = slots.rows
        is_new = self._generations[rows] != slots.generations
        if is_new.any():
            self._own[:, rows[is_new]] = 0.0
            self._generations[rows] = slots.generations
        hazards, before = np.empty(most), _FIRST_HAZARD
        for place, (reached, ended) in enumerate(self._server[:, :most].T.tolist()):
            before = (ended + _SERVER_WEIGHT * before) / (reached + _SERVER_WEIGHT)
            hazards[place] = before
        reached, ended = self._own[:, rows, :most]
        expected = (reached * hazards).sum(axis=1)
        factors = (ended.sum(axis=1) + _FACTOR_WEIGHT) / (expected + _FACTOR_WEIGHT)
        scaled = np.minimum(hazards * factors[:, None], 1.0)
        found: Floats = (1 - (ended + _OWN_WEIGHT * scaled) / (reached + _OWN_WEIGHT)).cumprod(axis=1)
        return found


def _nearest(curves: dict[int, _Curve], rows: int) -> _Curve:
    """That of the most similar size of batch."""
    bucket = _bucket(rows)
    return curves[min(curves, key=lambda other: (abs(other - bucket), other))]


def _bucket(num_rows: int) -> int:
    """Sizes of batches for which a step takes about as long: 1, 2, 3 to 4, 5 to 8 and so on."""
    return (num_rows - 1).bit_length()
