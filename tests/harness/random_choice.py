"""A choice of draft tokens at random, which has the draft rest and come back at random, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.scheduler.draft_choice import DraftChoice

if TYPE_CHECKING:
    from random import Random

    from slipstream.scheduler.records import Counts, StepOutcome, StepSlots


class RandomChoice(DraftChoice):
    """Does not look at costs."""

    def __init__(self, rng: Random, changes: float = 0.15) -> None:
        """`changes`: share of the decode steps after which it changes its mind."""
        super().__init__(1, 1)
        self._rng = rng
        self._changes = changes
        self.num_rests = 0
        self.counts: set[int] = set()
        """Numbers of draft tokens that were chosen."""

    def choose(self, slots: StepSlots, most: Counts, *, evens: tuple[int, ...]) -> Counts:
        """See `ChooseDraftTokens`."""
        part = np.array([self._rng.random() for _ in most])
        # Each number once at least, where rows may differ the largest first: few steps may draw only some of them.
        numbers = (0, *evens) if evens else range(int(most.max()), -1, -1)
        new = [number for number in numbers if number not in self.counts and number <= most.max()]
        if evens:
            chosen = np.minimum(most, self._rng.choice(new or numbers)).astype(np.int32)
        else:
            chosen = np.rint(part * most).astype(np.int32)
            if new:
                chosen[most.argmax()] = new[0]
        self.counts |= set(chosen.tolist())
        return chosen

    def decodes_alone(self) -> bool:
        """See `DraftChoice.decodes_alone`."""
        return self._rng.random() < self._changes

    def take_in(self, outcome: StepOutcome | None = None) -> None:
        """See `DraftChoice.take_in`."""
        if not self.is_held and self._rng.random() < self._changes:
            self.drafts = not self.drafts
            self.num_rests += not self.drafts

    def took(self, *_: object, has_draft: bool) -> None:
        """See `DraftChoice.took`: called for a step without a draft as well."""
        if not has_draft:
            self.take_in()
