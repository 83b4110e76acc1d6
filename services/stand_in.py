"""Stand-ins of a known length in place of the models: what is left of a step's time is the system's own.

The tokens follow a rule that draft and verify share; the draft guesses the first half of its tokens right.
Everything else of a step is real: waits, stamps, the FutureMap, signals. Context costs nothing.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from slipstream.common.future_map import Outcome
from slipstream.common.step import FenceName, StepKind
from slipstream.services.engine import Phase
from slipstream.services.models.acceptance import accept

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.step import StepCommand
    from slipstream.common.worker_contract import WorkerDescription
    from slipstream.services.engine import EpochState

SPIN_S = 0.00015
"""A sleep may end late by so much, and a kernel must not: 90 us are common on a virtual machine."""
T = TypeVar("T")

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None)
MAX_CONTEXT_TOKENS = 1 << 20
FIRST_TOKEN = 32
NUM_TOKENS = 64


def without_context_cost(description: WorkerDescription) -> WorkerDescription:
    """The description of a stand-in for a model: it keeps no KV, so a request may be as long as it likes."""
    return replace(description, max_context_tokens=MAX_CONTEXT_TOKENS, kv_bytes_per_token=1)


def token_at(positions: torch.Tensor) -> torch.Tensor:
    """The token that stand-ins put at each position: int64 of the same shape."""
    return FIRST_TOKEN + positions % NUM_TOKENS


class Kernel:
    """A kernel of a known length: what it computes is part of it. Belongs to one stream."""

    def __init__(self, length_ms: float) -> None:
        self._length_s = length_ms / 1000
        self._is_precise = False

    def run(self, compute: Callable[[], T]) -> T:
        """Returns what `compute` does, when the length is over; sleeps, and looks at the clock for the last bit."""
        end = time.monotonic() + self._length_s
        if not self._is_precise:
            # Of the calling thread: the kernel else bundles its wake-ups with others' up to 50 us later.
            _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
            self._is_precise = True
        result = compute()
        time.sleep(max(0.0, end - time.monotonic() - SPIN_S))
        while time.monotonic() < end:
            pass
        return result


class _StandIn:
    """What both stand-ins are: a description, and a kernel in place of a model."""

    def __init__(self, description: WorkerDescription, length_ms: float) -> None:
        self._description = without_context_cost(description)
        self._kernel = Kernel(length_ms)

    def describe(self) -> WorkerDescription:
        """See `RoleEngine.describe`."""
        return self._description

    def open(self, state: EpochState) -> None:
        """There is nothing to allocate."""

    def close(self) -> None:
        """There is nothing to free."""


class StandInVerify(_StandIn):
    """Implements `RoleEngine` for verify."""

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        chunks = [chunk for chunk in command.chunks if chunk.is_last]
        is_prefill = command.kind is StepKind.PREFILL
        rows = torch.tensor([chunk.slot for chunk in chunks] if is_prefill else command.slots, dtype=torch.int64)
        outcome: list[Outcome] = []

        def publish() -> None:
            if is_prefill:
                ends = torch.tensor([chunk.start + len(chunk.tokens) for chunk in chunks], dtype=torch.int64)
                outcome.append(self._kernel.run(lambda: _first_tokens(ends)))
            else:
                outcome.append(self._decode(command, state, rows))
            state.future_map.publish(command.step, rows, outcome[0])

        def stash() -> None:
            state.future_map.stash(command.step, rows, outcome[0])

        return [Phase(publish, FenceName.VERIFY_PUBLISH), Phase(stash, FenceName.VERIFY_STASH)]

    def _decode(self, command: StepCommand, state: EpochState, rows: torch.Tensor) -> Outcome:
        seq_lens, _ = state.future_map.gather_ends(command.step, rows, state.slots.limits_of(rows))
        if command.kind is StepKind.PLAIN:
            return self._kernel.run(lambda: _first_tokens(seq_lens + 1))
        draft_tokens = state.future_map.copy_in(command.step, rows)
        most = state.slots.max_draft_tokens.index_select(0, rows)
        return self._kernel.run(lambda: _verified(seq_lens, draft_tokens, most))


class StandInDraft(_StandIn):
    """Implements `RoleEngine` for draft."""

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        rows = torch.tensor(command.slots, dtype=torch.int64)
        num_tokens = state.attachment.shape.num_draft_tokens

        def propose() -> None:
            seq_lens, _ = state.future_map.gather_ends(command.step, rows, state.slots.limits_of(rows))
            tokens = self._kernel.run(lambda: _guessed(seq_lens, num_tokens))
            state.future_map.propose(command.step, rows, tokens)

        def prefill() -> None:
            self._kernel.run(lambda: None)

        return [Phase(propose if command.kind is StepKind.DECODE else prefill, FenceName.DRAFT_DONE)]


def _guessed(seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B, num_tokens] draft tokens behind B bonus tokens, the first half of them right."""
    tokens = token_at(seq_lens[:, None] + 1 + torch.arange(num_tokens))
    tokens[:, (num_tokens + 1) // 2 :] = 0
    return tokens


def _verified(seq_lens: torch.Tensor, draft_tokens: torch.Tensor, most: torch.Tensor) -> Outcome:
    tokens = token_at(seq_lens[:, None] + 1 + torch.arange(draft_tokens.shape[1] + 1))
    num_accepted = torch.minimum(accept(draft_tokens, tokens), most)
    return Outcome(seq_lens=seq_lens + num_accepted + 1, num_accepted=num_accepted, tokens=tokens)


def _first_tokens(seq_lens: torch.Tensor) -> Outcome:
    """One token behind each of B lengths."""
    return Outcome(seq_lens=seq_lens, num_accepted=torch.zeros_like(seq_lens), tokens=token_at(seq_lens)[:, None])
