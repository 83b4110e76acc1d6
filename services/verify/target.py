"""Verify's computation: the target's forward over the draft, sampling its own tokens, and accepting the draft's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slipstream.services.models.sampler import Logprobs, accept, logprobs_of, row_parts
from slipstream.services.worker.future_map import VerifyResult
from slipstream.services.worker.graphs import forward_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.wire.step import PrefillChunk, StepCommand
    from slipstream.services.models.decoder import DecoderOutput
    from slipstream.services.models.sampler import SimulatedAcceptance
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region, StepNumber
    from slipstream.services.worker.language_model import LanguageModel, SlotRows
    from slipstream.services.worker.masks import Allowed, StepMasks
    from slipstream.services.worker.slots import FlatChunks, SamplingMode, Staging

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
    """[B, W, hidden_size], after each of them, perhaps with padding. Graphs keep it; logits take much more memory."""
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
        simulates: bool = False,
        width: int | None = None,
    ) -> None:
        """`simulated`: accepts K draft tokens by chance, whatever the target says; None where not `simulates`.

        `width`: tokens of a row in every forward, padding included; None: as many as there are.
        """
        self._model = model
        self._state = state
        self._simulated = simulated
        self.simulates = simulates
        """True if drafts are accepted by chance."""
        self.width = width
        """See `width` of the constructor."""
        self.dtype = model.slots.dtype
        self.hidden_size = model.decoder.config.hidden_size

    def forward(
        self, step: StepNumber, rows: torch.Tensor, draft_tokens: torch.Tensor | None, aux_layers: tuple[int, ...]
    ) -> TargetForward:
        """Runs the bonus token and K draft tokens of B slots ([B, K] int64), or only the bonus token.

        `aux_layers`: layers whose inputs a draft reads.
        """
        slots, seq_lens, tokens = self.inputs(step, rows, draft_tokens)
        num_tokens, inputs, is_valid = tokens.shape[1], tokens, None
        positions = _positions(seq_lens, tokens)
        if self.width is not None:
            columns = torch.arange(self.width, device=tokens.device)
            inputs = torch.nn.functional.pad(tokens, (0, self.width - num_tokens))
            positions = seq_lens[:, None] + columns.clamp_max(num_tokens - 1)
            is_valid = (columns < num_tokens).expand(len(rows), -1).contiguous()
        output = self._model.forward(slots, inputs, positions, is_valid=is_valid, aux_layers=aux_layers)
        aux = None if output.aux is None else output.aux[:, :num_tokens]
        return TargetForward(rows, seq_lens, tokens, output.hidden, aux)

    def logits(self, forward: TargetForward) -> torch.Tensor:
        """Computes the logits after each token: [B, W, vocab_size]."""
        return self._model.decoder.logits(forward.hidden)[:, : forward.tokens.shape[1]].contiguous()

    def sample(
        self,
        forward: TargetForward,
        logits: torch.Tensor,
        mode: SamplingMode,
        top_logprobs: int | None = None,
        *,
        num_draft_tokens: int | None = None,
        allowed: Allowed | None = None,
    ) -> VerifyResult:
        """Samples the target's own token at each place, and accepts the draft's as far as they agree.

        `logits`: [B, W, vocab_size], after each token of the forward. `num_draft_tokens`: K of the draft, where these
        rows may have fewer draft tokens. `allowed`: the tokens that may be sampled; the others are left out first,
        before bias and penalties, which is as good as after: nothing brings a token back.
        """
        chain = forward.tokens[:, 1:]
        positions = _positions(forward.seq_lens, forward.tokens) + 1
        # Taken anew: in a graph, what the forward has read of the slots belongs only to the forward's graph.
        slots = self._model.slots.take(forward.rows)
        given = logits if allowed is None else allowed.apply(logits, keeps=top_logprobs is not None)
        tokens = self._model.slots.sample(slots, given, positions, mode, chain)
        scores = _scores(logits, tokens)
        most = chain.shape[1] if num_draft_tokens is None else num_draft_tokens
        seq_lens, num_accepted = self._accept(forward, tokens, scores, self._simulated(most) if most else None)
        return VerifyResult(
            seq_lens=seq_lens,
            num_accepted=num_accepted,
            tokens=tokens,
            scores=scores,
            faults=None if allowed is None else allowed.faults_of(len(tokens)),
            hidden_states=forward.aux,
            logprobs=None if top_logprobs is None else _logprobs(logits, tokens, top_logprobs),
        )

    def take_in(self, chunks: FlatChunks) -> None:
        """Fills the KV of chunks in which no prompt ends."""
        self._model.prefill(chunks, chunks.slots[:0])

    def inputs(
        self, step: StepNumber, rows: torch.Tensor, draft_tokens: torch.Tensor | None
    ) -> tuple[SlotRows, torch.Tensor, torch.Tensor]:
        """The rows that decode, their lengths, [B] int64, and their bonus tokens with the draft's, [B, W] int64."""
        slots = self._model.slots.take(rows)
        seq_lens, bonus_tokens = self._state.future_map.ends(step, rows, self._state.slots.limits)
        tokens = bonus_tokens[:, None]
        return slots, seq_lens, tokens if draft_tokens is None else torch.cat((tokens, draft_tokens), dim=1)

    def forget(self, command: StepCommand, region: Region | None) -> None:
        """In debug mode: poisons the slots that new requests take."""
        new = [update.slot for update in command.updates if update.sampling is not None]
        if self._state.attachment.is_debug:
            self._state.future_map.forget(new)
            if region is not None:
                region.forget(command.step, new)

    def record_output(self, rows: torch.Tensor, result: VerifyResult) -> None:
        """Counts the result's tokens as output, for the penalties. `rows`: [B] int64 slots."""
        self._model.slots.record_output(rows, result.tokens, result.num_accepted + 1)

    def _accept(
        self,
        forward: TargetForward,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        simulated: SimulatedAcceptance | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new lengths and the numbers of draft tokens that are accepted, each [B] int64.

        A draft token with no finite score after it is not accepted, but becomes the bonus token: what it does to the
        sequence is the next step's, as without a draft.
        """
        table, rows, num_draft_tokens = self._state.slots, forward.rows, tokens.shape[1] - 1
        if rows.is_cuda:
            # Imported here, as there is no triton where there is no GPU.
            from slipstream.services.models.kernels import step_ops

            thresholds = None if simulated is None else simulated.thresholds(rows.device)
            most, seeds = table.max_draft_tokens, table.sampling.seed
            return step_ops.accept(tokens, forward.tokens, scores, rows, forward.seq_lens, most, seeds, thresholds)
        if not num_draft_tokens:
            return forward.seq_lens + 1, torch.zeros_like(forward.seq_lens)
        if simulated is None:
            num_accepted = accept(forward.tokens[:, 1:], tokens)
        else:
            num_accepted = simulated(table.sampling.seed.index_select(0, rows), forward.seq_lens)
            num_accepted = num_accepted.clamp_max(num_draft_tokens)
        # The tokens are the target's own, however many of a chain are accepted.
        num_accepted = torch.minimum(num_accepted, table.max_draft_tokens.index_select(0, rows))
        num_accepted = torch.minimum(num_accepted, scores[:, 1:].isfinite().to(torch.int64).cumprod(dim=1).sum(dim=1))
        return forward.seq_lens + num_accepted + 1, num_accepted


@dataclass(slots=True)
class TargetStep:
    """A step without graphs of its own, in pieces between which waits may stand. Each is stream work, done once."""

    target: Target
    model: LanguageModel
    state: EpochState
    command: StepCommand
    rows: torch.Tensor
    """[B] int64: the slots that decode."""
    chunks: FlatChunks | None = None
    """The command's, perhaps with padding after them."""
    ends: Sequence[PromptEnds] = ()
    region: Region | None = None
    """The memory of the draft that takes part; None without one."""
    aux_layers: tuple[int, ...] = ()
    """Layers whose inputs that draft reads."""
    _masks: StepMasks | None = field(init=False)
    _has_copied_in: bool = field(init=False, default=False)
    _draft_tokens: torch.Tensor | None = field(init=False, default=None)
    _decoded: list[TargetForward] = field(init=False, default_factory=list)
    """The forwards of the rows that decode: one for each number of draft tokens."""
    _taken_in: DecoderOutput | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._masks = self.state.masks_of(self.command)

    def copy_in(self) -> None:
        """Copies draft tokens in, and out to the grammar worker, if a slot with a constraint has any."""
        command, self._has_copied_in = self.command, True
        self.target.forget(command, self.region)
        self._draft_tokens = self._copy_in()
        if command.copies_tokens and self._draft_tokens is not None and self._masks is not None:
            self._masks.copy_out(self.rows, self._draft_tokens)

    def forward(self) -> None:
        """Runs the rows that decode and the chunks: where the step has both, in one forward. Copies in before, unless
        that is done."""
        if not self._has_copied_in:
            self.copy_in()
        if (ranks := self.model.decoder.ranks) is not None and self.model.device.type == "cpu":
            ranks.tell("begin_step", step=self.command.step)
        target, command, layers = self.target, self.command, self.aux_layers
        draft_tokens, step, chunks = self._draft_tokens, command.step, self.chunks
        if chunks is not None and not command.slots:
            self._taken_in = self.model.prefill(chunks, _places(self.ends, chunks), aux_layers=layers)
            return
        parts = self._parts(draft_tokens)
        if chunks is None and len(parts) == 1:
            self._decoded = [target.forward(step, *parts[0], layers)]
            return
        inputs = [(rows, *target.inputs(step, rows, drafted)[1:]) for rows, drafted in parts]
        rows_and_tokens = [(rows, tokens, _positions(seq_lens, tokens)) for rows, seq_lens, tokens in inputs]
        if chunks is None:
            outputs, _ = self.model.joined(rows_and_tokens, aux_layers=layers)
        else:
            places = _places(self.ends, chunks)
            outputs, self._taken_in = self.model.mixed(rows_and_tokens, chunks, places, aux_layers=layers)
        pairs = zip(inputs, outputs, strict=True)
        self._decoded = [TargetForward(*part, output.hidden, output.aux) for part, output in pairs]

    def _parts(self, draft_tokens: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Rows that have as many draft tokens, with these: they follow one another."""
        if draft_tokens is None:
            return [(self.rows, None)]
        parts, begin = [], 0
        for num_tokens, together in groupby(self.command.num_draft_tokens):
            rows = slice(begin, begin + len(list(together)))
            parts.append((self.rows[rows], draft_tokens[rows, :num_tokens] if num_tokens else None))
            begin = rows.stop
        return parts

    def leave_states(self) -> None:
        """Leaves the states of the chunks' tokens for the draft, if it reads them."""
        if self.region is not None and self._taken_in is not None and self._taken_in.aux is not None:
            num_tokens = sum(len(chunk.tokens) for chunk in self.command.chunks)
            self.region.stash_prefill(self.command.step, self._taken_in.aux[:num_tokens])

    def sample(self) -> VerifyResult | None:
        """Samples for the rows that decode, then the first token of each prompt that ends, in this order."""
        target, asked = self.target, self.command.top_logprobs
        if not self._decoded:
            first = [
                self._first_tokens(together, self._logits_of(hidden)[0])
                for together, hidden in zip(self.ends, self._hidden_of_ends(), strict=True)
            ]
            if len(first) > 1:
                return merged(torch.cat, *_with_faults(*first))
            return first[0] if first else None
        mode = self.state.slots.sampling_mode(self.command.slots)
        most = self.region.sizes.num_draft_tokens if self.region is not None and self.command.num_draft_tokens else 0
        if self._taken_in is None and len(self._decoded) == 1:
            (decoded,) = self._decoded
            allowed = self._allowed(decoded.rows, decoded.tokens.shape[1])
            logits = target.logits(decoded)
            return target.sample(decoded, logits, mode, asked, num_draft_tokens=most, allowed=allowed)
        # By one product: another would read all the weights again.
        of_ends = () if self._taken_in is None else self._hidden_of_ends()
        of_all = self._logits_of(*(part.hidden.flatten(0, 1) for part in self._decoded), *of_ends)
        results = [
            target.sample(
                part,
                of_part.view(*part.tokens.shape, -1),
                mode,
                asked,
                num_draft_tokens=most,
                allowed=self._allowed(part.rows, part.tokens.shape[1]),
            )
            for part, of_part in zip(self._decoded, of_all, strict=False)
        ]
        ends = zip(self.ends, of_all[len(results) :], strict=True)
        results += [self._first_tokens(together, of_end) for together, of_end in ends]
        width = max(part.tokens.shape[1] for part in self._decoded)
        return merged(torch.cat, *_with_faults(*(_widened(result, width) for result in results)))

    def _copy_in(self) -> torch.Tensor | None:
        """[B, K] int64; None where the step has no draft tokens."""
        if self.region is None or not self.command.most_draft_tokens:
            return None
        command = self.command
        return self.state.future_map.copy_in(command.step, self.region, command.slots, self.rows)

    def _allowed(self, rows: torch.Tensor, width: int) -> Allowed | None:
        """The tokens that may stand at `width` places of the slots `rows` ([B]); None if none has a constraint."""
        return None if self._masks is None else self._masks.take(rows, width)

    def _hidden_of_ends(self) -> Sequence[torch.Tensor]:
        """[E, hidden_size] for each of the prompts' ends that are sampled together."""
        assert self._taken_in is not None, "the step has chunks"
        return torch.split(self._taken_in.hidden, [len(together.places) for together in self.ends])

    def _logits_of(self, *hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, hidden_size] each to [N, vocab_size], by one product.

        On a GPU of a size that is rehearsed, unless all steps have one size anyway.
        """
        sizes = [len(part) for part in hidden]
        if hidden[0].is_cuda and self.target.width is None:
            missing = forward_size(sum(sizes)) - sum(sizes)
            hidden = (*hidden, hidden[0].new_zeros(missing, hidden[0].shape[1]))
        logits = self.model.decoder.logits(torch.cat(hidden))
        return torch.split(logits[: sum(sizes)], sizes)

    def _first_tokens(self, ends: PromptEnds, logits: torch.Tensor) -> VerifyResult:
        """Samples the tokens after some prompts, from [E, vocab_size]."""
        assert self._taken_in is not None, "the step has chunks"
        logits, aux, asked = logits[:, None], self._taken_in.aux, self.command.top_logprobs
        slots, mode = self.model.slots.take(ends.rows), self.state.slots.sampling_mode(ends.slots)
        allowed = self._allowed(ends.rows, 1)
        given = logits if allowed is None else allowed.apply(logits, keeps=asked is not None)
        tokens = self.model.slots.sample(slots, given, ends.lengths[:, None], mode)
        return VerifyResult(
            seq_lens=ends.lengths,
            num_accepted=torch.zeros_like(ends.lengths),
            tokens=tokens,
            scores=_scores(logits, tokens),
            faults=None if allowed is None else allowed.faults_of(len(tokens)),
            hidden_states=None if aux is None else aux.index_select(0, ends.places)[:, None],
            logprobs=None if asked is None else _logprobs(logits, tokens, asked),
        )


def merged(merge: Callable[[list[torch.Tensor]], torch.Tensor], *results: _Result) -> _Result:
    """Merges results field by field, logprobs included; a field that none of them has stays None."""

    def merged_field(name: str) -> Any:
        values = [value for result in results if (value := getattr(result, name)) is not None]
        if not values or isinstance(values[0], torch.Tensor):
            return merge(values) if values else None
        return merged(merge, *values)

    return type(results[0])(**{one.name: merged_field(one.name) for one in fields(results[0])})


def _with_faults(*results: VerifyResult) -> tuple[VerifyResult, ...]:
    """Gives all results faults, if any has them."""
    if all(result.faults is None for result in results):
        return results
    return tuple(
        result if result.faults is not None else replace(result, faults=torch.zeros_like(result.num_accepted))
        for result in results
    )


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
