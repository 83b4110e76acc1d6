"""Whether a new draft stays: the draft tokens that both drafts have are compared, not the number that each drafts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from slipstream.common.wire.server import DraftSwap, SwapOutcome, SwapTerms
from slipstream.scheduler.attachment import DraftAttachment
from slipstream.scheduler.draft import Draft
from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.observer import DecodeRecord
from slipstream.scheduler.observer import figures as figures_of
from slipstream.scheduler.records import DraftTarget
from slipstream.scheduler.swap import IDLE_S, LOOK_S, Swap

NUM_STEPS = 10
OLD, NEW, BACK = 1, 2, 3


def joined_draft(number: int, target: DraftTarget) -> Draft:
    """A draft that takes part."""
    description = SimpleNamespace(algorithm="standalone")
    attachment = SimpleNamespace(number=number, description=description, num_draft_tokens=target.num_draft_tokens)
    draft = Draft(cast("DraftAttachment", attachment), target.address)
    draft.joined_at = 0.0
    return draft


class FakeDrafts:
    """Implements `Drafts`: each draft that is attached joins at once, and the first decodes some steps."""

    def __init__(self, accepted: list[int], *, num_drafted: int = 4) -> None:
        """`num_drafted`: draft tokens of each sequence in the steps of the new draft."""
        self.record = DecodeRecord()
        self._accepted = accepted
        self._num_drafted = num_drafted
        self._now_ns = 1
        self._numbers = iter((NEW, BACK))

    def decode(
        self,
        number: int,
        accepted: list[int],
        *,
        step_ms: int = 1,
        num_ending: int = 0,
        num_steps: int = NUM_STEPS + 1,
        takes_in_only: bool = False,
    ) -> None:
        """Steps of sequences of which so many draft tokens were accepted, and of prompts that end in them.

        The first step of all has no time, as it follows on none.
        """
        decoded, chunks = SimpleNamespace(rows=np.arange(len(accepted))), (None,) * num_ending
        most = 0 if takes_in_only else self._num_drafted if number == NEW else 4
        step = SimpleNamespace(most_draft_tokens=most, is_kept=True, decoded=decoded, chunks=chunks)
        accepted = accepted + [0] * num_ending
        for _ in range(num_steps):
            self._now_ns += step_ms * 1_000_000
            outcome = SimpleNamespace(
                rows=np.arange(len(accepted)),
                num_accepted=np.array(accepted),
                num_tokens=np.array(accepted) + 1,
                num_drafted=np.full(len(accepted), most, np.int32),
            )
            draft = SimpleNamespace(number=number)
            sent: Any = SimpleNamespace(step=step, outcome=outcome, draft=draft, arrived_ns=self._now_ns)
            self.record.add(sent)

    def attach(self, epoch: Epoch, target: DraftTarget) -> Draft:
        """See `Drafts.attach`."""
        draft = joined_draft(next(self._numbers), target)
        assert epoch.choice is not None
        assert epoch.choice.is_held is (draft.number == NEW), "a new draft drafts until it is judged"
        if draft.number == NEW:
            self.decode(NEW, self._accepted)
        return draft

    def want(self, target: DraftTarget | None) -> None:
        """See `Drafts.want`."""

    def wait_for(self, epoch: Epoch, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Drafts.wait_for`."""
        return is_so()

    def take_away(self, epoch: Epoch, *, but: Draft | None = None) -> None:
        """See `Drafts.take_away`."""


