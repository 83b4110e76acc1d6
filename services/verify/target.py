"""What verify computes in a step: looks at the draft with the target model, then chooses what stands of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.common.future_map import Outcome
from slipstream.common.step import StepKind
from slipstream.services.models.acceptance import accept
from slipstream.services.models.logprobs import logprobs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.future_map import StepNumber
    from slipstream.common.step import PromptChunk, StepCommand
    from slipstream.services.engine import EpochState
    from slipstream.services.language_model import LanguageModel
    from slipstream.services.models.acceptance import SimulatedAcceptance
    from slipstream.services.padded_chunks import PaddedChunks
    from slipstream.services.slot_table import Needs
    from slipstream.services.staging import Staging


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """Where, in a forward over B chunks, the E prompts end that do: what their first tokens are sampled from."""

    rows: torch.Tensor
    """[E] int64: their slots."""
    chunks: torch.Tensor
    """[E] int64: numbers of chunks."""
    columns: torch.Tensor
    """[E] int64: of the last tokens."""
    lengths: torch.Tensor
    """[E] int64: of the prompts."""
    slots: tuple[int, ...]
    """As `rows`, on the host."""

    @classmethod
    def of(cls, chunks: Sequence[PromptChunk], staging: Staging) -> PromptEnds | None:
        """None if no prompt ends."""
        ends = [number for number, chunk in enumerate(chunks) if chunk.is_last]
        if not ends:
            return None

        def put(values: list[int]) -> torch.Tensor:
            return staging.put(torch.tensor(values, dtype=torch.int64))

        slots = tuple(chunks[number].slot for number in ends)
        return cls(
            rows=put(list(slots)),
            chunks=put(ends),
            columns=put([len(chunks[number].tokens) - 1 for number in ends]),
            lengths=put([chunks[number].start + len(chunks[number].tokens) for number in ends]),
            slots=slots,
        )


@dataclass(frozen=True, slots=True)
class Look:
    """What the target's forward leaves of B slots, W tokens each."""

    rows: torch.Tensor
    """[B] int64: the slots."""
    seq_lens: torch.Tensor
    """[B] int64: the position of the first token."""
    tokens: torch.Tensor
    """[B, W] int64: the bonus token, and the draft's, if there is one."""
    logits: torch.Tensor
    """[B, W, vocab_size], behind each of them."""
    aux: torch.Tensor | None
    """[B, W, width]: the fused states, if a draft reads them."""


