"""Bugs to plant into the real code: the simulator must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slipstream.gateway.journal import JobJournal, rows_of
from slipstream.gateway.sample import Sample
from slipstream.scheduler.attachment import DraftAttachment
from slipstream.scheduler.batch import Batch, ContextLimit
from slipstream.scheduler.link import Dispatch
from slipstream.scheduler.records import Sequence, Step
from slipstream.scheduler.slots import SlotAllocator
from slipstream.scheduler.waiting_queue import WaitingQueue
from tests.simulator.schedule import run_schedule
from tests.simulator.world import SimulationError


@dataclass(frozen=True)
class PlantedBug:
    """A method of the real code, and a wrong one for its place."""

    name: str
    owner: type
    method: str
    make_wrong: Callable[[Any], Any]
    """Makes the wrong method of the right one."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is there meanwhile."""
        right = getattr(self.owner, self.method)
        setattr(self.owner, self.method, self.make_wrong(right))
        try:
            yield
        finally:
            setattr(self.owner, self.method, right)

    def find(self, seeds: Iterable[int]) -> tuple[int, int, str] | None:
        """Runs schedules until one fails: how many it took, the seed and the verdict; None if all of them pass."""
        with self.planted():
            for count, seed in enumerate(seeds, start=1):
                try:
                    run_schedule(seed)
                except SimulationError as error:
                    return count, seed, str(error)
        return None


def _free_twice(release: Any) -> Any:
    def wrong(self: SlotAllocator, lease: Any) -> None:
        release(self, lease)
        self._free.append(lease.slot)

    return wrong


def _send_before_commit(_: Any) -> Any:
    def wrong(self: JobJournal, step: Any, running: Any, then: Any) -> None:
        keys = {number: running[number].key for number in (*step.sequences, *step.admitted) if number in running}
        self.outputs(rows_of(step, keys))
        then()

    return wrong


def _believe_the_step_before(wait: Any) -> Any:
    return lambda self, producer, step, timeout_s: wait(self, producer, step - 1, timeout_s)


def _forget_to_notify(_: Any) -> Any:
    def wrong(self: WaitingQueue, *sequences: Any, epoch: int | None = None) -> bool:
        if self._epoch is None or epoch not in (None, self._epoch):
            return False
        for sequence in sequences:
            self._add(sequence)
        return True

    return wrong


def _release_once(release: Any) -> Any:
    def wrong(self: DraftAttachment, step: int) -> None:
        if not self.is_released:
            release(self, step)

    return wrong


def _forget_the_last_token(preempt: Any) -> Any:
    return lambda self, output: preempt(self, output[:-1])


def _change_the_last_token(go_on: Any) -> Any:
    return lambda self, output: go_on(self, (*output[:-1], output[-1] ^ 1))


def _draft_for_another(with_draft_tokens: Any) -> Any:
    def wrong(self: Batch, *arguments: Any, **options: Any) -> Step:
        step: Step = with_draft_tokens(self, *arguments, **options)
        return step._replace(num_draft_tokens=step.num_draft_tokens[::-1])

    return wrong


BUGS = (
    PlantedBug("a release that is not repeated", DraftAttachment, "release", _release_once),
    PlantedBug("a region used again too early", DraftAttachment, "is_gone", lambda _: property(lambda _: True)),
    PlantedBug("a slot freed twice", SlotAllocator, "release", _free_twice),
    PlantedBug("an output sent before its commit", JobJournal, "take_in", _send_before_commit),
    PlantedBug("a late acknowledgement believed", Dispatch, "_wait", _believe_the_step_before),
    PlantedBug("a submission that wakes no one", WaitingQueue, "add", _forget_to_notify),
    PlantedBug("a token forgotten when preempted", Sequence, "preempt", _forget_the_last_token),
    PlantedBug("a token changed when continued", Sample, "_continue", _change_the_last_token),
    PlantedBug("a draft beyond its context", ContextLimit, "ends", lambda _: lambda *_: ([], 1)),
    PlantedBug("draft tokens of another sequence", Batch, "_with_draft_tokens", _draft_for_another),
)
