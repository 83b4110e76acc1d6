"""A simulated grammar worker: a process with a stream, and the real masks of steps for grammars of the model.

In such a grammar a checksum of the output so far says whether the next token is even or odd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.common.errors import FailedPreconditionError, SlipstreamError, StaleEpochError
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName
from slipstream.common.wire.worker import command_to_pb
from slipstream.services.grammar.epoch import GrammarArrays, StepMasks
from tests.simulator.memory import SimulatedDevice
from tests.simulator.model import LEAST_TOKEN, NUM_TOKENS, allows, extend
from tests.simulator.world import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import Attachment, WorkerDescription
    from tests.simulator.links import SimulatedLink
    from tests.simulator.memory import Host, SimulatedFence
    from tests.simulator.world import World

    Answer = Callable[[SlipstreamError | None], None]


class _Matcher:
    """Stands in for `LLMatcher`."""

    def __init__(self, state: int = 0) -> None:
        self.state = state

    def consume_tokens(self, tokens: Sequence[int]) -> None:
        self.state = extend(self.state, tokens)


class _Grammars:
    """Stands in for `Grammars`."""

    def matcher(self, grammar: str) -> _Matcher:
        return _Matcher()


class _Filler:
    """Stands in for `MaskFiller`."""

    def __init__(self, masks: NDArray[np.int32]) -> None:
        self._masks = masks

    def clear(self, slot: int) -> None:
        """A row is written whole."""

    def fill(self, rows: Sequence[tuple[int, _Matcher, list[int]]]) -> set[int]:
        for slot, matcher, drafts in rows:
            state = matcher.state
            for place, draft in enumerate((None, *drafts)):
                state = state if draft is None else extend(state, (draft,))
                allowed = [one for one in range(LEAST_TOKEN, LEAST_TOKEN + NUM_TOKENS) if allows(state, one)]
                words = [sum(1 << one % 32 for one in allowed if one // 32 == word) for word in range(2)]
                row = self._masks[slot, place].view("uint32")
                row[:] = 0
                row[:2] = words
        return set()


class SimulatedGrammar(Process):
    """A grammar worker. What it writes late is of no interest: its memory is the host's, and stays mapped."""

    is_on_its_way_out = True

    def __init__(self, world: World, host: Host, description: WorkerDescription) -> None:
        super().__init__(world, "grammar")
        self._description = description
        self._device = SimulatedDevice(host, self)
        self.stream = self._device.create_stream(self.name, lambda error: self.world.fail(f"grammar: {error!r}"))
        self.link: SimulatedLink | None = None
        self.lies_until = 0.0
        """Until then it signals without masks."""
        self._last_epoch = 0
        self._masks: StepMasks | None = None
        self._fences: dict[FenceName, SimulatedFence] = {}

    def describe(self) -> WorkerDescription:
        """See worker.proto."""
        return replace(self._description, last_epoch=self._last_epoch, has_scheduler=self.link is not None)

    def attach(self, attachment: Attachment, then: Answer) -> None:
        """See worker.proto."""
        if self.link is not None or attachment.epoch <= self._last_epoch:
            then(FailedPreconditionError("in use") if self.link is not None else StaleEpochError("an old epoch"))
            return
        assert attachment.given is not None
        assert attachment.results is not None
        try:
            own, given = self._device.open_arena(attachment.manifest), self._device.open_arena(attachment.given)
            results = self._device.open_arena(attachment.results, read_only=True)
        except SlipstreamError as error:
            then(error)
            return
        arrays = GrammarArrays(
            stamps=own.tensor(BufferName.MASK_STAMPS).numpy(),
            copied_tokens=given.tensor(BufferName.COPIED_TOKENS).numpy(),
            num_accepted=results.tensor(BufferName.NUM_ACCEPTED).numpy(),
            output_tokens=results.tensor(BufferName.OUTPUT_TOKENS).numpy(),
        )
        filler, grammars = _Filler(own.tensor(BufferName.MASKS).numpy()), _Grammars()
        self._masks = StepMasks(arrays, grammars, filler, vocab_size=272)  # type: ignore[arg-type]
        self._fences = {
            FenceName.GRAMMAR_READY: own.fence(FenceName.GRAMMAR_READY),
            FenceName.VERIFY_COPIED: given.fence(FenceName.VERIFY_COPIED),
            FenceName.VERIFY_PUBLISH: results.fence(FenceName.VERIFY_PUBLISH),
        }
        self._last_epoch = attachment.epoch
        then(None)

    def prepare(self, grammar: str, then: Answer) -> None:
        """See worker.proto."""
        then(None)

    def open_stream(self, link: SimulatedLink) -> None:
        """The scheduler's stream of commands begins."""
        self.link = link

    def take(self, link: SimulatedLink, command: StepCommand) -> None:
        """A command came."""
        masks, fences = self._masks, self._fences
        if self.link is not link or masks is None:
            return
        for wait in command.ops.waits:
            fences[wait.fence].wait(self.stream, wait.value)

        def make() -> None:
            if self.world.now < self.lies_until:
                # What it was not told then it does not know later.
                self._masks = None
            elif self.link is link and self._masks is masks:
                masks.make(command_to_pb(command))

        self.stream.enqueue(make)
        fences[FenceName.GRAMMAR_READY].signal(self.stream, command.step)

    def end_stream(self, link: SimulatedLink) -> None:
        """The stream of commands ended: what was sent is dropped."""
        if self.link is link:
            self.link = None
            if not self.stream.is_stuck:
                self.stream = self._device.create_stream(self.name, self.stream._on_failure)

    def drain(self, epoch: int, then: Callable[[], None]) -> None:
        """See worker.proto."""
        then()