class Target:
    """All of it is stream work. Belongs to one epoch."""

    def __init__(
        self,
        model: LanguageModel,
        state: EpochState,
        aux_layers: tuple[int, ...],
        simulated: SimulatedAcceptance | None,
    ) -> None:
        """`aux_layers`: whose inputs a draft reads. `simulated`: accepts in place of the target's word."""
        self._model = model
        self._state = state
        self._aux_layers = aux_layers
        self._simulated = simulated
        self._fused_settle = _fused_settle() if model.device.type == "cuda" else None

    def decode(self, command: StepCommand, rows: torch.Tensor) -> Outcome:
        """A decode step, with a draft or plain. `rows`: [B] int64, the command's slots."""
        look = self.look(command.step, rows, has_draft=command.kind is StepKind.DECODE)
        return self.choose(look, self._state.slots.needs(command.slots), command.top_logprobs)

    def look(self, step: StepNumber, rows: torch.Tensor, *, has_draft: bool) -> Look:
        """The forward over the bonus token and K draft tokens of B slots, or over the bonus token alone."""
        future_map, slots = self._state.future_map, self._model.slots.take(rows)
        seq_lens, bonus_tokens = future_map.gather_ends(step, rows, slots.limits)
        tokens = bonus_tokens[:, None]
        if has_draft:
            tokens = torch.cat((tokens, future_map.copy_in(step, rows)), dim=1)
        positions = _positions(seq_lens, tokens)
        output = self._model.forward(slots, tokens, positions, aux_layers=self._aux_layers)
        return Look(rows, seq_lens, tokens, self._model.decoder.logits(output.hidden), output.aux)

    def choose(self, look: Look, needs: Needs, top_logprobs: int | None = None) -> Outcome:
        """The target's own token at each place, as far as the draft agrees."""
        chain = look.tokens[:, 1:]
        positions = _positions(look.seq_lens, look.tokens) + 1
        # Anew: in a graph, what the look has read of the slots is the look's alone.
        slots = self._model.slots.take(look.rows)
        tokens = self._model.slots.sample(slots, look.logits, positions, needs, chain)
        seq_lens, num_accepted = self._settle(look, tokens)
        return Outcome(
            seq_lens=seq_lens,
            num_accepted=num_accepted,
            tokens=tokens,
            hidden_states=look.aux,
            logprobs=None if top_logprobs is None else logprobs_of(look.logits.float(), tokens, top_logprobs),
        )

    def prefill(self, command: StepCommand, chunks: PaddedChunks, ends: PromptEnds | None) -> Outcome | None:
        """Fills the KV of the chunks; samples the first token of each prompt that ends here."""
        if self._state.attachment.is_debug:
            new = [number for number, chunk in enumerate(command.chunks) if chunk.start == 0]
            self._state.future_map.forget(command.step, chunks.rows[new])
        slots = self._model.slots.take(chunks.rows)
        output = self._model.prefill(slots, chunks, aux_layers=self._aux_layers)
        if output.aux is not None:
            self._state.future_map.stash_prefill(command.step, chunks.counting(output.aux))
        if ends is None:
            return None
        slots, needs = self._model.slots.take(ends.rows), self._state.slots.needs(ends.slots)
        logits = self._model.decoder.logits(output.hidden[ends.chunks, ends.columns][:, None])
        tokens = self._model.slots.sample(slots, logits, ends.lengths[:, None], needs)
        asked = command.top_logprobs
        return Outcome(
            seq_lens=ends.lengths,
            num_accepted=torch.zeros_like(ends.lengths),
            tokens=tokens,
            hidden_states=None if output.aux is None else output.aux[ends.chunks, ends.columns][:, None],
            logprobs=None if asked is None else logprobs_of(logits.float(), tokens, asked),
        )

    def remember(self, rows: torch.Tensor, outcome: Outcome) -> None:
        """The outcome's tokens are output now, for the penalties. `rows`: [B] int64 slots."""
        self._model.slots.remember_output(rows, outcome.tokens, outcome.num_accepted + 1)

    def _settle(self, look: Look, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lengths, and how many draft tokens stand: each [B] int64."""
        table, rows = self._state.slots, look.rows
        if self._fused_settle is not None:
            seeds, threshold = table.sampling.seed, None if self._simulated is None else self._simulated.threshold
            most = table.max_draft_tokens
            return self._fused_settle(tokens, look.tokens, rows, look.seq_lens, most, seeds, threshold)
        if tokens.shape[1] == 1:
            return look.seq_lens + 1, torch.zeros_like(look.seq_lens)
        if self._simulated is None:
            num_accepted = accept(look.tokens[:, 1:], tokens)
        else:
            num_accepted = self._simulated(table.sampling.seed.index_select(0, rows), look.seq_lens)
        # The tokens are the target's own, however many of a chain may stand.
        num_accepted = torch.minimum(num_accepted, table.max_draft_tokens.index_select(0, rows))
        return look.seq_lens + num_accepted + 1, num_accepted


def _fused_settle() -> _Settle:
    # Here, as there is no triton where there is no GPU.
    from slipstream.services.models.kernels.step_ops import settle

    return settle


class _Settle(Protocol):
    def __call__(
        self,
        tokens: torch.Tensor,
        given: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        most: torch.Tensor,
        seeds: torch.Tensor,
        threshold: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def _positions(seq_lens: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, W] int64."""
    return seq_lens[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
