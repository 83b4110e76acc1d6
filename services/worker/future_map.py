"""The FutureMap: results of one step for the next step, before any host knows them.

Verify's `FutureMap` has two parts. *Ring* rows, one per step, carry what the scheduler consumes (`publish`). What its
own next forward needs of a slot is private. A `Region`, the memory between verify and one draft, has *slot* rows, one
per running request, with what only the draft's next forward needs (`stash`) and with what the draft gives. Filtering
or merging a batch moves no tensor, only slot numbers. Idea and terms: SGLang's overlap scheduler (sgl-project/sglang,
"spec v2").
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from slipstream.common.errors import FutureMapError
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import DECODE_PART, NOT_FINITE, PREFILL_PART, SLOT_BUFFERS, BufferName, RegionWord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slipstream.common.wire.layout import DraftShape, EpochShape
    from slipstream.common.wire.worker import DraftSizes
    from slipstream.services.models.sampler import Logprobs


class CapturedAccess(NamedTuple):
    """An access to a shared buffer that every replay makes."""

    buffer: BufferName
    is_write: bool


@dataclass(frozen=True, slots=True)
class StampPlace:
    """Where the stamp of a step goes, which the device finds by itself."""

    column: torch.Tensor
    """[ring] int64, perhaps with a stride."""
    ring_row: torch.Tensor
    """[1] int64: the step's row."""

    def stamp(self) -> None:
        """Stream work where the device is the host."""
        self.column.index_fill_(0, self.ring_row, time.monotonic_ns())


@dataclass(slots=True)
class CapturedStep:
    """Stands for a step's number while a graph is captured that will be replayed for many steps."""

    ring_row: torch.Tensor
    """[1] int64 on the device: the step's row of the ring, when the graph is replayed."""
    region_words: torch.Tensor
    """[words of `RegionWord`] int64 on the device: the region of the draft that takes part, for verify."""
    start: StampPlace | None = None
    """Where what reads a slot's state first stamps that the worker's own work begins."""
    end: StampPlace | None = None
    """Where what a worker writes last stamps that it ends: a draft's tokens, or verify's stash."""
    accesses: list[CapturedAccess] = field(default_factory=list)
    """Accesses since the list was last emptied, for the log of a replay."""

    def take_accesses(self) -> tuple[CapturedAccess, ...]:
        """Returns the accesses since the last call."""
        taken = tuple(dict.fromkeys(self.accesses))
        self.accesses.clear()
        return taken


StepNumber = int | CapturedStep
"""A step's number, or its substitute while a graph is captured."""


