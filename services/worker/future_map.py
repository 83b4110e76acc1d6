"""The FutureMap: results of one step in shared memory, for the next step, before any host knows them.

Two kinds of rows. *Ring* rows, one per step, carry what the scheduler consumes (`publish`). *Slot* rows, one
per running request, carry what only the next forward needs (`stash`). Filtering or merging a batch moves no
tensor, only slot numbers. Idea and terms: SGLang's overlap scheduler (sgl-project/sglang, "spec v2").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from slipstream.common.errors import FutureMapError
from slipstream.common.worker.layout import SLOT_BUFFERS, BufferName
from slipstream.common.worker.step import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slipstream.common.device.interface import Arena
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.layout import FutureMapShape

_RING_BUFFERS = (
    BufferName.NEW_SEQ_LENS,
    BufferName.NUM_ACCEPTED,
    BufferName.OUTPUT_TOKENS,
    BufferName.OUTPUT_LOGPROBS,
    BufferName.TOP_TOKENS,
    BufferName.TOP_LOGPROBS,
)
_STAMPS = {Role.DRAFT: BufferName.DRAFT_STAMPS, Role.VERIFY: BufferName.VERIFY_STAMPS}

POISON = -1
"""Stands for a length that was never written; only in debug mode."""


class CapturedAccess(NamedTuple):
    """An access to a shared buffer that every replay makes."""

    buffer: BufferName
    is_write: bool


@dataclass(slots=True)
class CapturedStep:
    """Stands for a step's number while a graph is captured that will be replayed for many steps."""

    ring_row: torch.Tensor
    """[1] int64 on the device: the step's row of the ring, when the graph is replayed."""
    accesses: list[CapturedAccess] = field(default_factory=list)
    """Accesses since the list was last emptied, for the log of a replay."""

    def take_accesses(self) -> tuple[CapturedAccess, ...]:
        """Returns the accesses since the last call."""
        taken = tuple(dict.fromkeys(self.accesses))
        self.accesses.clear()
        return taken


StepNumber = int | CapturedStep
"""A step's number, or its substitute while a graph is captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, for W places in B slots."""

    output: torch.Tensor
    """[B, W] float32: of the sampled tokens."""
    top_tokens: torch.Tensor
    """[B, W, N] int32: the N most likely tokens, likeliest first, of equals the lowest first."""
    top: torch.Tensor
    """[B, W, N] float32: their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Result of a verify step, for B slots."""

    seq_lens: torch.Tensor
    """[B] int64: tokens whose KV is committed now."""
    num_accepted: torch.Tensor
    """[B] int64: a, the draft tokens accepted."""
    tokens: torch.Tensor
    """[B, 1 to K+1] int64: the target's tokens; the first a + 1 are the output, the last of those the bonus token."""
    hidden_states: torch.Tensor | None = None
    """[B, 1 to K+1, width]: the states that these tokens were sampled from, if a draft reads them."""
    logprobs: Logprobs | None = None
    """Logprobs of `tokens`, if the step is asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStepState:
    """A slot's last step as the next forward reads it, for B slots; in range, whatever was in the memory."""

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


