"""A policy that has the draft rest and come back, and chooses numbers of draft tokens, at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.scheduler.draft_policy import DraftPolicy

if TYPE_CHECKING:
    from random import Random

    from slipstream.scheduler.records import Counts, StepSlots


class RandomPolicy(DraftPolicy):
    """Does not look at costs."""

    def __init__(self, rng: Random, changes: float = 0.15) -> None:
        """`changes`: share of the decode steps after which it changes its mind."""
        super().__init__()
        self._rng = rng
        self._changes = changes
        self.num_rests = 0
        self.counts: set[int] = set()
        """Numbers of draft tokens that were chosen."""

    def choose(self, slots: StepSlots, most: Counts, *, is_ragged: bool) -> Counts:
        """See `ChooseDraftTokens`."""
        part = np.array([self._rng.random() for _ in most])
        chosen = (most * self._rng.randrange(2) if not is_ragged else np.rint(part * most)).astype(np.int32)
        self.counts |= set(chosen.tolist())
        return chosen

    def decodes_alone(self) -> bool:
        """See `DraftPolicy.decodes_alone`."""
        return self._rng.random() < self._changes

    def take_in(self, *_: float, **__: float) -> None:
        """See `DraftPolicy.take_in`."""
        if not self.is_held and self._rng.random() < self._changes:
            self.drafts = not self.drafts
            self.num_rests += not self.drafts
