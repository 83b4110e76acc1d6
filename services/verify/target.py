"""What verify computes in a step: looks at the draft with the target model, then chooses what stands of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.common.worker.step import StepKind
from slipstream.services.models.acceptance import accept
from slipstream.services.models.sampler import logprobs_of
from slipstream.services.worker.future_map import Logprobs, VerifyResult

if TYPE_CHECKING:
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.models.acceptance import SimulatedAcceptance
    from slipstream.services.models.decoder import DecoderOutput
    from slipstream.services.verify.prompts import PromptEnds, PromptGroup
    from slipstream.services.worker.engine import EpochState
    from slipstream.services.worker.future_map import StepNumber
    from slipstream.services.worker.language_model import LanguageModel
    from slipstream.services.worker.paged_slots import SlotRows
    from slipstream.services.worker.slots import SamplingMode


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
        *,
        width: int | None = None,
    ) -> None:
        """`aux_layers`: whose inputs a draft reads. `simulated`: accepts in place of the target's word.

        `width`: tokens of a row in every look, those that are not there made up for; None is as many as there are.
        """
        self._model = model
        self._state = state
        self._aux_layers = aux_layers
        self._simulated = simulated
        self._width = width
        self._fused_settle = _fused_settle() if model.device.type == "cuda" else None

    def decode(self, command: StepCommand, rows: torch.Tensor) -> VerifyResult:
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
        if self._width is None:
            positions = _positions(seq_lens, tokens)
            output = self._model.forward(slots, tokens, positions, aux_layers=self._aux_layers)
            return Look(rows, seq_lens, tokens, self._model.decoder.logits(output.hidden), output.aux)
        return self._wide_look(rows, slots, seq_lens, tokens, self._width)

    def _wide_look(
        self, rows: torch.Tensor, slots: SlotRows, seq_lens: torch.Tensor, tokens: torch.Tensor, width: int
    ) -> Look:
        """The same through rows of `width` tokens: products of one size, whatever is in them."""
        num_tokens = tokens.shape[1]
        columns = torch.arange(width, device=tokens.device)
        padded = torch.nn.functional.pad(tokens, (0, width - num_tokens))
        positions = seq_lens[:, None] + columns.clamp_max(num_tokens - 1)
        is_valid = (columns < num_tokens).expand(len(rows), -1).contiguous()
        output = self._model.forward(slots, padded, positions, is_valid=is_valid, aux_layers=self._aux_layers)
        logits = self._model.decoder.logits(output.hidden)[:, :num_tokens].contiguous()
        return Look(rows, seq_lens, tokens, logits, None if output.aux is None else output.aux[:, :num_tokens])

    def choose(self, look: Look, needs: SamplingMode, top_logprobs: int | None = None) -> VerifyResult:
        """The target's own token at each place, as far as the draft agrees."""
        chain = look.tokens[:, 1:]
        positions = _positions(look.seq_lens, look.tokens) + 1
        # Anew: in a graph, what the look has read of the slots is the look's alone.
        slots = self._model.slots.take(look.rows)
        tokens = self._model.slots.sample(slots, look.logits, positions, needs, chain)
        seq_lens, num_accepted = self._settle(look, tokens)
        return VerifyResult(
            seq_lens=seq_lens,
            num_accepted=num_accepted,
            tokens=tokens,
            hidden_states=look.aux,
            logprobs=None if top_logprobs is None else logprobs_of(look.logits.float(), tokens, top_logprobs),
        )

    def prefill(self, command: StepCommand, groups: list[PromptGroup]) -> VerifyResult | None:
        """Fills the KV of the chunks; samples the first token of each prompt that ends here."""
        if self._state.attachment.is_debug:
            new = [chunk.slot for chunk in command.chunks if chunk.start == 0]
            self._state.future_map.forget(command.step, torch.tensor(new, dtype=torch.int64, device=self._model.device))
        states, outcomes = [], []
        for group in groups:
            slots = self._model.slots.take(group.chunks.rows)
            output = self._model.prefill(slots, group.chunks, aux_layers=self._aux_layers)
            if output.aux is not None:
                states.append(group.chunks.counting(output.aux))
            if group.ends is not None:
                outcomes.append(self._first_tokens(output, group.ends, command.top_logprobs))
        if states:
            self._state.future_map.stash_prefill(command.step, torch.cat(states) if len(states) > 1 else states[0])
        return _together(outcomes) if outcomes else None

    def _first_tokens(self, output: DecoderOutput, ends: PromptEnds, asked: int | None) -> VerifyResult:
        """Those behind the prompts that end in a group."""
        slots, needs = self._model.slots.take(ends.rows), self._state.slots.needs(ends.slots)
        logits = self._model.decoder.logits(output.hidden[ends.chunks, ends.columns][:, None])
        tokens = self._model.slots.sample(slots, logits, ends.lengths[:, None], needs)
        return VerifyResult(
            seq_lens=ends.lengths,
            num_accepted=torch.zeros_like(ends.lengths),
            tokens=tokens,
            hidden_states=None if output.aux is None else output.aux[ends.chunks, ends.columns][:, None],
            logprobs=None if asked is None else logprobs_of(logits.float(), tokens, asked),
        )

    def remember(self, rows: torch.Tensor, outcome: VerifyResult) -> None:
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


def _together(outcomes: list[VerifyResult]) -> VerifyResult:
    """The rows of several outcomes, one behind the other."""
    if len(outcomes) == 1:
        return outcomes[0]

    def joined(values: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [value for value in values if value is not None]
        return torch.cat(there) if there else None

    logprobs = [outcome.logprobs for outcome in outcomes if outcome.logprobs is not None]
    return VerifyResult(
        seq_lens=torch.cat([outcome.seq_lens for outcome in outcomes]),
        num_accepted=torch.cat([outcome.num_accepted for outcome in outcomes]),
        tokens=torch.cat([outcome.tokens for outcome in outcomes]),
        hidden_states=joined([outcome.hidden_states for outcome in outcomes]),
        logprobs=Logprobs(
            output=torch.cat([row.output for row in logprobs]),
            top_tokens=torch.cat([row.top_tokens for row in logprobs]),
            top=torch.cat([row.top for row in logprobs]),
        )
        if logprobs
        else None,
    )


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
