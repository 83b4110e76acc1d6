"""Verify's computation: the target's forward over the draft, sampling its own tokens, and accepting the draft's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slipstream.common.worker.step import StepKind
from slipstream.services.models.sampler import Logprobs, accept, logprobs_of, row_parts
from slipstream.services.worker.forward_sizes import forward_size
from slipstream.services.worker.verify_result import VerifyResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.worker.step import PrefillChunk, StepCommand
    from slipstream.services.models.decoder import DecoderOutput
    from slipstream.services.models.sampler import SimulatedAcceptance
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.language_model import LanguageModel, SlotRows
    from slipstream.services.worker.region import Region
    from slipstream.services.worker.shared_buffers import StepNumber
    from slipstream.services.worker.slots import SamplingMode
    from slipstream.services.worker.staging import FlatChunks, Staging

_Result = TypeVar("_Result", VerifyResult, Logprobs)


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """The ends of E prompts in a forward; their first tokens are sampled from there, together."""

    rows: torch.Tensor
    """[E] int64: their slots."""
    places: torch.Tensor
    """[E] int64: of the last tokens, among all tokens of the forward."""
    lengths: torch.Tensor
    """[E] int64: of the prompts."""
    slots: tuple[int, ...]
    """The slots on the host."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], staging: Staging, *, is_each_alone: bool = False) -> list[PromptEnds]:
        """Finds all of them, none if no prompt ends. `is_each_alone`: samples one at a time."""
        begins_after = accumulate(len(chunk.tokens) for chunk in chunks)
        ends = [(place - 1, chunk) for place, chunk in zip(begins_after, chunks, strict=True) if chunk.is_last]
        if not ends:
            return []

        return [
            cls(
                rows=staging.put_integers([chunk.slot for _, chunk in together]),
                places=staging.put_integers([place for place, _ in together]),
                lengths=staging.put_integers([chunk.start + len(chunk.tokens) for _, chunk in together]),
                slots=tuple(chunk.slot for _, chunk in together),
            )
            for together in ([[end] for end in ends] if is_each_alone else [ends])
        ]


@dataclass(frozen=True, slots=True)
class TargetForward:
    """Result of the target's forward over B slots, W tokens each."""

    rows: torch.Tensor
    """[B] int64: the slots."""
    seq_lens: torch.Tensor
    """[B] int64: the position of the first token."""
    tokens: torch.Tensor
    """[B, W] int64: the bonus token, and the draft's, if there is one."""
    hidden: torch.Tensor
    """[B, W, hidden_size], behind each of them, perhaps with padding. Graphs keep it; logits take much more memory."""
    aux: torch.Tensor | None
    """[B, W, width]: the fused states, if a draft reads them."""


