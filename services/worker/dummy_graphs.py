"""Stand-ins' decode steps as graphs: few launches for the host, and a kernel that begins with the look at the stash."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.graphs import Buckets, Latest, batch_buckets, capture_buckets

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from slipstream.common.worker.captured_step import CapturedAccess
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.worker.engine import EpochState
    from slipstream.services.worker.future_map import StepNumber, VerifyResult
    from slipstream.services.worker.graphed_step import GraphedStep
    from slipstream.services.worker.graphs import Replay

    Guess = Callable[[StepNumber, torch.Tensor], None]
    """Stream work of draft: what it does in a step for the slots of some rows, up to its tokens in the arena."""
    Check = Callable[[StepNumber, torch.Tensor, StepKind], VerifyResult]
    """Stream work of verify: the same, up to what it found."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    replay: Replay
    accesses: tuple[CapturedAccess, ...]


class StandInDraftGraphs:
    """Belongs to one epoch."""

    def __init__(self, state: EpochState, graphed: GraphedStep, guess: Guess) -> None:
        """Captures."""
        self._state = state
        self._graphed = graphed
        self._guess = guess
        self._parts = capture_buckets("a stand-in", _sizes(state), self._make)

    def phases(self, command: StepCommand) -> list[Phase]:
        """A decode step."""
        part = _of(self._parts, command)
        return [Phase(partial(_replay, part, self._state, command), FenceName.DRAFT_DONE, is_stamped=True)]

    def _make(self, size: int) -> _Part:
        def work() -> None:
            self._graphed.stamp_start()
            self._guess(self._graphed.step, self._graphed.slots[:size])
            self._graphed.stamp_end()

        return _capture(self._graphed, work)


class StandInVerifyGraphs:
    """Belongs to one epoch."""

    def __init__(self, state: EpochState, graphed: GraphedStep, check: Check) -> None:
        """Captures."""
        self._state = state
        self._graphed = graphed
        self._check = check
        kinds = (StepKind.DECODE, StepKind.PLAIN) if state.attachment.shape.num_draft_tokens else (StepKind.PLAIN,)
        self._parts = {
            kind: capture_buckets(f"a stand-in, {kind.name.lower()}", _sizes(state), partial(self._make, kind))
            for kind in kinds
        }

    def phases(self, command: StepCommand) -> list[Phase]:
        """A decode step, with a draft or plain."""
        publish, stash = _of(self._parts[command.kind], command)
        return [
            Phase(partial(_replay, publish, self._state, command), FenceName.VERIFY_PUBLISH, is_stamped=True),
            Phase(partial(_replay, stash, self._state, command), FenceName.VERIFY_STASH, is_stamped=True),
        ]

    def _make(self, kind: StepKind, size: int) -> tuple[_Part, _Part]:
        graphed, future_map = self._graphed, self._state.future_map
        rows = graphed.slots[:size]
        found = Latest["VerifyResult"]()

        def publish() -> None:
            graphed.stamp_start()
            found.value = self._check(graphed.step, rows, kind)
            future_map.publish(graphed.step, rows, found.value)

        def stash() -> None:
            future_map.stash(graphed.step, rows, found.value)
            graphed.stamp_end()

        return _capture(graphed, publish), _capture(graphed, stash)


def _sizes(state: EpochState) -> tuple[int, ...]:
    return batch_buckets(state.attachment.shape.num_slots - 1)


def _of(buckets: Buckets[T], command: StepCommand) -> T:
    made = buckets.get(len(command.slots))
    assert made is not None, "stand-ins' graphs take next to no memory"
    return made


def _capture(graphed: GraphedStep, work: Replay) -> _Part:
    graphed.step.take_accesses()
    replay = graphed.capture.capture(work)
    return _Part(replay, graphed.step.take_accesses())


def _replay(part: _Part, state: EpochState, command: StepCommand) -> None:
    part.replay()
    state.future_map.log_replay(part.accesses, command.step, command.slots)
