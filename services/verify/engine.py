"""Verify: the target model checks what the draft proposed, samples, publishes and stashes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import MismatchError
from slipstream.common.future_map import Outcome
from slipstream.common.step import FenceName, StepKind
from slipstream.services.engine import Phase
from slipstream.services.models.acceptance import SimulatedAcceptance, accept

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.future_map import Logprobs
    from slipstream.common.step import StepCommand
    from slipstream.common.worker_contract import Attachment, WorkerDescription
    from slipstream.services.engine import EpochState
    from slipstream.services.language_model import LanguageModel


@dataclass(slots=True)
class _Found:
    """What the first phase of a step leaves for the second; filled when the stream gets there."""

    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the target says at W places in B slots."""

    tokens: torch.Tensor
    """[B, W] int64."""
    aux: torch.Tensor | None
    """[B, W, width]: the fused states, if a draft reads them."""
    logprobs: Logprobs | None


class VerifyEngine:
    """Implements `RoleEngine` with a target model."""

    def __init__(
        self, model: LanguageModel, description: WorkerDescription, *, simulate_accept_length: float | None = None
    ) -> None:
        """`simulate_accept_length`: accept by chance, so many tokens a step on average; the output is no text then."""
        self._model = model
        self._description = description
        self._simulate_accept_length = simulate_accept_length
        self._simulated: SimulatedAcceptance | None = None
        self._aux_layers: tuple[int, ...] = ()

    def describe(self) -> WorkerDescription:
        """See `RoleEngine.describe`."""
        return self._description

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        self._aux_layers = self._layers_to_fuse(state.attachment)
        self._simulated = self._acceptance(state.attachment.shape.num_draft_tokens)
        self._model.open(state)

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self._model.close()

    def _acceptance(self, num_draft_tokens: int) -> SimulatedAcceptance | None:
        """None to take the target's word."""
        length = self._simulate_accept_length
        if length is None or not num_draft_tokens:
            return None
        if length > num_draft_tokens + 1:
            most = f"with {num_draft_tokens} draft tokens a step yields {num_draft_tokens + 1} at most"
            raise MismatchError([f"simulated accept length: verify has {length:g}, but {most}"])
        return SimulatedAcceptance(length, num_draft_tokens)

    def _layers_to_fuse(self, attachment: Attachment) -> tuple[int, ...]:
        """The layers whose inputs the draft reads: those it names, or the paper's."""
        width, config = attachment.shape.hidden_width, self._model.decoder.config
        if not width:
            return ()
        named = () if attachment.peer is None else attachment.peer.hidden_layers
        layers = named or fused_layers(config.num_layers)
        if max(layers) > config.num_layers:
            raise MismatchError([f"layers to fuse: draft asks for {list(layers)}, verify has {config.num_layers}"])
        if len(layers) * config.hidden_size != width:
            widths = f"{len(layers)} of {config.hidden_size} are not the {width} that draft reads"
            raise MismatchError([f"width of the hidden states: {widths}"])
        return layers

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`: the work up to publish, then the stash."""
        step, future_map, found = command.step, state.future_map, _Found()
        finished = [chunk.slot for chunk in command.chunks if chunk.is_last]
        rows = self._model.index(finished if command.kind is StepKind.PREFILL else command.slots)
        work: Callable[[], Outcome | None]
        if command.kind is StepKind.PREFILL:
            work = partial(self._prefill, state, command)
        elif command.kind is StepKind.DECODE:
            work = partial(self._decode, state, command, rows)
        else:
            work = partial(self._decode_plainly, state, command, rows)

        def publish() -> None:
            found.outcome = work() if command.slots else None
            if found.outcome is not None:
                future_map.publish(step, rows, found.outcome)

        def stash() -> None:
            if found.outcome is not None:
                future_map.stash(step, rows, found.outcome)
                self._model.remember_output(rows, found.outcome.tokens, found.outcome.num_accepted + 1)

        return [Phase(publish, FenceName.VERIFY_PUBLISH), Phase(stash, FenceName.VERIFY_STASH)]

    def _decode(self, state: EpochState, command: StepCommand, rows: torch.Tensor) -> Outcome:
        """Checks K draft tokens a slot: the target's own token at each of K+1 positions, as far as the draft agrees."""
        seq_lens, bonus_tokens = state.future_map.gather_ends(command.step, rows, self._model.limits(rows))
        draft_tokens = state.future_map.copy_in(command.step, rows)
        tokens = torch.cat((bonus_tokens[:, None], draft_tokens), dim=1)
        chosen = self._run(rows, tokens, seq_lens, command.top_logprobs)
        if self._simulated is None:
            num_accepted = accept(draft_tokens, chosen.tokens)
        else:
            num_accepted = self._simulated(state.slots.sampling.seed[rows], seq_lens)
        # The tokens are the target's own, however many of a chain may stand.
        num_accepted = torch.minimum(num_accepted, state.slots.max_draft_tokens.index_select(0, rows))
        return Outcome(
            seq_lens=seq_lens + num_accepted + 1,
            num_accepted=num_accepted,
            tokens=chosen.tokens,
            hidden_states=chosen.aux,
            logprobs=chosen.logprobs,
        )

    def _decode_plainly(self, state: EpochState, command: StepCommand, rows: torch.Tensor) -> Outcome:
        """One token a slot."""
        seq_lens, bonus_tokens = state.future_map.gather_ends(command.step, rows, self._model.limits(rows))
        chosen = self._run(rows, bonus_tokens[:, None], seq_lens, command.top_logprobs)
        return Outcome(
            seq_lens=seq_lens + 1,
            num_accepted=torch.zeros_like(seq_lens),
            tokens=chosen.tokens,
            hidden_states=chosen.aux,
            logprobs=chosen.logprobs,
        )

    def _run(
        self, rows: torch.Tensor, tokens: torch.Tensor, seq_lens: torch.Tensor, top_logprobs: int | None
    ) -> _Chosen:
        """What the target says behind each of `tokens` ([B, W], from position `seq_lens` on).

        The first of `tokens` is output already, the others are not.
        """
        positions = seq_lens[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        output = self._model.forward(rows, tokens, positions, aux_layers=self._aux_layers)
        chain = tokens[:, 1:]
        chosen, logprobs = self._model.sample_with_logprobs(output.hidden, rows, positions + 1, chain, top_logprobs)
        return _Chosen(chosen, output.aux, logprobs)

    def _prefill(self, state: EpochState, command: StepCommand) -> Outcome | None:
        """Fills the KV of the chunks; samples the first token of each prompt that ends here."""
        step, chunks = command.step, command.chunks
        new = [chunk.slot for chunk in chunks if chunk.start == 0]
        if new:
            state.future_map.forget(step, self._model.index(new))
        output, is_valid = self._model.prefill(chunks, aux_layers=self._aux_layers)
        if output.aux is not None:
            state.future_map.stash_prefill(step, output.aux[is_valid])
        ends = [number for number, chunk in enumerate(chunks) if chunk.is_last]
        if not ends:
            return None
        columns = self._model.index([len(chunks[number].tokens) - 1 for number in ends])
        lengths = self._model.index([chunks[number].start + len(chunks[number].tokens) for number in ends])
        rows = self._model.index([chunks[number].slot for number in ends])
        batch = self._model.index(ends)
        hidden = output.hidden[batch, columns][:, None]
        tokens, logprobs = self._model.sample_with_logprobs(hidden, rows, lengths[:, None], None, command.top_logprobs)
        return Outcome(
            seq_lens=lengths,
            num_accepted=torch.zeros_like(lengths),
            tokens=tokens,
            hidden_states=None if output.aux is None else output.aux[batch, columns][:, None],
            logprobs=logprobs,
        )


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head fuses: a low, a middle and a high one (Li et al., 2025)."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
