"""Scheduler and verify without a model: the real plan and link; how many guesses are accepted is told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from slipstream.common.wire.layout import (
    DECODE_PART,
    GIVEN_FENCES,
    OWN_FENCES,
    PADDING_SLOT,
    PREFILL_PART,
    BufferName,
    DraftShape,
)
from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import (
    DRAFT_FENCES,
    FenceName,
    FenceOps,
    FencePoint,
    PrefillChunk,
    Role,
    SlotUpdate,
    StepCommand,
    WaitPlace,
)
from slipstream.common.wire.worker import Attachment
from slipstream.scheduler.plan import catch_up, consume, initial_state, plan_step
from slipstream.scheduler.records import DraftTraits, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slipstream.common.device.interface import Device, Fence
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.link import Link

NUM_SLOTS, NUM_DRAFT_TOKENS, CHUNK_TOKENS, PAGE_TOKENS, SLOT_PAGES = 5, 3, 16, 16, 18
CONTEXT_TOKENS = 256
ALPHABET = 11
"""Number of different tokens in sequences: few, so that they repeat."""
NO_TOKEN = -1
"""Stands in draft_tokens and num_proposed until the drafter has written there."""
PAUSE_S = 0.05
"""Seconds for which a waiting step is watched."""

GUARD_WORDS, GUARD_VALUE = 32, 0x5AFE


class ContractError(Exception):
    """The drafter breaks the contract; the text says how."""


class ScriptedVerify:
    """One attachment of a drafter."""

    def __init__(
        self, device: Device, draft: WorkerDescription, number: int, *, run_ahead: int = 1, timeout_s: float
    ) -> None:
        """Takes the memory. `number`: of the attachment; `timeout_s`: what a step may take."""
        shape = DraftShape(
            num_slots=NUM_SLOTS,
            run_ahead=run_ahead,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            hidden_width=draft.hidden_width,
            hidden_dtype=draft.torch_dtype,
        )
        self.own = GuardedMemory(device, shape.own_specs(), OWN_FENCES)
        self.given = GuardedMemory(device, shape.given_specs(), GIVEN_FENCES)
        self.attachment = Attachment(
            epoch=number,
            manifest=self.own.manifest,
            given=self.given.manifest,
            shape=shape,
            page_tokens=PAGE_TOKENS,
            num_pages=1 + NUM_SLOTS * SLOT_PAGES,
            slot_pages=SLOT_PAGES,
            context_tokens=CONTEXT_TOKENS,
            peer=replace(draft, role=Role.VERIFY),
        )
        self.reads_hidden = draft.hidden_width > 0
        self.sequences: dict[int, list[int]] = {}
        """The tokens in each slot, the bonus token included."""
        self._shape = shape
        self._draft = draft
        self._timeout_s = timeout_s
        self._plan = initial_state(DraftTraits(is_present=True, reads_hidden=self.reads_hidden), run_ahead)
        self._fences = {name: self.own.fence(name) for name in DRAFT_FENCES}
        self._stashed = self.given.fence(FenceName.VERIFY_STASH)
        self._link: Link | None = None
        self._last_end = self._released = 0
        self._waits: dict[FencePoint, int] = {}
        """By what is signalled after it, the stash that a part of a step waits for; 0 for none."""

    def attach(self, link: Link) -> None:
        """Attaches the drafter. Raises what the link does."""
        link.attach(self.attachment)
        self._link = link
        self.allow_rehearsal()
        self.own.seal()
        self.given.seal()

    def allow_rehearsal(self) -> None:
        """Accepts what the drafter wrote to its memory while it attached: it may rehearse steps in padding rows."""
        self.own.allow_all()

    @property
    def last_sent(self) -> int:
        """The last step."""
        return self._plan.step

    def unfinished(self) -> str:
        """Returns which ordered signals are missing; empty if none is."""
        last = {point.fence: point.value for point in self._waits}
        found = [(name, self._fences[name].poll(), value) for name, value in last.items()]
        return " and ".join(f"{name.name} is {now}, not {value}" for name, now, value in found if now != value)

    def take_in(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        beside: Sequence[int] = (),
        catches_up: bool = False,
    ) -> list[list[int]]:
        """A sequence takes a slot: chunk after chunk; then it has its first token.

        `beside`: slots that decode in the same steps, one after the other, and accept what they guess. Returns their
        guesses. `catches_up`: in commands outside of the numbering.
        """
        self.sequences[slot] = list(prompt)
        has_chunks = not (catches_up and self.reads_hidden)
        history_from = 0 if has_chunks else len(prompt) - 1
        pages = tuple(range(1 + slot * SLOT_PAGES, 1 + (slot + 1) * SLOT_PAGES))
        updates: tuple[SlotUpdate, ...] = (
            SlotUpdate(
                slot=slot,
                generation=self.last_sent + 1,
                pages=pages,
                limit_tokens=CONTEXT_TOKENS,
                sampling=sampling or SamplingParams(),
                history_from=history_from,
            ),
        )
        guesses: list[list[int]] = []
        for start in range(0, len(prompt) if has_chunks else 1, CHUNK_TOKENS):
            tokens = tuple(prompt[start : start + CHUNK_TOKENS])
            is_last = start + CHUNK_TOKENS >= len(prompt)
            chunk = PrefillChunk(slot=slot, start=start, tokens=tokens, is_last=is_last)
            decoded = tuple(beside)
            step = self.send(decoded, chunks=(chunk,) if has_chunks else (), updates=updates, catches_up=catches_up)
            found = self.finish(step, decoded) if decoded else []
            if self.reads_hidden and has_chunks:
                for place in range(len(tokens)):
                    self.given.write(BufferName.PREFILL_HIDDEN, place, self._hidden(start + place))
            new = {row: [*guessed, self._next_token(row)] for row, guessed in zip(decoded, found, strict=True)}
            if is_last and not catches_up:
                new[slot] = [self._next_token(slot)]
            self.stash(step, new)
            self.finish_prefill(step)
            guesses, updates = guesses + found, ()
        if catches_up:
            # It joins after a step without it, which stashes for it.
            *_, self._plan = plan_step(self._plan, self.last_sent + 1, mask_of((slot,)))
            self.stash(self.last_sent, {slot: [self._next_token(slot)]})
        return guesses

    def decode(self, *slots: int, accepted: int) -> list[list[int]]:
        """A step of which verify accepts that many guesses in each slot; returns all guesses."""
        step = self.send(slots)
        guesses = self.finish(step, slots)
        self.accept(step, slots, guesses, accepted)
        return guesses

    def decode_plainly(self, slot: int) -> None:
        """A step for which the drafter need not guess."""
        step = self.send((slot,), num_draft_tokens=0)
        self.finish(step, (slot,), has_guesses=False)
        self.accept(step, (slot,), [[]], 0)

    def accept(self, step: int, slots: Sequence[int], guesses: list[list[int]], accepted: int) -> None:
        """Verify is done with a step."""
        new = {}
        for slot, row in zip(slots, guesses, strict=True):
            new[slot] = [*row[:accepted], self._next_token(slot)]
        self.stash(step, new)

    def send(
        self,
        slots: tuple[int, ...] = (),
        *,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        chunks: tuple[PrefillChunk, ...] = (),
        updates: tuple[SlotUpdate, ...] = (),
        wants_acknowledgement: bool = False,
        catches_up: bool = False,
    ) -> int:
        """Sends the drafter its part of the next step, and returns the step's number."""
        step = self.last_sent + 1
        if catches_up:
            ops: FenceOps | None = catch_up(step)
            *_, self._plan = plan_step(self._plan, step, 0)
        else:
            rows, prompts = mask_of(slots), mask_of(chunk.slot for chunk in chunks)
            is_drafted = bool(slots) and num_draft_tokens > 0
            ops, _, self._plan = plan_step(self._plan, step, rows, prompts, rows, is_drafted=is_drafted)
        # A command with neither slots nor chunks signals both.
        ops = ops or FenceOps((), tuple(FencePoint(fence, step) for fence in DRAFT_FENCES))
        for point in ops.signals:
            is_decode = point.fence is FenceName.DRAFT_PROPOSED
            place = WaitPlace.START if is_decode else WaitPlace.PREFILL_HIDDEN
            self._waits[point] = ops.waits_for(FenceName.VERIFY_STASH, place)
        assert self._link is not None, "it is attached"
        self._link.send(
            StepCommand(
                epoch=self.attachment.epoch,
                step=step,
                slots=slots,
                num_draft_tokens=(num_draft_tokens,) * len(slots) if num_draft_tokens else (),
                ops=ops,
                chunks=chunks,
                updates=updates,
                wants_acknowledgement=wants_acknowledgement,
                catches_up=catches_up,
            )
        )
        return step

    def stash(self, step: int, new: Mapping[int, Sequence[int]]) -> None:
        """Publishes the tokens that a step gave to slots."""
        for slot, tokens in new.items():
            self.sequences[slot] += tokens
            end = len(self.sequences[slot]) - 1
            self._stash_row(slot, end, tokens)
            # Verify has copied the guesses: whether the next ones are written can be told now.
            self._clear(slot)
        self.release(step)

    def scramble(self, value: int) -> None:
        """Fills what the drafter reads of all slots with one number."""
        for name in (BufferName.SEQ_LENS, BufferName.BONUS_TOKENS, BufferName.NUM_NEW, BufferName.LAST_TOKENS):
            self.given.fill(name, value)

    def release(self, step: int) -> None:
        """Ends the waits for a step's stash, and counts the step as consumed."""
        self.given.flush()
        self.own.flush()
        self._stashed.release(step)
        self._released = step
        self._plan = consume(self._plan, step)

    def lose(self, step: int, slots: Sequence[int], value: int) -> None:
        """Verify is gone: its stash holds anything, and the scheduler ends the waits for it."""
        self.scramble(value)
        for slot in slots:
            self._clear(slot)
        self.release(step)

    def give_up(self) -> None:
        """Ends all waits."""
        self._stashed.release(self.last_sent)

    def await_acknowledgement(self, step: int) -> None:
        """Raises ContractError if a step is not acknowledged in time. Raises the link's failure."""
        assert self._link is not None, "it is attached"
        if not self._link.wait_for_acknowledgement(step, self._timeout_s):
            raise ContractError(f"step {step} waits, and is not acknowledged within {self._timeout_s:g} s")

    def hold(self) -> None:
        """Raises ContractError if a part of a step that waits for a stash does anything before."""
        waiting = next((point for point, stash in self._waits.items() if stash > self._released), None)
        if waiting is None:
            return
        fence, step = waiting
        if self._fences[fence].wait_on_host(step, PAUSE_S):
            raise ContractError(f"{fence.name} of step {step} is signalled before the stash that it waits for")
        self.check_memory(f"before the stash that {fence.name} of step {step} waits for")

    def finish(self, step: int, slots: Sequence[int], *, has_guesses: bool = True) -> list[list[int]]:
        """Waits for a step's decode part, checks all that the drafter did, and returns its guesses for `slots`."""
        self._await(FenceName.DRAFT_PROPOSED, step)
        guesses = [self._guesses(step, slot) if has_guesses else [] for slot in slots]
        for slot in (PADDING_SLOT, *slots):
            self.own.allow(BufferName.DRAFT_TOKENS, slot)
            self.own.allow(BufferName.NUM_PROPOSED, slot)
        self._check_part(step, DECODE_PART, f"in step {step}, which has slots {list(slots)}")
        return guesses

    def finish_prefill(self, step: int) -> None:
        """Waits for a step's prefill part, and checks all that the drafter did."""
        self._await(FenceName.DRAFT_PREFILLED, step)
        self._check_part(step, PREFILL_PART, f"in step {step}, which takes in prompts")

    def _await_all_that_may_run(self) -> None:
        """Waits for all parts that wait for no stash: what they write is no fault of the part that is checked."""
        for (fence, step), stash in self._waits.items():
            if stash <= self._released:
                self._await(fence, step)

    def _await(self, fence: FenceName, step: int) -> None:
        if not self._fences[fence].wait_on_host(step, self._timeout_s):
            failure = None if self._link is None else self._link.failure
            reason = "" if failure is None else f": {failure}"
            raise ContractError(f"step {step} does not signal {fence.name} within {self._timeout_s:g} s{reason}")

    def _guesses(self, step: int, slot: int) -> list[int]:
        """Reads the draft tokens of a slot. Raises ContractError if they break the contract."""
        row: list[int] = self.own.read(BufferName.DRAFT_TOKENS, slot)
        num_proposed: int = self.own.read(BufferName.NUM_PROPOSED, slot)
        what = f"of slot {slot} in step {step}"
        if not 0 <= num_proposed <= NUM_DRAFT_TOKENS:
            raise ContractError(f"num_proposed {what} is {num_proposed}, of {NUM_DRAFT_TOKENS} that were asked for")
        guesses = row[:num_proposed]
        if NO_TOKEN in guesses:
            raise ContractError(f"draft_tokens {what} are not written when it is signalled: {row}")
        if not all(0 <= token < self._draft.vocab_size for token in guesses):
            raise ContractError(f"draft_tokens {what} are no tokens: {row}")
        return guesses

    def _clear(self, slot: int) -> None:
        self.own.write(BufferName.DRAFT_TOKENS, slot, NO_TOKEN)
        self.own.write(BufferName.NUM_PROPOSED, slot, NO_TOKEN)

    def _check_part(self, step: int, part: int, when: str) -> None:
        row = step % self._shape.ring
        start, end = self.own.read(BufferName.DRAFT_STAMPS, row)[part]
        if not self._last_end <= start <= end or not start:
            raise ContractError(
                f"draft_stamps of step {step}: {start} to {end}, after a part that ended at {self._last_end}"
            )
        self._last_end = end
        self._await_all_that_may_run()
        self.own.allow(BufferName.DRAFT_STAMPS, row)
        if max(self._waits.values(), default=0) > self._released:
            self.hold()
        self.check_memory(when)
        for name, fence in self._fences.items():
            if (signalled := fence.poll()) > self.last_sent:
                raise ContractError(f"{name.name} is {signalled}, and the last step {self.last_sent}")

    def close(self) -> None:
        """Gives the memory back."""
        self.own.close()
        self.given.close()

    def check_memory(self, when: str) -> None:
        """Raises ContractError if something has changed that the drafter may not change."""
        for name, memory in (("its own memory", self.own), ("verify's memory", self.given)):
            if changed := memory.changed():
                raise ContractError(f"{name} is changed {when}: {'; '.join(changed)}")
        if (stashed := self._stashed.poll()) != self._released:
            raise ContractError(f"VERIFY_STASH, which verify signals, is {stashed} {when}, not {self._released}")

    def _stash_row(self, slot: int, end: int, tokens: Sequence[int]) -> None:
        padded = [*tokens, *[0] * (NUM_DRAFT_TOKENS + 1 - len(tokens))]
        self.given.write(BufferName.SEQ_LENS, slot, end)
        self.given.write(BufferName.NUM_NEW, slot, len(tokens))
        self.given.write(BufferName.BONUS_TOKENS, slot, tokens[-1])
        self.given.write(BufferName.LAST_TOKENS, slot, padded)
        if self.reads_hidden:
            first = end - len(tokens)
            states = torch.stack([self._hidden(first + place) for place in range(NUM_DRAFT_TOKENS + 1)])
            self.given.write(BufferName.HIDDEN_STATES, slot, states)

    def _next_token(self, slot: int) -> int:
        """Returns what the target "chooses": a function only of the sequence."""
        sequence = self.sequences[slot]
        return (sum(sequence[-2:]) + len(sequence)) % ALPHABET

    def _hidden(self, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(position + 1)
        return torch.randn(self._draft.hidden_width, generator=generator)


class GuardedMemory:
    """An arena with words between its buffers that belong to nobody and are in no manifest."""

    def __init__(self, device: Device, specs: Sequence[BufferSpec], fences: Iterable[FenceName]) -> None:
        """Takes the memory: all zero but for the guards. Raises OutOfMemoryError, ConfigError."""
        guards = [BufferSpec(f"guard {number}", (GUARD_WORDS,), torch.int64, "") for number in range(len(specs) + 1)]
        placed = [guards[0]]
        for spec, guard in zip(specs, guards[1:], strict=True):
            placed += [spec, guard]
        self._arena = device.create_arena(placed, fences)
        manifest = self._arena.manifest
        self.manifest = replace(manifest, buffers=tuple(each for each in manifest.buffers if each.spec in specs))
        """The layout as the drafter sees it."""
        self._device = device
        self._buffers = {spec.name: self._arena.tensor(spec.name) for spec in placed}
        for guard in guards:
            self._buffers[guard.name].fill_(GUARD_VALUE)
        self._expected = {name: buffer.clone() for name, buffer in self._buffers.items()}

    def fence(self, name: FenceName) -> Fence:
        """Returns a fence."""
        return self._arena.fence(name)

    def write(self, name: BufferName, row: int, values: torch.Tensor | Sequence[int] | int) -> None:
        """Writes a row, as the buffer's writer does."""
        target = self._buffers[name]
        row_values = torch.as_tensor(values, dtype=target.dtype, device=target.device)
        for tensor in (target, self._expected[name]):
            tensor[row] = row_values

    def fill(self, name: BufferName, value: int) -> None:
        """Writes one value everywhere."""
        for tensor in (self._buffers[name], self._expected[name]):
            tensor.fill_(value)

    def read(self, name: BufferName, row: int) -> Any:
        """Returns the integers of a row as it is now: one, or lists of them."""
        return self._device.to_host([self._buffers[name][row]])[0].tolist()

    def allow(self, name: BufferName, row: int) -> None:
        """Takes a row as it is now for right."""
        self._expected[name][row] = self._buffers[name][row]

    def allow_all(self) -> None:
        """Takes all buffers, but not what lies between them, as they are now for right."""
        for spec in (placed.spec for placed in self.manifest.buffers):
            self._expected[spec.name].copy_(self._buffers[spec.name])

    def changed(self) -> list[str]:
        """Says what has changed that may not: each buffer, with the first row of it."""
        found = []
        for name, expected in self._expected.items():
            if torch.equal(self._buffers[name], expected):
                continue
            if name.startswith("guard"):
                found.append("memory between the buffers")
            else:
                differs = self._buffers[name] != expected
                row = int(differs.flatten(1).any(1).nonzero()[0, 0]) if expected.ndim > 1 else 0
                found.append(f"{name}, row {row}")
        return found

    def flush(self) -> None:
        """Returns when all that was written here is in the memory."""
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def seal(self) -> None:
        """The drafter has mapped it."""
        self._arena.seal()

    def close(self) -> None:
        """Gives it back."""
        self._buffers.clear()
        self._arena.close()