class FutureMap:
    """A worker's view. Every call is device work: it belongs into the worker's stream, or into a graph."""

    def __init__(
        self,
        shape: FutureMapShape,
        arena: Arena,
        role: Role,
        vocab_size: int,
        log: AccessLog,
        *,
        is_debug: bool = False,
    ) -> None:
        """`vocab_size`: tokens read from the arena are clamped below it."""
        self._shape = shape
        self._vocab_size = vocab_size
        self._log = log
        self._is_debug = is_debug
        self._buffers = {BufferName(spec.name): arena.tensor(spec.name) for spec in shape.specs()}
        # Views made once, so that a step only writes.
        self._ring_rows = {name: self._buffers[name].unbind() for name in _RING_BUFFERS}
        self._flat = {name: self._buffers[name].flatten(0, 1) for name in _RING_BUFFERS}
        self._stamps = {
            (role, row): (stamps[0], stamps[1])
            for role, name in _STAMPS.items()
            if name in self._buffers
            for row, stamps in enumerate(self._buffers[name].unbind())
        }
        self._zero = torch.zeros((), dtype=torch.int64, device=self._buffers[BufferName.SEQ_LENS].device)
        if is_debug and role is Role.VERIFY:
            self._buffers[BufferName.SEQ_LENS].fill_(POISON)
            self._buffers[BufferName.NEW_SEQ_LENS].fill_(POISON)

    def stamps(self, role: Role, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The places for the stamps of start and end of a worker's own work in `step`: two [] int64."""
        return self._stamps[role, step % self._shape.ring]

    def stamp_columns(self, role: Role) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the stamps in all rows of the ring: two [ring] int64."""
        stamps = self._buffers[_STAMPS[role]]
        return stamps[:, 0], stamps[:, 1]

    def publish(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        """Verify: writes what the scheduler consumes. `rows`: [B] int64 slots."""
        places = rows + step.ring_row * self._shape.num_slots if isinstance(step, CapturedStep) else rows
        num_accepted = result.num_accepted.to(torch.int32)
        self._ring_write(BufferName.NEW_SEQ_LENS, step).index_copy_(0, places, result.seq_lens)
        self._ring_write(BufferName.NUM_ACCEPTED, step).index_copy_(0, places, num_accepted)
        _copy_rows(self._ring_write(BufferName.OUTPUT_TOKENS, step), places, result.tokens)
        if result.logprobs is not None:
            self._publish_logprobs(step, places, result.logprobs)
        if self._is_debug and not isinstance(step, CapturedStep):
            # The row of step - ring + 1 is consumed by now, or this step would not have been sent.
            self._ring_write(BufferName.NEW_SEQ_LENS, step, offset=1).fill_(POISON)

    def _publish_logprobs(self, step: StepNumber, places: torch.Tensor, logprobs: Logprobs) -> None:
        _copy_rows(self._ring_write(BufferName.OUTPUT_LOGPROBS, step), places, logprobs.output)
        num_top = logprobs.top.shape[2]
        for name, values in ((BufferName.TOP_TOKENS, logprobs.top_tokens), (BufferName.TOP_LOGPROBS, logprobs.top)):
            _copy_rows(self._ring_write(name, step)[:, :, :num_top], places, values)

    def stash(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        """Verify: writes what the next forward on these slots reads. `rows`: [B] int64 slots."""
        bonus = result.tokens.gather(1, result.num_accepted[:, None])[:, 0]
        self._slot_write(BufferName.SEQ_LENS, rows, step).index_copy_(0, rows, result.seq_lens)
        self._slot_write(BufferName.BONUS_TOKENS, rows, step).index_copy_(0, rows, bonus)
        self._slot_write(BufferName.NUM_NEW, rows, step).index_copy_(0, rows, result.num_accepted + 1)
        _copy_rows(self._slot_write(BufferName.LAST_TOKENS, rows, step), rows, result.tokens)
        if result.hidden_states is not None:
            self._stash_hidden(step, rows, result.hidden_states)

    def stash_prefill(self, step: int, hidden: torch.Tensor) -> None:
        """Verify: leaves a chunk's hidden states ([tokens, width], chunk after chunk) for the draft's own prefill."""
        if self._log.is_enabled:
            self._log.access(BufferName.PREFILL_HIDDEN, [0], is_write=True, step=step)
        self._buffers[BufferName.PREFILL_HIDDEN][: len(hidden)] = hidden

    def gather_prefill(self, step: int, num_tokens: int) -> torch.Tensor:
        """Draft: the hidden states of the chunks of a prefill, chunk after chunk: [num_tokens, width]."""
        if self._log.is_enabled:
            self._log.access(BufferName.PREFILL_HIDDEN, [0], is_write=False, step=step)
        return self._buffers[BufferName.PREFILL_HIDDEN][:num_tokens].clone()

    def gather_ends(
        self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads where the sequences of B slots end: their lengths and bonus tokens, each [B] int64.

        `rows`: [B] int64; `limits`: [B] int64, lengths are clamped to them. Raises FutureMapError in debug mode
        when a row was never stashed.
        """
        seq_lens = self._slot_read(BufferName.SEQ_LENS, rows, step)
        if self._is_debug and bool((seq_lens == POISON).any()):
            raise FutureMapError(f"step {step}: gathered slots {rows.tolist()} before they were stashed")
        return torch.clamp(seq_lens, self._zero, limits), self._tokens(BufferName.BONUS_TOKENS, rows, step)

    def gather(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> NextStepState:
        """Reads the whole stash of B slots. Arguments and errors as in `gather_ends`."""
        seq_lens, bonus_tokens = self.gather_ends(step, rows, limits)
        return NextStepState(
            seq_lens=seq_lens,
            bonus_tokens=bonus_tokens,
            num_new=self._slot_read(BufferName.NUM_NEW, rows, step).clamp_(1, self._shape.num_draft_tokens + 1),
            last_tokens=self._tokens(BufferName.LAST_TOKENS, rows, step),
            hidden_states=self._hidden(step, rows),
        )

    def forget(self, step: int, rows: torch.Tensor) -> None:
        """Verify, in debug mode: poisons slots that another request takes, as nothing of the last one may be read."""
        if self._is_debug:
            self._slot_write(BufferName.SEQ_LENS, rows, step)[rows] = POISON

    def propose(self, step: StepNumber, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Draft: writes its tokens. `rows`: [B] int64; `tokens`: [B, K] int64."""
        self._slot_write(BufferName.DRAFT_TOKENS, rows, step).index_copy_(0, rows, tokens)

    def copy_in(self, step: StepNumber, rows: torch.Tensor) -> torch.Tensor:
        """Verify: returns a private copy of the draft tokens, [B, K] int64, in range whatever a draft wrote."""
        return self._tokens(BufferName.DRAFT_TOKENS, rows, step)

    def log_replay(self, accesses: Iterable[CapturedAccess], step: int, slots: Sequence[int]) -> None:
        """Logs the accesses of a graph that is replayed for `step` and these slots."""
        if not self._log.is_enabled:
            return
        for name, is_write in accesses:
            rows = slots if name in SLOT_BUFFERS else [step % self._shape.ring]
            self._log.access(name, rows, is_write=is_write, step=step)

    def _hidden(self, step: StepNumber, rows: torch.Tensor) -> torch.Tensor | None:
        """The stashed states of B slots, if a draft reads them."""
        if BufferName.HIDDEN_STATES not in self._buffers:
            return None
        return self._slot_read(BufferName.HIDDEN_STATES, rows, step)

    def _stash_hidden(self, step: StepNumber, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        _copy_rows(self._slot_write(BufferName.HIDDEN_STATES, rows, step), rows, hidden)

    def _tokens(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        return self._slot_read(name, rows, step).clamp_(0, self._vocab_size - 1)

    def _slot_read(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        self._declare(name, rows, step, is_write=False)
        return self._buffers[name].index_select(0, rows)

    def _slot_write(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        self._declare(name, rows, step, is_write=True)
        return self._buffers[name]

    def _declare(self, name: BufferName, rows: torch.Tensor, step: StepNumber, *, is_write: bool) -> None:
        if isinstance(step, CapturedStep):
            step.accesses.append(CapturedAccess(name, is_write))
        elif self._log.is_enabled:
            self._log.access(name, rows.tolist(), is_write=is_write, step=step)

    def _ring_write(self, name: BufferName, step: StepNumber, offset: int = 0) -> torch.Tensor:
        """The step's own row ([slots, ...]); in a graph, which finds it only later, all rows ([ring * slots, ...])."""
        if isinstance(step, CapturedStep):
            step.accesses.append(CapturedAccess(name, is_write=True))
            return self._flat[name]
        row = (step + offset) % self._shape.ring
        if self._log.is_enabled:
            self._log.access(name, [row], is_write=True, step=step)
        return self._ring_rows[name][row]


def _copy_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` ([B, W, ...]) into the first W columns of some rows of `target` ([slots, >= W, ...])."""
    width = values.shape[1]
    (target if width == target.shape[1] else target.narrow(1, 0, width)).index_copy_(0, rows, values)