class Target:
    """The target model in one epoch. All methods are stream work."""

    def __init__(
        self,
        model: LanguageModel,
        state: EpochState,
        simulated: Callable[[int], SimulatedAcceptance | None],
        *,
        width: int | None = None,
    ) -> None:
        """`simulated`: accepts K draft tokens by chance, whatever the target says; returns None where it does not.

        `width`: tokens of a row in every forward, padding included; None is as many as there are.
        """
        self._model = model
        self._state = state
        self._simulated = simulated
        self._width = width
        self.dtype = model.slots.dtype
        self.hidden_size = model.decoder.config.hidden_size

    def decode(
        self, command: StepCommand, rows: torch.Tensor, region: Region | None, aux_layers: tuple[int, ...]
    ) -> VerifyResult:
        """A decode step, with the draft of `region` or plain. `rows`: [B] int64, the command's slots."""
        self._forget(command, region)
        draft_tokens = self._copy_in(command, rows, region)
        forward = self.forward(command.step, rows, draft_tokens, aux_layers)
        mode = self._state.slots.sampling_mode(command.slots)
        return self.sample(forward, self.logits(forward), mode, command.top_logprobs)

    def forward(
        self, step: StepNumber, rows: torch.Tensor, draft_tokens: torch.Tensor | None, aux_layers: tuple[int, ...]
    ) -> TargetForward:
        """Runs the bonus token and K draft tokens of B slots ([B, K] int64), or the bonus token alone.

        `aux_layers`: layers whose inputs a draft reads.
        """
        slots, seq_lens, tokens = self._inputs(step, rows, draft_tokens)
        num_tokens, inputs, is_valid = tokens.shape[1], tokens, None
        positions = _positions(seq_lens, tokens)
        if self._width is not None:
            columns = torch.arange(self._width, device=tokens.device)
            inputs = torch.nn.functional.pad(tokens, (0, self._width - num_tokens))
            positions = seq_lens[:, None] + columns.clamp_max(num_tokens - 1)
            is_valid = (columns < num_tokens).expand(len(rows), -1).contiguous()
        output = self._model.forward(slots, inputs, positions, is_valid=is_valid, aux_layers=aux_layers)
        aux = None if output.aux is None else output.aux[:, :num_tokens]
        return TargetForward(rows, seq_lens, tokens, output.hidden, aux)

    def logits(self, forward: TargetForward) -> torch.Tensor:
        """Computes the logits behind each token: [B, W, vocab_size]."""
        return self._model.decoder.logits(forward.hidden)[:, : forward.tokens.shape[1]].contiguous()

    def sample(
        self, forward: TargetForward, logits: torch.Tensor, mode: SamplingMode, top_logprobs: int | None = None
    ) -> VerifyResult:
        """Samples the target's own token at each place, and accepts the draft's as far as they agree.

        `logits`: [B, W, vocab_size], behind each token of the forward.
        """
        chain = forward.tokens[:, 1:]
        positions = _positions(forward.seq_lens, forward.tokens) + 1
        # Taken anew: in a graph, what the forward has read of the slots belongs to the forward's graph alone.
        slots = self._model.slots.take(forward.rows)
        tokens = self._model.slots.sample(slots, logits, positions, mode, chain)
        scores = _scores(logits, tokens)
        seq_lens, num_accepted = self._accept(forward, tokens, scores)
        return VerifyResult(
            seq_lens=seq_lens,
            num_accepted=num_accepted,
            tokens=tokens,
            scores=scores,
            hidden_states=forward.aux,
            logprobs=None if top_logprobs is None else _logprobs(logits, tokens, top_logprobs),
        )

    def prefill(
        self,
        command: StepCommand,
        chunks: FlatChunks,
        ends: Sequence[PromptEnds],
        region: Region | None,
        aux_layers: tuple[int, ...],
    ) -> VerifyResult | None:
        """Fills the KV of the chunks; samples the first token of each prompt that ends here.

        `chunks`: the command's, perhaps with padding behind them. Leaves the states of `aux_layers` in `region`.
        """
        self._forget(command, region)
        output = self._model.prefill(chunks, _places(ends, chunks), aux_layers=aux_layers)
        if region is not None and output.aux is not None:
            region.stash_prefill(command.step, _without_padding(output.aux, command))
        hidden = torch.split(output.hidden, [len(together.places) for together in ends])
        results = [
            self._first_tokens(output, together, self._logits_of(of_ends)[0][:, None], command.top_logprobs)
            for together, of_ends in zip(ends, hidden, strict=True)
        ]
        if len(results) > 1:
            return merged(torch.cat, *results)
        return results[0] if results else None

    def mixed(
        self,
        command: StepCommand,
        rows: torch.Tensor,
        chunks: FlatChunks,
        ends: Sequence[PromptEnds],
        region: Region | None,
        aux_layers: tuple[int, ...],
    ) -> VerifyResult:
        """A mixed step: what `decode` and `prefill` do, in one forward. The rows that decode come first in the result.

        `rows`: [B] int64, the slots that decode.
        """
        self._forget(command, region)
        draft_tokens = self._copy_in(command, rows, region)
        _, seq_lens, tokens = self._inputs(command.step, rows, draft_tokens)
        positions = _positions(seq_lens, tokens)
        places = _places(ends, chunks)
        decoded, taken_in = self._model.mixed(rows, tokens, positions, chunks, places, aux_layers=aux_layers)
        if region is not None and taken_in.aux is not None:
            region.stash_prefill(command.step, _without_padding(taken_in.aux, command))
        ends_hidden = torch.split(taken_in.hidden, [len(together.places) for together in ends])
        logits = self._logits_of(decoded.hidden.flatten(0, 1), *ends_hidden)
        forward = TargetForward(rows, seq_lens, tokens, decoded.hidden, decoded.aux)
        mode, asked = self._state.slots.sampling_mode(command.slots), command.top_logprobs
        first = (
            _widened(self._first_tokens(taken_in, together, of_ends[:, None], asked), tokens.shape[1])
            for together, of_ends in zip(ends, logits[1:], strict=True)
        )
        return merged(torch.cat, self.sample(forward, logits[0].view(*tokens.shape, -1), mode, asked), *first)

    def take_in(self, chunks: FlatChunks) -> None:
        """Fills the KV of chunks in which no prompt ends."""
        self._model.prefill(chunks, chunks.slots[:0])

    def _copy_in(self, command: StepCommand, rows: torch.Tensor, region: Region | None) -> torch.Tensor | None:
        if region is None or command.kind is not StepKind.DECODE:
            return None
        # In a mixed step draft has drafted under the number before.
        number = command.step - 1 if command.is_mixed else command.step
        draft_tokens = self._state.future_map.copy_in(number, region, command.slots, rows)
        return None if command.drafts_none else draft_tokens

    def _logits_of(self, *hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, hidden_size] each to [N, vocab_size], by one product: another would read all the weights again.

        On a GPU of a size that is rehearsed, unless all steps have one size anyway.
        """
        sizes = [len(part) for part in hidden]
        if hidden[0].is_cuda and self._width is None:
            missing = forward_size(sum(sizes)) - sum(sizes)
            hidden = (*hidden, hidden[0].new_zeros(missing, hidden[0].shape[1]))
        logits = self._model.decoder.logits(torch.cat(hidden))
        return torch.split(logits[: sum(sizes)], sizes)

    def _inputs(
        self, step: StepNumber, rows: torch.Tensor, draft_tokens: torch.Tensor | None
    ) -> tuple[SlotRows, torch.Tensor, torch.Tensor]:
        """The rows that decode, their lengths, [B] int64, and their bonus tokens with the draft's, [B, W] int64."""
        slots = self._model.slots.take(rows)
        seq_lens, bonus_tokens = self._state.future_map.ends(step, rows, self._state.slots.limits)
        tokens = bonus_tokens[:, None]
        return slots, seq_lens, tokens if draft_tokens is None else torch.cat((tokens, draft_tokens), dim=1)

    def _forget(self, command: StepCommand, region: Region | None) -> None:
        new = [update.slot for update in command.updates if update.sampling is not None]
        if self._state.attachment.is_debug:
            self._state.future_map.forget(new)
            if region is not None:
                region.forget(command.step, new)

    def _first_tokens(
        self, output: DecoderOutput, ends: PromptEnds, logits: torch.Tensor, top_logprobs: int | None
    ) -> VerifyResult:
        """Samples the tokens behind some prompts, from [E, 1, vocab_size]."""
        slots, mode = self._model.slots.take(ends.rows), self._state.slots.sampling_mode(ends.slots)
        tokens = self._model.slots.sample(slots, logits, ends.lengths[:, None], mode)
        return VerifyResult(
            seq_lens=ends.lengths,
            num_accepted=torch.zeros_like(ends.lengths),
            tokens=tokens,
            scores=_scores(logits, tokens),
            hidden_states=None if output.aux is None else output.aux.index_select(0, ends.places)[:, None],
            logprobs=None if top_logprobs is None else _logprobs(logits, tokens, top_logprobs),
        )

    def record_output(self, rows: torch.Tensor, result: VerifyResult) -> None:
        """Counts the result's tokens as output, for the penalties. `rows`: [B] int64 slots."""
        self._model.slots.record_output(rows, result.tokens, result.num_accepted + 1)

    def _accept(
        self, forward: TargetForward, tokens: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new lengths and the numbers of draft tokens that are accepted, each [B] int64.

        A draft token with no finite score after it is not accepted, but becomes the bonus token: what it does to the
        sequence is the next step's, as without a draft.
        """
        table, rows, num_draft_tokens = self._state.slots, forward.rows, tokens.shape[1] - 1
        simulated = self._simulated(num_draft_tokens) if num_draft_tokens else None
        if rows.is_cuda:
            # Imported here, as there is no triton where there is no GPU.
            from slipstream.services.models.kernels import step_ops

            threshold = None if simulated is None else simulated.threshold
            most, seeds = table.max_draft_tokens, table.sampling.seed
            return step_ops.accept(tokens, forward.tokens, scores, rows, forward.seq_lens, most, seeds, threshold)
        if not num_draft_tokens:
            return forward.seq_lens + 1, torch.zeros_like(forward.seq_lens)
        if simulated is None:
            num_accepted = accept(forward.tokens[:, 1:], tokens)
        else:
            num_accepted = simulated(table.sampling.seed.index_select(0, rows), forward.seq_lens)
        # The tokens are the target's own, however many of a chain are accepted.
        num_accepted = torch.minimum(num_accepted, table.max_draft_tokens.index_select(0, rows))
        num_accepted = torch.minimum(num_accepted, scores[:, 1:].isfinite().to(torch.int64).cumprod(dim=1).sum(dim=1))
        return forward.seq_lens + num_accepted + 1, num_accepted


def merged(merge: Callable[[list[torch.Tensor]], torch.Tensor], *results: _Result) -> _Result:
    """Merges results field by field, logprobs included; a field that none of them has stays None."""

    def field(name: str) -> Any:
        values = [value for result in results if (value := getattr(result, name)) is not None]
        if not values or isinstance(values[0], torch.Tensor):
            return merge(values) if values else None
        return merged(merge, *values)

    return type(results[0])(**{one.name: field(one.name) for one in fields(results[0])})


def _without_padding(states: torch.Tensor, command: StepCommand) -> torch.Tensor:
    """Selects the states of the command's chunks from those of all tokens, padding included."""
    return states[: sum(len(chunk.tokens) for chunk in command.chunks)]


def _places(ends: Sequence[PromptEnds], chunks: FlatChunks) -> torch.Tensor:
    """Returns the places of the last tokens of all prompts that end: [E] int64."""
    places = [together.places for together in ends]
    return torch.cat(places) if places else chunks.slots[:0]


def _widened(result: VerifyResult, width: int) -> VerifyResult:
    """Adds columns that do not count, up to a `width` of tokens."""

    def widen(values: list[torch.Tensor]) -> torch.Tensor:
        (value,) = values
        missing = width - value.shape[1] if value.dim() > 1 else 0
        return torch.nn.functional.pad(value, (0, 0) * (value.dim() - 2) + (0, missing)) if missing else value

    return merged(widen, result)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
    parts = row_parts(logits)
    return merged(torch.cat, *(logprobs_of(logits[part].float(), tokens[part], num_top) for part in parts))


def _scores(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, W]: one of NaN or infinite logits is NaN or infinite, too, whichever token was sampled."""
    return logits.gather(2, tokens[:, :, None])[:, :, 0]


def _positions(seq_lens: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, W] int64."""
    return seq_lens[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
