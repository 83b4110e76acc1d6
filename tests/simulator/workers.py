"""Simulated workers: a process with a stream, a model of checksums and the real FutureMap."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    SlipstreamError,
    StaleEpochError,
)
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import DECODE_PART, PREFILL_PART, BufferName, DraftShape, GrammarShape
from slipstream.common.wire.step import DRAFT_FENCES, FenceName, Role, WaitPlace
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import VerifyResult
from slipstream.services.worker.masks import GrammarMasks, StepMasks
from tests.harness.workers import VOCAB_SIZE
from tests.simulator.memory import SimulatedDevice
from tests.simulator.model import chosen, extend, token_of
from tests.simulator.threads import Signal
from tests.simulator.worker_epochs import Epoch, GrammarPiece
from tests.simulator.world import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.wire.step import PrefillChunk, StepCommand
    from slipstream.common.wire.worker import Attachment, OfferedRegion, WorkerDescription
    from slipstream.services.worker.masks import HostAllowed
    from tests.simulator.links import SimulatedLink
    from tests.simulator.memory import Host
    from tests.simulator.worker_epochs import DraftSkill, Piece
    from tests.simulator.world import World

RELEASE_INTERVAL_S = 0.05
RELEASE_TIMEOUT_S = 5.0
HIDDEN_WIDTH = 2
"""A checksum of 32 bits as two numbers that float32 holds exactly."""


class SimulatedWorker(Process):
    """A draft or verify process."""

    def __init__(
        self, world: World, name: str, host: Host, description: WorkerDescription, skill: DraftSkill, fence_kind: str
    ) -> None:
        super().__init__(world, name)
        self.role = description.role
        self.skill = skill
        self.epoch: Epoch | None = None
        self.last_epoch = 0
        self.link: SimulatedLink | None = None
        """The one whose stream of commands it has."""
        self._description = description
        self._device = SimulatedDevice(host, self, fence_kind)
        self.stream = self._device.create_stream(self.name, self._broken)
        self._closed = Signal(world)
        self._steps = {Role.VERIFY: self._verify, Role.DRAFT: self._draft}[self.role]

    @property
    def is_on_its_way_out(self) -> bool:
        """True for verify once its scheduler has ended the epoch: as it gives the memory back then without waiting."""
        return self.role is Role.VERIFY and (self.link is None or not self.link.is_open)

    # The calls of the worker contract.

    def describe(self) -> WorkerDescription:
        """See worker.proto."""
        return replace(self._description, last_epoch=self.last_epoch, has_scheduler=self.link is not None)

    def attach(self, attachment: Attachment, then: Callable[[SlipstreamError | None], None]) -> None:
        """See worker.proto. Answers when the epoch before has ended."""
        if self.link is not None:
            then(FailedPreconditionError("another scheduler has the stream of this worker"))
        elif self.epoch is not None:
            # Its scheduler was lost between the call and the stream, or it still ends.
            self._closed.watchers.append(lambda: self.soon(self.attach, attachment, then))
            self.abandon(self.epoch)
        elif attachment.pid not in (0, self.describe().pid):
            then(FailedPreconditionError(f"process {attachment.pid} is meant, not process {self.describe().pid}"))
        elif attachment.epoch <= self.last_epoch:
            then(StaleEpochError(f"epoch {attachment.epoch} after {self.last_epoch}"))
        else:
            try:
                self.epoch = Epoch(attachment, self._device)
            except SlipstreamError as error:
                then(error)
                return
            self.last_epoch = attachment.epoch
            then(None)

    def attach_draft(self, offered: OfferedRegion, then: Callable[[SlipstreamError | None], None]) -> None:
        """See worker.proto: between two steps."""
        epoch = self.epoch
        if epoch is None or epoch.is_ending or epoch.number != offered.epoch:
            then(FailedPreconditionError(f"not attached in epoch {offered.epoch}"))
            return
        assert offered.draft is not None
        shape = epoch.attachment.shape
        sizes = DraftShape(
            num_slots=shape.num_slots,
            run_ahead=shape.run_ahead,
            num_draft_tokens=offered.draft.num_draft_tokens,
            chunk_tokens=shape.chunk_tokens,
            hidden_width=offered.draft.hidden_width,
        )
        try:
            own = self._device.open_arena(offered.own, read_only=True)
            piece = epoch.add(offered.attachment, sizes, offered.draft, own, self._device.open_arena(offered.given))
        except SlipstreamError as error:
            then(error)
            return
        if epoch.attachment.is_debug:
            piece.region.poison()
        self.last_epoch = max(self.last_epoch, offered.attachment)
        then(None)

    def attach_grammar(self, offered: OfferedRegion, then: Callable[[SlipstreamError | None], None]) -> None:
        """See worker.proto."""
        epoch = self.epoch
        if epoch is None or epoch.is_ending or epoch.number != offered.epoch:
            then(FailedPreconditionError(f"not attached in epoch {offered.epoch}"))
            return
        sizes = epoch.attachment.shape
        shape = GrammarShape(num_slots=sizes.num_slots, num_draft_tokens=sizes.num_draft_tokens, vocab_size=VOCAB_SIZE)
        try:
            own, given = self._device.open_arena(offered.own, read_only=True), self._device.open_arena(offered.given)
        except SlipstreamError as error:
            then(error)
            return
        buffers = {BufferName(spec.name): own.tensor(spec.name) for spec in shape.own_specs()}
        buffers |= {BufferName(spec.name): given.tensor(spec.name) for spec in shape.given_specs()}
        masks = GrammarMasks(shape, buffers, number=offered.attachment, log=EventLog())
        epoch.grammars[offered.attachment] = GrammarPiece(masks, own, given)
        then(None)

    def release_draft(self, number: int, attachment: int) -> None:
        """See worker.proto. As on a GPU: what waits already looks at the word alone."""
        if self.epoch is not None and self.epoch.number == number and attachment in self.epoch.pieces:
            self.epoch.pieces[attachment].is_given_up = True
        elif self.epoch is not None and self.epoch.number == number and attachment in self.epoch.grammars:
            self.epoch.grammars[attachment].is_given_up = True

    def detach_draft(self, number: int, attachment: int, then: Callable[[], None]) -> None:
        """See worker.proto: answers when the stream is past the last use."""
        epoch = self.epoch
        if epoch is None or epoch.number != number or attachment not in {**epoch.pieces, **epoch.grammars}:
            then()
            return

        def gone() -> None:
            epoch.pieces.pop(attachment, None)
            epoch.grammars.pop(attachment, None)
            self.soon(then)

        self.stream.enqueue(gone)

    def open_stream(self, link: SimulatedLink) -> None:
        """The scheduler's stream of commands begins."""
        if self.epoch is None or self.link is not None or self.epoch.is_ending:
            link.lost("refused")
        else:
            self.link = link

    def take(self, link: SimulatedLink, command: StepCommand) -> None:
        """A command came."""
        epoch = self.epoch
        if self.link is not link or epoch is None or epoch.is_ending:
            return
        try:
            if command.epoch != epoch.number:
                raise StaleEpochError(f"epoch {command.epoch}: attached in epoch {epoch.number}")
            if command.step <= epoch.last_step:
                raise InvalidArgumentError("step", command.step, f"above {epoch.last_step}")
            if command.attachment and command.attachment not in epoch.pieces:
                raise FailedPreconditionError(f"attachment {command.attachment} is not there")
            if command.constrained and command.grammar not in epoch.grammars:
                raise FailedPreconditionError(f"grammar worker {command.grammar} is not there")
        except SlipstreamError as error:
            link.has_refused = True
            self.end_stream(link)
            link.lost(str(error))
            return
        epoch.last_step = command.step
        piece = epoch.pieces.get(command.attachment or epoch.number)
        grammar = epoch.grammars.get(command.grammar)
        fences = epoch.fences | ({} if piece is None else piece.fences) | ({} if grammar is None else grammar.fences)
        for update in command.updates:
            self.stream.enqueue(lambda update=update: epoch.tokens.update(update))
        memory = epoch.map if self.role is Role.VERIFY else epoch.own.region
        phases = self._steps(epoch, command, piece)
        for before, phase, after in zip((None, *phases), phases, (*phases[1:], None), strict=False):
            for wait in command.ops.waits:
                if wait.place is phase.place and not (
                    (piece is not None and piece.is_given_up and wait.fence in DRAFT_FENCES)
                    or (grammar is not None and grammar.is_given_up and wait.fence is FenceName.GRAMMAR_READY)
                ):
                    fence = fences[wait.fence]
                    epoch.waited[fence] = max(wait.value, epoch.waited.get(fence, 0))
                    fence.wait(self.stream, wait.value)
            start, end = memory.stamps(command.step, phase.part)
            if before is None or before.part != phase.part:
                self.stream.enqueue(lambda start=start: self._stamp(start))
            self.stream.enqueue(phase.work)
            if after is None or after.part != phase.part:
                self.stream.enqueue(lambda end=end: self._stamp(end))
            for name in phase.fences:
                for point in command.ops.signals:
                    if point.fence is name:
                        fences[name].signal(self.stream, point.value)
        if command.wants_acknowledgement:
            link.acknowledge(command.step)

    def end_stream(self, link: SimulatedLink) -> None:
        """The stream of commands ended: so does the epoch."""
        if self.link is link:
            self.link = None
            if self.epoch is not None:
                self.abandon(self.epoch)

    def drain(self, epoch: int, then: Callable[[], None]) -> None:
        """See worker.proto."""
        if self.epoch is None or self.epoch.number != epoch:
            then()
        elif self.stream.is_idle:
            self._close(self.epoch)
            then()
        else:
            self.epoch.is_ending = True
            self.stream.idle.watchers.append(lambda: self.soon(self.drain, epoch, then))

    def abandon(self, epoch: Epoch) -> None:
        """Ends an epoch after its scheduler was lost, releasing what the stream waits for again and again."""
        if not epoch.is_abandoned:
            epoch.is_ending = epoch.is_abandoned = True
            self._release(epoch, self.world.now + RELEASE_TIMEOUT_S)

    def _release(self, epoch: Epoch, until: float) -> None:
        if self.epoch is not epoch:
            return
        for fence, value in epoch.waited.items():
            fence.release(value)
        if self.stream.is_idle:
            self._close(epoch)
        elif self.world.now > until:
            # The stream is lost, and the process with it.
            self.world.at(0.0, self.kill)
        else:
            self.at(RELEASE_INTERVAL_S, self._release, epoch, until)

    def _close(self, epoch: Epoch) -> None:
        if self.epoch is epoch:
            self.epoch = None
            self._closed.changed()

    def _broken(self, error: BaseException) -> None:
        if self.epoch is not None and self.epoch.is_released:
            # Work behind a released wait finds what it should not, which debug mode does not let pass.
            self.world.at(0.0, self.kill)
            return
        self.world.fail(f"the stream of {self.name} broke: {error!r}")

    def _stamp(self, target: torch.Tensor) -> None:
        target.fill_(round(self.world.monotonic() * 1e9))

    # Verify's steps.

    def _verify(self, epoch: Epoch, command: StepCommand, piece: Piece | None) -> list[Phase]:
        drafts: list[list[int]] = [[] for _ in command.slots]
        results: list[tuple[torch.Tensor, VerifyResult]] = []
        copies_stamps = command.ops.waits_for(FenceName.DRAFT_PROPOSED, WaitPlace.SAMPLING) > 0

        def copy_in() -> None:
            if command.most_draft_tokens:
                assert piece is not None, "a step with a draft names it"
                piece.check(self)
                copied = epoch.map.copy_in(command.step, piece.region, command.slots, torch.tensor(command.slots))
                if command.copies_tokens:
                    masks = epoch.grammars[command.grammar].masks
                    masks.copy_out(command, torch.tensor(command.slots), copied)
                drafts[:] = [row[:count] for row, count in zip(copied.tolist(), command.num_draft_tokens, strict=True)]

        def leave_states() -> None:
            if piece is not None and piece.region.shape.hidden_width and command.chunks:
                states = [state for chunk in command.chunks for state in self._states(epoch, chunk)]
                piece.check(self)
                piece.region.stash_prefill(command.step, _hidden([states])[0])

        def publish() -> None:
            if copies_stamps and piece is not None:
                epoch.map.copy_stamps(command.step, piece.region)
            if command.slots:
                self._publish(epoch, command, results, self._decode(epoch, command, piece, drafts))
            if command.chunks:
                self._publish(epoch, command, results, self._prefill(epoch, command, piece))

        def stash() -> None:
            if piece is not None:
                piece.check(self)
                for rows, result in results:
                    piece.region.stash(command.step, rows.tolist(), rows, result)

        return [
            Phase(copy_in, (FenceName.VERIFY_COPIED,), WaitPlace.START),
            Phase(leave_states, place=WaitPlace.PREFILL_HIDDEN),
            Phase(publish, (FenceName.VERIFY_PUBLISH,), WaitPlace.SAMPLING),
            Phase(stash, (FenceName.VERIFY_STASH,)),
        ]

    @staticmethod
    def _publish(
        epoch: Epoch,
        command: StepCommand,
        results: list[tuple[torch.Tensor, VerifyResult]],
        found: tuple[torch.Tensor, VerifyResult | None],
    ) -> None:
        rows, result = found
        if result is not None:
            results.append((rows, result))
            epoch.map.publish(command.step, rows, result)

    def _prefill(
        self, epoch: Epoch, command: StepCommand, piece: Piece | None
    ) -> tuple[torch.Tensor, VerifyResult | None]:
        new = [update.slot for update in command.updates if update.sampling is not None]
        if epoch.attachment.is_debug:
            epoch.map.forget(new)
            if piece is not None:
                piece.region.forget(command.step, new)
        for chunk in command.chunks:
            epoch.tokens.write(chunk.slot, chunk.start, chunk.tokens)
        ends = [chunk for chunk in command.chunks if chunk.is_last]
        rows = torch.tensor([chunk.slot for chunk in ends]).long()
        if not ends:
            return rows, None
        lengths = [chunk.start + len(chunk.tokens) for chunk in ends]
        last = [epoch.tokens.state(chunk.slot, length) for chunk, length in zip(ends, lengths, strict=True)]
        allowed = self._allowed(epoch, command, [chunk.slot for chunk in ends], 1)
        result = VerifyResult(
            seq_lens=torch.tensor(lengths),
            num_accepted=torch.zeros(len(ends), dtype=torch.int64),
            tokens=torch.tensor([[_chosen(state, allowed, row, 0)] for row, state in enumerate(last)]),
            faults=None if allowed is None else allowed.faults_of(len(ends)),
            hidden_states=_hidden([[state] for state in last]),
        )
        return rows, result

    @staticmethod
    def _states(epoch: Epoch, chunk: PrefillChunk) -> list[int]:
        """The checksums behind each token of a chunk."""
        state, states = epoch.tokens.state(chunk.slot, chunk.start), []
        for token in chunk.tokens:
            state = extend(state, (token,))
            states.append(state)
        return states

    def _decode(
        self, epoch: Epoch, command: StepCommand, piece: Piece | None, drafts: list[list[int]]
    ) -> tuple[torch.Tensor, VerifyResult]:
        slots = command.slots
        rows = torch.tensor(slots)
        lengths, bonus = epoch.map.ends(command.step, rows, epoch.limits(slots))
        accepted, tokens, hidden = [], [], []
        allowed = self._allowed(epoch, command, slots, command.most_draft_tokens + 1)
        rows_of_slots = zip(slots, lengths.tolist(), bonus.tolist(), drafts, strict=True)
        for row, (slot, length, last, draft) in enumerate(rows_of_slots):
            epoch.tokens.write(slot, length, [last, *draft])
            state, said, states = epoch.tokens.state(slot, length), [], []
            for token in (last, *draft):
                state = extend(state, (token,))
                states.append(state)
                said.append(_chosen(state, allowed, row, len(said)))
            accepted.append(self._accept(epoch, piece, slot, length, draft, said))
            missing = [0] * (command.most_draft_tokens - len(draft))
            tokens.append(said + missing)
            hidden.append(states + missing)
        num_accepted = torch.tensor(accepted)
        return rows, VerifyResult(
            seq_lens=lengths + num_accepted + 1,
            num_accepted=num_accepted,
            tokens=torch.tensor(tokens),
            faults=None if allowed is None else allowed.faults_of(len(slots)),
            hidden_states=_hidden(hidden),
        )

    @staticmethod
    def _allowed(epoch: Epoch, command: StepCommand, slots: Sequence[int], width: int) -> HostAllowed | None:
        if not command.constrained:
            return None
        masks = StepMasks(epoch.grammars[command.grammar].masks, command)
        return masks.take(torch.tensor(slots), width)

    def _accept(
        self, epoch: Epoch, piece: Piece | None, slot: int, length: int, draft: list[int], said: list[int]
    ) -> int:
        held, count = epoch.tokens.slots[slot], 0
        most = len(draft) if held.max_draft_tokens is None else min(len(draft), held.max_draft_tokens)
        while count < most and draft[count] == said[count]:
            count += 1
        is_undisturbed = self.skill.is_watched and piece is not None and piece.is_undisturbed and not epoch.is_ending
        if is_undisturbed and count < most and length + len(draft) < held.limit_tokens:
            self.world.fail(f"slot {slot}: a draft that knows everything guessed {draft}, not {said}")
        return count

    # Draft's steps.

    def _draft(self, epoch: Epoch, command: StepCommand, _: Piece | None) -> list[Phase]:
        parts = {
            FenceName.DRAFT_PROPOSED: (self._propose, WaitPlace.START, DECODE_PART),
            FenceName.DRAFT_PREFILLED: (self._take_in, WaitPlace.PREFILL_HIDDEN, PREFILL_PART),
        }
        return [
            Phase(partial(work, epoch, command), (point.fence,), place, part)
            for point in command.ops.signals
            for work, place, part in [parts[point.fence]]
        ]

    def _take_in(self, epoch: Epoch, command: StepCommand) -> None:
        """A draft's own prefill, or a part of its catching up."""
        for chunk in command.chunks:
            epoch.tokens.write(chunk.slot, chunk.start, chunk.tokens)
        piece = epoch.own
        if piece.region.shape.hidden_width and not command.catches_up:
            piece.check(self)
            found = _states_of(
                piece.region.gather_prefill(command.step, sum(len(one.tokens) for one in command.chunks))
            )
            expected = [state for chunk in command.chunks for state in self._states(epoch, chunk)]
            knows_all = all(chunk.start == 0 for chunk in command.chunks)
            if self.skill.is_watched and knows_all and found != expected and piece.is_undisturbed:
                self.world.fail(f"step {command.step}: draft read the hidden states of another chunk")

    def _propose(self, epoch: Epoch, command: StepCommand) -> None:
        rows, region = torch.tensor(command.slots).long(), epoch.own.region
        if not command.slots:
            return
        epoch.own.check(self)
        stash = region.gather(command.step, rows, epoch.limits(command.slots))
        guesses = []
        columns = zip(
            command.slots, stash.seq_lens.tolist(), stash.num_new.tolist(), stash.last_tokens.tolist(), strict=True
        )
        for row, (slot, length, num_new, last) in enumerate(columns):
            new = last[:num_new]
            epoch.tokens.write(slot, max(0, length - num_new + 1), new)
            if stash.hidden_states is not None:
                state = extend(_states_of(stash.hidden_states[row])[num_new - 1], new[-1:])
            else:
                state = extend(epoch.tokens.state(slot, length), new[-1:])
            # Steps draft as many for each slot as for the one with the most.
            guess, room = self._guess(state, command.most_draft_tokens or 1), self.skill.context_tokens - length - 1
            guesses.append([token + (place >= room) for place, token in enumerate(guess)])
        region.propose(command.step, rows, torch.tensor(guesses))

    def _guess(self, state: int, count: int) -> list[int]:
        guesses = []
        for _ in range(count):
            token = token_of(state)
            guesses.append(token if state % 1000 < 1000 * self.skill.quality else token + 1)
            state = extend(state, guesses[-1:])
        return guesses


def _hidden(states: list[list[int]]) -> torch.Tensor:
    """[B, W, HIDDEN_WIDTH] float32."""
    return torch.tensor([[[state >> 16, state & 0xFFFF] for state in row] for row in states], dtype=torch.float32)


def _states_of(hidden: torch.Tensor) -> list[int]:
    """[W, HIDDEN_WIDTH] back to checksums; anything else gives any number."""
    return [(int(high) << 16 | int(low)) & 0xFFFFFFFF for high, low in hidden.tolist()]


def _chosen(state: int, allowed: HostAllowed | None, row: int, place: int) -> int:
    """The token that verify says, as far as the masks of the step allow it."""
    at = [] if allowed is None else allowed.at.tolist()
    if allowed is None or row not in at:
        return token_of(state)
    return chosen(state, lambda token: bool(allowed.tokens[at.index(row), place, token]))