class SharedBuffers:
    """Buffers in shared memory and the log of their accesses.

    Every operation of a subclass is device work: it belongs into the worker's stream, or into a graph.
    """

    def __init__(
        self, buffers: Mapping[BufferName, torch.Tensor], stamps: BufferName, log: EventLog, attachment: int
    ) -> None:
        """`stamps`: the buffer with the times of a worker's own work. `attachment`: 0 for the results."""
        self.attachment = attachment
        """The number of the attachment; 0 for the results."""
        self._buffers = buffers
        self._stamps = stamps
        self._log = log
        self._ring = len(buffers[stamps])
        # Views made once, so that a step only writes. A draft has stamps of two parts, verify of one.
        self._stamp_parts = buffers[stamps].view(self._ring, -1, 2)
        self._stamp_rows = [[(part[0], part[1]) for part in row.unbind()] for row in self._stamp_parts.unbind()]

    def stamps(self, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The places for the stamps of start and end of a part of the worker's own work in `step`: two [] int64."""
        return self._stamp_rows[step % self._ring][part]

    def stamp_columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the first part's stamps in all rows of the ring: two [ring] int64."""
        return self._stamp_parts[:, 0, 0], self._stamp_parts[:, 0, 1]

    def log_stamps(self, step: int, part: int) -> None:
        """Logs that the stamps of a part of `step` were written. In the log each part has a row."""
        row = step % self._ring * len(self._stamp_rows[0]) + part
        self.access(self._stamps, [row], step, is_write=True)

    def buffer(self, name: BufferName) -> torch.Tensor:
        """Returns a buffer, for accesses that are logged elsewhere."""
        return self._buffers[name]

    def log_replay(self, accesses: Iterable[CapturedAccess], step: int, slots: Sequence[int]) -> None:
        """Logs the accesses of a graph that is replayed for `step` and these slots."""
        if self._log.is_enabled:
            for name, is_write in accesses:
                self.access(name, slots if name in SLOT_BUFFERS else [step % self._ring], step, is_write=is_write)

    def access(self, name: BufferName, rows: Sequence[int], step: int, *, is_write: bool) -> torch.Tensor:
        """Returns a buffer of which these rows are read or written, as is logged."""
        if self._log.is_enabled:
            self._log.access(name, rows, is_write=is_write, step=step, attachment=self.attachment)
        return self._buffers[name]

    def _slot_read(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        self._declare(name, rows, step, is_write=False)
        return self._buffers[name].index_select(0, rows)

    def _to_write(self, name: BufferName, rows: Sequence[int], step: int) -> torch.Tensor:
        return self.access(name, rows, step, is_write=True)

    def _declare(self, name: BufferName, rows: torch.Tensor, step: StepNumber, *, is_write: bool) -> None:
        if isinstance(step, CapturedStep):
            step.accesses.append(CapturedAccess(name, is_write))
        elif self._log.is_enabled:
            self.access(name, rows.tolist(), step, is_write=is_write)


def stamp_start(step: StepNumber) -> None:
    """Stream work where the device is the host: the start of a captured step's own work."""
    if isinstance(step, CapturedStep) and step.start is not None:
        step.start.stamp()


def stamp_end(step: StepNumber) -> None:
    """As `stamp_start`, of its end."""
    if isinstance(step, CapturedStep) and step.end is not None:
        step.end.stamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Result of a verify step, for B slots."""

    seq_lens: torch.Tensor
    """[B] int64: tokens whose KV is committed now."""
    num_accepted: torch.Tensor
    """[B] int64: a, the draft tokens accepted."""
    tokens: torch.Tensor
    """[B, 1 to K+1] int64: the target's tokens; the first a + 1 are the output, the last of those the bonus token."""
    scores: torch.Tensor | None = None
    """[B, 1 to K+1]: the logits of `tokens`. Of a slot where one that counts is not finite, no token is published."""
    faults: torch.Tensor | None = None
    """[B] int64: what is published in place of tokens where the slot's masks are missing, else 0; None: 0 for all."""
    hidden_states: torch.Tensor | None = None
    """[B, 1 to K+1, width]: the states that these tokens were sampled from, if a draft reads them."""
    logprobs: Logprobs | None = None
    """Logprobs of `tokens`, if the step is asked for them."""


POISON = -1
"""Stands for a length that was never written; only in debug mode."""


NO_REGION = (0,) * len(RegionWord)
"""The words of a step without a draft."""
PROPOSED = (BufferName.DRAFT_TOKENS, BufferName.NUM_PROPOSED)
"""The buffers that a draft writes with its guesses."""
STASHED = (BufferName.SEQ_LENS, BufferName.BONUS_TOKENS, BufferName.NUM_NEW, BufferName.LAST_TOKENS)
"""The buffers that every stash writes; hidden states are written where the draft reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStepState:
    """A slot's last step as the draft's next forward reads it, for B slots; in range, whatever was in the memory."""

    seq_lens: torch.Tensor
    """[B] int64."""
    bonus_tokens: torch.Tensor
    """[B] int64: the last token, at position `seq_lens`, whose KV is not written yet."""
    num_new: torch.Tensor
    """[B] int64: a + 1."""
    last_tokens: torch.Tensor
    """[B, K+1] int64: the tokens of the last step, of which `num_new` count."""
    hidden_states: torch.Tensor | None
    """[B, K+1, width]."""


class Region(SharedBuffers):
    """The memory between verify and one draft, as either of them sees it."""

    def __init__(
        self,
        shape: DraftShape,
        sizes: DraftSizes,
        buffers: Mapping[BufferName, torch.Tensor],
        *,
        number: int,
        vocab_size: int,
        log: EventLog,
        is_debug: bool = False,
    ) -> None:
        """`number`: of the attachment. `vocab_size`: tokens that are read are clamped below it."""
        super().__init__(buffers, BufferName.DRAFT_STAMPS, log, number)
        self.shape = shape
        self.sizes = sizes
        self._vocab_size = vocab_size
        self._is_debug = is_debug
        self._zero = torch.zeros((), dtype=torch.int64, device=buffers[BufferName.SEQ_LENS].device)
        words = {name.name: buffer.data_ptr() for name, buffer in buffers.items()}
        words |= {RegionWord.ATTACHMENT.name: number, RegionWord.ROW_WIDTH.name: shape.num_draft_tokens + 1}
        self.words = tuple(words.get(word.name, 0) for word in RegionWord)
        """See `RegionWord`."""

    def with_own_tokens(self) -> Self:
        """Verify: the same region, with draft tokens of this process in place of the draft's, and without a log.

        A graph that copies in from there has the tokens that `keep_tokens` was given, whatever the draft writes.
        """
        own = torch.zeros_like(self._buffers[BufferName.DRAFT_TOKENS])
        buffers = {**self._buffers, BufferName.DRAFT_TOKENS: own}
        number, vocab_size = -self.attachment, self._vocab_size
        return type(self)(self.shape, self.sizes, buffers, number=number, vocab_size=vocab_size, log=EventLog())

    def keep_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Stream work on a region with its own tokens: writes those of B slots. `rows`: [B] int64; `tokens`: [B, K]."""
        copy_rows(self._buffers[BufferName.DRAFT_TOKENS], rows, tokens)

    def poison(self) -> None:
        """Verify, in debug mode: no slot has a stash yet."""
        self._buffers[BufferName.SEQ_LENS].fill_(POISON)

    def stash(self, step: int, slots: Sequence[int], rows: torch.Tensor, result: VerifyResult) -> None:
        """Verify: writes what the draft's next forward on these slots reads.

        `rows`: [B] int64, the slots on the device, perhaps with padding after them.
        """
        self.log_stash(step, slots, result)
        self.write_stash(rows, result)

    def log_stash(self, step: int, slots: Sequence[int], result: VerifyResult) -> None:
        """Logs that the stash of `result` is written."""
        if self._log.is_enabled:
            for name in (*STASHED, BufferName.HIDDEN_STATES) if self._takes_states(result) else STASHED:
                self.access(name, slots, step, is_write=True)

    def write_stash(self, rows: torch.Tensor, result: VerifyResult) -> None:
        """Verify: does what `stash` does, without the log."""
        bonus = result.tokens.gather(1, result.num_accepted[:, None])[:, 0]
        self._buffers[BufferName.SEQ_LENS].index_copy_(0, rows, result.seq_lens)
        self._buffers[BufferName.BONUS_TOKENS].index_copy_(0, rows, bonus)
        self._buffers[BufferName.NUM_NEW].index_copy_(0, rows, result.num_accepted + 1)
        copy_rows(self._buffers[BufferName.LAST_TOKENS], rows, result.tokens)
        if self._takes_states(result):
            assert result.hidden_states is not None, "the draft reads them"
            copy_rows(self._buffers[BufferName.HIDDEN_STATES], rows, result.hidden_states)

    def forget(self, step: int, slots: Sequence[int]) -> None:
        """Verify, in debug mode: poisons slots that another request takes, as nothing of the last one may be read."""
        if slots:
            self._to_write(BufferName.SEQ_LENS, slots, step)[list(slots)] = POISON

    def stash_prefill(self, step: int, hidden: torch.Tensor) -> None:
        """Verify: leaves a chunk's hidden states ([tokens, width], chunk after chunk) for the draft's own prefill."""
        self._to_write(BufferName.PREFILL_HIDDEN, [0], step)[: len(hidden)] = hidden

    def gather_prefill(self, step: int, num_tokens: int) -> torch.Tensor:
        """Draft: the hidden states of the chunks of a prefill, chunk after chunk: [num_tokens, width]."""
        return self.access(BufferName.PREFILL_HIDDEN, [0], step, is_write=False)[:num_tokens].clone()

    def gather(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> NextStepState:
        """Draft: reads the stash of B slots. `rows`: [B] int64; `limits`: [slots] int64, lengths are clamped to them.

        Of new tokens only those up to the limit count: the others would be taken for tokens before it.

        Raises FutureMapError in debug mode when a row was never stashed.
        """
        stamp_start(step)
        seq_lens = self._slot_read(BufferName.SEQ_LENS, rows, step)
        if self._is_debug:
            check_stashed(seq_lens, rows, step)
        ends = torch.clamp(seq_lens, self._zero, limits.index_select(0, rows))
        num_new = self._slot_read(BufferName.NUM_NEW, rows, step) - (seq_lens.clamp(min=0) - ends)
        return NextStepState(
            seq_lens=ends,
            bonus_tokens=self._tokens(BufferName.BONUS_TOKENS, rows, step),
            num_new=num_new.clamp_(1, self.shape.num_draft_tokens + 1),
            last_tokens=self._tokens(BufferName.LAST_TOKENS, rows, step),
            hidden_states=self._hidden(step, rows),
        )

    def propose(self, step: StepNumber, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Draft: writes its tokens and how many they are. `rows`: [B] int64; `tokens`: [B, W] int64, W up to K."""
        for name in PROPOSED:
            self._declare(name, rows, step, is_write=True)
        copy_rows(self._buffers[BufferName.DRAFT_TOKENS], rows, tokens)
        self._buffers[BufferName.NUM_PROPOSED].index_fill_(0, rows, tokens.shape[1])
        stamp_end(step)

    def _takes_states(self, result: VerifyResult) -> bool:
        return result.hidden_states is not None and bool(self.shape.hidden_width)

    def _hidden(self, step: StepNumber, rows: torch.Tensor) -> torch.Tensor | None:
        """The stashed states of B slots, if the draft reads them."""
        return self._slot_read(BufferName.HIDDEN_STATES, rows, step) if self.shape.hidden_width else None

    def _tokens(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        return self._slot_read(name, rows, step).clamp_(0, self._vocab_size - 1)


def check_stashed(seq_lens: torch.Tensor, rows: torch.Tensor, step: StepNumber) -> None:
    """Raises FutureMapError if a length was never written: in debug mode, where such rows are poisoned."""
    if bool((seq_lens == POISON).any()):
        raise FutureMapError(f"step {step}: gathered slots {rows.tolist()} before they were stashed")


def copy_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` ([B, W, ...]) into the first W columns of some rows of `target` ([slots, >= W, ...])."""
    width = values.shape[1]
    (target if width == target.shape[1] else target.narrow(1, 0, width)).index_copy_(0, rows, values)


_RING_BUFFERS = (
    BufferName.NEW_SEQ_LENS,
    BufferName.NUM_ACCEPTED,
    BufferName.OUTPUT_TOKENS,
    BufferName.OUTPUT_LOGPROBS,
    BufferName.TOP_TOKENS,
    BufferName.TOP_LOGPROBS,
)


class FutureMap(SharedBuffers):
    """Verify's results, and the state of each slot that its own next forward reads."""

    def __init__(
        self,
        shape: EpochShape,
        buffers: Mapping[BufferName, torch.Tensor],
        *,
        vocab_size: int,
        log: EventLog,
        regions: Mapping[int, Region] | None = None,
        is_debug: bool = False,
    ) -> None:
        """`vocab_size`: tokens are below it. `regions`: of attached drafts, by number; read only by the host."""
        super().__init__(buffers, BufferName.VERIFY_STAMPS, log, attachment=0)
        self._shape = shape
        self._vocab_size = vocab_size
        self._regions = {} if regions is None else regions
        self._is_debug = is_debug
        self._ring_rows = {name: buffers[name].unbind() for name in _RING_BUFFERS}
        self._flat = {name: buffers[name].flatten(0, 1) for name in _RING_BUFFERS}
        # Not shared, so that no draft can change an output.
        device = buffers[BufferName.NEW_SEQ_LENS].device
        self._seq_lens, self._bonus_tokens = torch.zeros((2, shape.num_slots), dtype=torch.int64, device=device)
        if is_debug:
            self._seq_lens.fill_(POISON)
            buffers[BufferName.NEW_SEQ_LENS].fill_(POISON)

    def publish(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        """Writes what the scheduler consumes, and keeps what the next forward needs. `rows`: [B] int64 slots."""
        places = rows + step.ring_row * self._shape.num_slots if isinstance(step, CapturedStep) else rows
        num_accepted = _published(result).to(torch.int32)
        self._ring_write(BufferName.NEW_SEQ_LENS, step).index_copy_(0, places, result.seq_lens)
        self._ring_write(BufferName.NUM_ACCEPTED, step).index_copy_(0, places, num_accepted)
        copy_rows(self._ring_write(BufferName.OUTPUT_TOKENS, step), places, result.tokens)
        if result.logprobs is not None:
            self._publish_logprobs(step, places, result.logprobs)
        if self._is_debug and not isinstance(step, CapturedStep):
            # The row of step - ring + 1 is consumed by now, or this step would not have been sent.
            self._ring_write(BufferName.NEW_SEQ_LENS, step, offset=1).fill_(POISON)
        self._seq_lens.index_copy_(0, rows, result.seq_lens)
        self._bonus_tokens.index_copy_(0, rows, result.tokens.gather(1, result.num_accepted[:, None])[:, 0])

    def ends(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the sequences of B slots end: their lengths and bonus tokens, each [B] int64.

        `rows`: [B] int64; `limits`: [slots] int64, lengths are clamped to them. Raises FutureMapError in debug mode
        when no step ended there yet.
        """
        stamp_start(step)
        seq_lens = self._seq_lens.index_select(0, rows)
        if self._is_debug:
            check_stashed(seq_lens, rows, step)
        return torch.minimum(seq_lens, limits.index_select(0, rows)), self._bonus_tokens.index_select(0, rows)

    def forget(self, slots: Sequence[int]) -> None:
        """In debug mode: poisons slots that another request takes, as nothing of the last one may be read."""
        self._seq_lens[list(slots)] = POISON

    def copy_in(self, step: int, region: Region, slots: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Returns a private copy of the draft tokens of B slots, and copies the draft's stamps to the results.

        `rows`: [B] int64, the slots on the device, perhaps with padding after them. Returns [B, K] int64: the tokens
        are in range, whatever the draft wrote; the stamps may be any numbers.
        """
        self.log_copy_in(step, region, slots)
        return self._copied(step % self._ring, region, rows)

    def log_copy_in(self, step: int, region: Region, slots: Sequence[int]) -> None:
        """Logs what a copy reads and writes."""
        if self._log.is_enabled:
            region.access(BufferName.DRAFT_TOKENS, slots, step, is_write=False)
            self._log_copied_stamps(step, region)

    def copy_stamps(self, step: int, region: Region) -> None:
        """Copies the draft's stamps to the results, in a step that copies no draft tokens in."""
        if self._log.is_enabled:
            self._log_copied_stamps(step, region)
        self._copy_stamps(step % self._ring, region)

    def _log_copied_stamps(self, step: int, region: Region) -> None:
        # Of this step's decode part, for which verify has waited, and of the prefill part before it.
        rows = [2 * (step % self._ring) + DECODE_PART, 2 * ((step - 1) % self._ring) + PREFILL_PART]
        region.access(BufferName.DRAFT_STAMPS, rows, step, is_write=False)
        self.access(BufferName.DRAFT_STAMPS, rows, step, is_write=True)

    def _copy_stamps(self, row: int, region: Region) -> None:
        source, target = region.buffer(BufferName.DRAFT_STAMPS), self._buffers[BufferName.DRAFT_STAMPS]
        before = (row - 1) % self._ring
        target[row, DECODE_PART].copy_(source[row, DECODE_PART])
        target[before, PREFILL_PART].copy_(source[before, PREFILL_PART])

    def copy_in_captured(self, step: CapturedStep, rows: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
        """Copies the first tokens as `copy_in` does, from the region that is there at the replay.

        Returns [B, num_draft_tokens] int64, at most K of each; 0 where there is no region.
        """
        region = self._region_at(step)
        if region is None:
            return rows.new_zeros(len(rows), num_draft_tokens)
        return self._copied(int(step.ring_row), region, rows)[:, :num_draft_tokens]

    def stash_captured(self, step: CapturedStep, rows: torch.Tensor, result: VerifyResult) -> None:
        """Does what `Region.stash` does, in the region that is there at the replay, if any; stamps the end."""
        region = self._region_at(step)
        if region is not None:
            region.write_stash(rows, result)
        stamp_end(step)

    def _copied(self, row: int, region: Region, rows: torch.Tensor) -> torch.Tensor:
        self._copy_stamps(row, region)
        return region.buffer(BufferName.DRAFT_TOKENS).index_select(0, rows).clamp_(0, self._vocab_size - 1)

    def _region_at(self, step: CapturedStep) -> Region | None:
        """Where the device is the host."""
        return self._regions.get(int(step.region_words[RegionWord.ATTACHMENT]))

    def _publish_logprobs(self, step: StepNumber, places: torch.Tensor, logprobs: Logprobs) -> None:
        copy_rows(self._ring_write(BufferName.OUTPUT_LOGPROBS, step), places, logprobs.output)
        num_top = logprobs.top.shape[2]
        for name, values in ((BufferName.TOP_TOKENS, logprobs.top_tokens), (BufferName.TOP_LOGPROBS, logprobs.top)):
            copy_rows(self._ring_write(name, step)[:, :, :num_top], places, values)

    def _ring_write(self, name: BufferName, step: StepNumber, offset: int = 0) -> torch.Tensor:
        """The step's own row ([slots, ...]); in a graph, which finds it only later, all rows ([ring * slots, ...])."""
        if isinstance(step, CapturedStep):
            step.accesses.append(CapturedAccess(name, is_write=True))
            return self._flat[name]
        row = (step + offset) % self._ring
        self.access(name, [row], step, is_write=True)
        return self._ring_rows[name][row]


def _published(result: VerifyResult) -> torch.Tensor:
    """[B] int64: the accepted draft tokens, or NOT_FINITE, or a fault."""
    if result.faults is not None:
        sound = _published(replace(result, faults=None))
        return torch.where(result.faults == 0, sound, result.faults)
    if result.scores is None:
        return result.num_accepted
    places = torch.arange(result.scores.shape[1], device=result.scores.device)
    is_sound = (result.scores.isfinite() | (places > result.num_accepted[:, None])).all(dim=1)
    return torch.where(is_sound, result.num_accepted, NOT_FINITE)