class BusyDrafts(FakeDrafts):
    """The new draft first drafts none in a few steps, as many prompts wait."""

    def __init__(self, accepted: list[int]) -> None:
        super().__init__(accepted)
        self.now = 0.0
        self._num_looks = 0

    def attach(self, epoch: Epoch, target: DraftTarget) -> Draft:
        """See `Drafts.attach`."""
        accepted, self._accepted = self._accepted, []
        draft = super().attach(epoch, target)
        self._accepted = accepted
        return draft

    def wait_for(self, epoch: Epoch, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Drafts.wait_for`. Nearly so much time passes that no step more is awaited."""
        if timeout_s == LOOK_S:
            self.now += 0.9 * IDLE_S
            self._num_looks += 1
            is_busy = self._num_looks < 5
            self.decode(NEW, [0, 0] if is_busy else self._accepted, takes_in_only=is_busy)
        return super().wait_for(epoch, is_so, timeout_s)


def swap(before: tuple[int, list[int]], after: tuple[int, list[int]], drafts: FakeDrafts | None = None) -> SwapOutcome:
    """Of two drafts, each with its draft tokens and the accepted ones of its sequences."""
    drafts, old = drafts or FakeDrafts(after[1]), DraftTarget("unix:/old", before[0])
    drafts.decode(OLD, before[1])
    epoch = cast("Epoch", SimpleNamespace(decodes=drafts.record, choice=DraftChoice(1, 1)))
    request = DraftSwap(address="unix:/new", terms=SwapTerms(judge_steps=NUM_STEPS, rollback_below=0.7))
    return Swap(drafts, epoch, request, joined_draft(OLD, old)).run(old, DraftTarget("unix:/new", after[0]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, [4, 4, 1, 0]), (1, [1, 1, 1, 0]), id="fewer"),
        pytest.param((1, [1, 1, 1, 0]), (4, [4, 1, 1, 0]), id="more"),
        pytest.param((3, [3, 3, 3, 1]), (3, [3, 3, 1, 0]), id="a little worse"),
    ],
)
def test_a_draft_that_guesses_as_well_stays_whatever_it_drafts(
    before: tuple[int, list[int]], after: tuple[int, list[int]]
) -> None:
    outcome = swap(before, after)
    assert not outcome.rolled_back
    for figures, (num_draft_tokens, accepted) in ((outcome.before, before), (outcome.after, after)):
        assert figures.num_draft_tokens == num_draft_tokens
        assert figures.num_steps == NUM_STEPS
        assert figures.accept_length == pytest.approx(1 + sum(accepted) / len(accepted))


def test_only_tokens_that_the_steps_of_both_have_are_compared() -> None:
    """The new draft is chosen to draft two tokens at a time, which are all right."""
    drafts = FakeDrafts([2, 2, 1], num_drafted=2)
    assert not swap((4, [4, 4, 1]), (4, [2, 2, 1]), drafts).rolled_back
    drafts = FakeDrafts([2, 0, 0], num_drafted=2)
    assert "of the first 2 draft tokens" in swap((4, [4, 4, 1]), (4, [2, 0, 0]), drafts).reason


def test_a_draft_that_guesses_worse_goes_though_it_has_more_accepted_tokens() -> None:
    outcome = swap((1, [1, 1, 1, 1]), (4, [4, 4, 0, 0]))
    assert outcome.after.accept_length > outcome.before.accept_length
    assert outcome.rolled_back
    expected = "of the first draft token of a step 0.50 are accepted, 1.00 were: fewer than 0.7 times as many"
    assert outcome.reason == expected


def test_a_new_draft_is_judged_behind_steps_that_draft_none(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = BusyDrafts([0, 0])
    monkeypatch.setattr("slipstream.scheduler.swap.time.monotonic", lambda: drafts.now)
    outcome = swap((1, [1, 1]), (1, [0, 0]), drafts)
    assert outcome.rolled_back
    assert outcome.after.num_steps == NUM_STEPS


def test_mixed_steps_say_how_much_is_accepted_and_the_others_how_long_a_step_takes() -> None:
    """But not those behind a mixed one, in whose time its prompts may be taken in."""
    drafts = FakeDrafts([])
    drafts.decode(OLD, [3, 1], step_ms=40, num_ending=2)
    drafts.decode(OLD, [3, 1], step_ms=20, num_steps=1)
    drafts.decode(OLD, [3, 1], step_ms=5)
    drafts.decode(OLD, [3, 1], step_ms=40, num_ending=1)
    steps = drafts.record.last(OLD, 3 * NUM_STEPS)
    assert len(steps) == 3 * NUM_STEPS
    found = figures_of("eagle3", 4, steps)
    assert (found.accept_length, found.step_ms) == (3.0, 5.0)
    assert found.tokens_per_second == pytest.approx(6 / 0.005)
