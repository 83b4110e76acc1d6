"""A decoder with the KV pages and the sampling of an epoch's slots; serves verify and the standalone draft."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models.adjustments import adjust
from slipstream.services.models.attention import ForwardBatch, JoinedBatch, RaggedRows
from slipstream.services.models.decoder import DecoderOutput
from slipstream.services.models.paged_kv import PagedKV
from slipstream.services.models.sampler import row_parts, sample
from slipstream.services.worker.graphs import capture_buckets, forward_size, shortest_seconds, sizes_up_to
from slipstream.services.worker.slots import FlatChunks, SamplingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from slipstream.common.wire.worker import Attachment
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.decoder import Decoder
    from slipstream.services.models.sampler import SamplingRows
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.graphs import Buckets, Capture
    from slipstream.services.worker.slots import SlotTable

    DecodedRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """[B] int64 slots; their tokens and positions, [B, W] int64."""
    Forward = Callable[[FlatChunks, torch.Tensor, tuple[int, ...]], DecoderOutput]
    """Runs chunks; takes which of their tokens are valid ([N] bool), and the layers whose inputs are wanted, too."""

logger = logging.getLogger(__name__)

_MOST_GRAPHED = 1024
"""Tokens of the largest forward that is captured."""


class RaggedGraphs:
    """Forwards over chunks of prompts as graphs, one for each number of tokens, however they are spread over rows.

    A host takes as long to launch the kernels of such a forward as the device to run them for some 450 tokens of an 8B
    model: with a graph a short prompt takes half the time. Longer ones keep the device busy without. All methods are
    stream work.
    """

    def __init__(self, forward: Forward, capture: Capture, attachment: Attachment, device: torch.device) -> None:
        """Allocates their inputs, which lie at the same place in every step."""
        self._forward = forward
        self._capture = capture
        shape = attachment.shape
        self._sizes = tuple(sorted(sizes_up_to(min(shape.chunk_tokens, _MOST_GRAPHED))))
        self._made: dict[tuple[int, ...], Buckets[Callable[[], None]]] = {}
        """By the layers whose inputs they leave."""
        self._outputs: dict[tuple[int, ...], DecoderOutput] = {}
        """Where they leave what a step reads: one memory for all sizes."""

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self._slots, self._begins = zeros(shape.num_slots), zeros(shape.num_slots + 1)
        self._tokens, self._positions = zeros(self._sizes[-1]), zeros(self._sizes[-1])

    def capture(self, aux_layers: tuple[int, ...]) -> Generator[None, None, None]:
        """Makes those that leave the inputs of `aux_layers`, unless they are there; see `capture_buckets`.

        The first time, when nothing runs, each is timed.
        """
        if aux_layers not in self._made:
            made = yield from capture_buckets("prompts", self._sizes, partial(self._make, aux_layers))
            if made.sizes and not self._made and self._begins.is_cuda:
                made = made.worthwhile(partial(shortest_seconds, device=self._begins.device))
                logger.info("graphs of prompts: kept those of %s tokens", ", ".join(map(str, made.sizes)))
                self._sizes = made.sizes
            self._made[aux_layers] = made

    def run(self, chunks: FlatChunks, aux_layers: tuple[int, ...]) -> DecoderOutput | None:
        """Runs chunks, if there is a graph for them. The output is good until the next run."""
        num_tokens = len(chunks.tokens)
        # Without a draft, graphs that leave what one would read do as well.
        layers = aux_layers or next(iter(self._made), ())
        replay = self._made[layers].get(num_tokens) if layers in self._made else None
        if replay is None:
            return None
        self._begins.fill_(num_tokens)  # rows beyond the chunks are empty
        places = (self._slots, self._begins, self._tokens, self._positions)
        for place, values in zip(
            places, (chunks.slots, chunks.ragged.begins, chunks.tokens, chunks.positions), strict=True
        ):
            place[: len(values)].copy_(values)
        replay()
        output = self._outputs[layers]
        aux = output.aux[:num_tokens] if output.aux is not None and aux_layers else None
        return DecoderOutput(hidden=output.hidden[:num_tokens], aux=aux)

    def _make(self, aux_layers: tuple[int, ...], size: int) -> Callable[[], None]:
        # Sequences may be running, and the inputs be those of a step: what runs now is padding.
        self._begins.zero_()

        def work() -> None:
            places = torch.arange(size, device=self._begins.device)
            rows = torch.searchsorted(self._begins[1:], places, right=True).clamp_max(len(self._slots) - 1)
            ragged = RaggedRows(None, rows, self._begins)
            chunks = FlatChunks(self._slots, self._tokens[:size], self._positions[:size], ragged)
            self._leave(aux_layers, self._forward(chunks, places < self._begins[-1], aux_layers))

        return self._capture.capture(work)

    def _leave(self, aux_layers: tuple[int, ...], output: DecoderOutput) -> None:
        if aux_layers not in self._outputs:  # the first run, of the largest size, which is not captured

            def empty(values: torch.Tensor) -> torch.Tensor:
                return torch.empty(self._sizes[-1], values.shape[1], dtype=values.dtype, device=values.device)

            aux = None if output.aux is None else empty(output.aux)
            self._outputs[aux_layers] = DecoderOutput(hidden=empty(output.hidden), aux=aux)
        place, num_tokens = self._outputs[aux_layers], len(output.hidden)
        place.hidden[:num_tokens].copy_(output.hidden)
        if place.aux is not None and output.aux is not None:
            place.aux[:num_tokens].copy_(output.aux)


_LEAST_OUTPUTS = 128
"""The fewest outputs that the last layer computes on a GPU: padding is added to fewer."""


class SlotRows:
    """The state of B slots, each part read at its first use.

    Good for one graph: a part belongs to the graph that read it, and replays of another do not renew it.
    """

    def __init__(self, rows: torch.Tensor, table: SlotTable) -> None:
        """`rows`: [B] int64 slots."""
        self.rows = rows
        self._table = table
        self._sampling: dict[int, SamplingRows] = {}

    @cached_property
    def page_table(self) -> torch.Tensor:
        """[B, pages] int64."""
        return self._table.page_table.index_select(0, self.rows)

    @cached_property
    def limits(self) -> torch.Tensor:
        """[B] int64."""
        return self._table.limits.index_select(0, self.rows)

    @cached_property
    def history_from(self) -> torch.Tensor:
        """[B] int64."""
        return self._table.history_from.index_select(0, self.rows)

    @cached_property
    def written_from(self) -> torch.Tensor:
        """[B] int64."""
        return self._table.written_from.index_select(0, self.rows)

    def sampling(self, width: int) -> SamplingRows:
        """Sampling parameters, each slot's repeated for `width` tokens: [B * width]."""
        if width not in self._sampling:
            table, rows = self._table.sampling, self.rows
            if rows.is_cuda:
                # Imported here, as there is no triton where there is no GPU.
                from slipstream.services.models.kernels.step_ops import take_sampling

                self._sampling[width] = take_sampling(table, rows, width)
            else:
                self._sampling[width] = table.take(rows if width == 1 else rows.repeat_interleave(width))
        return self._sampling[width]


class PagedSlots:
    """KV pages and sampling of all slots. All methods but `open` and `close` are stream work."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, keeps_fp8: bool = False
    ) -> None:
        """`config`: of the layers that keep keys and values. `keeps_fp8`: they are kept as FP8 numbers."""
        self._config = config
        self._keeps_fp8 = keeps_fp8
        self._device = device
        self.dtype = dtype
        self._state: EpochState | None = None
        self._cache: PagedKV | None = None

    @property
    def state(self) -> EpochState:
        """The open epoch."""
        assert self._state is not None, "stream work belongs into an epoch"
        return self._state

    @property
    def cache(self) -> PagedKV:
        """Its pages."""
        assert self._cache is not None, "a forward belongs into an epoch"
        return self._cache

    def open(self, state: EpochState) -> None:
        """Allocates the KV pages. Raises what PyTorch raises without memory for them."""
        attachment = state.attachment
        num_pages, page_tokens = attachment.num_pages, attachment.page_tokens
        self._cache = PagedKV(
            self._config,
            num_pages=num_pages,
            page_size=page_tokens,
            device=self._device,
            dtype=self.dtype,
            is_fp8=self._keeps_fp8,
        )
        self._state = state
        self._warm_up_adjustments()

    def close(self) -> None:
        """Frees them."""
        self._cache = self._state = None

    def take(self, rows: torch.Tensor) -> SlotRows:
        """`rows`: [B] int64 slots."""
        return SlotRows(rows, self.state.slots)

    def warm_up(self) -> Iterator[tuple[SlotRows, torch.Tensor, torch.Tensor]]:
        """Yields a padding row, its tokens and its positions ([1, W]), for each width of decode steps."""
        for width in (1, self.state.attachment.shape.num_draft_tokens + 1):
            positions = torch.arange(width, device=self._device)[None]
            slots = self.take(torch.zeros(1, dtype=torch.int64, device=self._device))
            yield slots, torch.zeros_like(positions), positions

    def _warm_up_adjustments(self) -> None:
        """Samples from adjusted logits, which no graph does. Kernels differ by which rows of their tables are aligned.

        Without it the first request with a bias or penalties lets all others wait for a compiler.
        """
        for num_rows in (1, 2, 4):
            rows = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
            logits = torch.zeros((num_rows, 1, self._config.vocab_size), device=self._device)
            self.sample(self.take(rows), logits, rows[:, None], SamplingMode.ADJUSTMENTS)

    def batch(
        self,
        slots: SlotRows,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        is_valid: torch.Tensor | None = None,
        ragged: RaggedRows | None = None,
        outputs: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Makes the input of a forward; arguments as in `ForwardBatch`. `is_valid`: None for all."""
        is_cpu, state = self._device.type == "cpu", self.state
        # Verify has all of a sequence. On a CPU nothing is captured: without a late slot there is nothing to mask.
        has_starts = state.attachment.given is not None and (state.slots.has_late_history or not is_cpu)
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            is_valid=torch.ones_like(tokens, dtype=torch.bool) if is_valid is None else is_valid,
            page_table=slots.page_table,
            limits=slots.limits,
            # Only where the host can read it without waiting; elsewhere the whole page list is read.
            max_kv_len=int(positions.max()) + 1 if is_cpu else None,
            starts=slots.history_from if has_starts else None,
            ragged=ragged,
            outputs=outputs,
        )

    def sample(
        self,
        slots: SlotRows,
        logits: torch.Tensor,
        positions: torch.Tensor,
        mode: SamplingMode,
        chain: torch.Tensor | None = None,
        *,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Samples the tokens at `positions` ([B, W] int64) from their logits ([B, W, vocab_size]): [B, W].

        A draft may have more or fewer ids than the target, by padding: those beyond the target's are never chosen.
        `chain`: [B, L] int64, tokens of the input that are not output yet; see `adjust`. `token_ids`: the tokens of the
        logits, where these are not all; only on a GPU, and without adjustments.
        """
        (num_rows, width), table = positions.shape, self.state.slots
        if token_ids is None and (num_missing := table.vocab_size - logits.shape[-1]):
            logits = F.pad(logits, (0, num_missing), value=float("-inf"))
        if mode is SamplingMode.ADJUSTMENTS:
            assert token_ids is None, "bias, penalties and masks are by the target's ids"
            chain = positions[:, :0] if chain is None else chain
            parts = row_parts(logits)
            if len(parts) > 1:
                return torch.cat(
                    [
                        self.sample(self.take(slots.rows[part]), logits[part], positions[part], mode, chain[part])
                        for part in parts
                    ]
                )
            logits = logits.to(torch.float32)
            logits = adjust(logits, table.adjustments, table.history, slots.rows, positions, chain)
        rows = slots.sampling(width)
        flat, places = logits.reshape(num_rows * width, -1), positions.reshape(-1)
        if self._device.type != "cuda":
            return sample(flat, rows, places).view(num_rows, width)
        # Imported here, as there is no triton where there is no GPU.
        from slipstream.services.models.kernels.sampling import sample as fused_sample

        has_filters = mode is not SamplingMode.NOISE
        tokens = fused_sample(flat, rows, places, has_filters=has_filters, token_ids=token_ids)
        return tokens.view(num_rows, width)

    def record_prompt(self, chunks: FlatChunks) -> None:
        """Records chunks of prompts, and of output that their sequences had already, for the penalties."""
        slots = self.state.slots
        if slots.has_penalties:
            rows, tokens = chunks.slots.index_select(0, chunks.ragged.rows), chunks.tokens[:, None]
            is_prompt = (chunks.positions < slots.prompt_tokens.index_select(0, rows))[:, None]
            slots.history.add_prompt(rows, tokens, is_prompt)
            slots.history.add_output(rows, tokens, ~is_prompt)

    def record_output(self, rows: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Records the first `num_tokens` ([B] int64) of `tokens` ([B, W] int64) as output, for the penalties."""
        slots = self.state.slots
        if slots.has_penalties:
            is_valid = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens[:, None]
            slots.history.add_output(rows, tokens, is_valid)


class LanguageModel:
    """A decoder and its slots. All methods but `open` and `close` are stream work."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype, *, keeps_fp8: bool = False) -> None:
        """`keeps_fp8`: see `PagedSlots`."""
        self.decoder = decoder
        self.device = device
        self.slots = PagedSlots(decoder.config, device, dtype, keeps_fp8=keeps_fp8)
        self._graphs: RaggedGraphs | None = None

    def open(self, state: EpochState) -> None:
        """Allocates the KV pages and runs one forward of each width, so that the first request finds it warm."""
        if (ranks := self.decoder.ranks) is not None:
            ranks.ask("open", num_pages=state.attachment.num_pages, page_tokens=state.attachment.page_tokens)
        self.slots.open(state)
        for slots, tokens, positions in self.slots.warm_up():
            output = self.forward(slots, tokens, positions)
            logits = self.decoder.logits(output.hidden[:, -1:])
            self.slots.sample(slots, logits, positions[:, -1:] + 1, SamplingMode.FILTERS)

    def close(self) -> None:
        """Frees what an epoch took."""
        self._graphs = None
        if self.decoder.ranks is not None:
            self.decoder.ranks.ask("close")
        self.slots.close()

    def capture_prompts(self, aux_layers: tuple[int, ...] = ()) -> Generator[None, None, None]:
        """Makes graphs of forwards over chunks, where steps are graphs; see `RaggedGraphs.capture`."""
        state = self.slots.state
        if self._graphs is None and state.graphs is not None:
            self._graphs = RaggedGraphs(self._run, state.graphs.capture, state.attachment, self.device)
        if self._graphs is not None:
            yield from self._graphs.capture(aux_layers)

    def forward(
        self,
        slots: SlotRows,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        is_valid: torch.Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> DecoderOutput:
        """Runs B rows of W tokens; arguments as in `PagedSlots.batch`."""
        batch = self.slots.batch(slots, tokens, positions, is_valid)
        return self.decoder.forward(batch, self.slots.cache, aux_layers=aux_layers)

    def prefill(self, chunks: FlatChunks, ends: torch.Tensor, *, aux_layers: tuple[int, ...] = ()) -> DecoderOutput:
        """Runs chunks of prompts, N tokens. Returns E hidden states, and the auxiliary ones of all N tokens.

        `ends`: [E] int64, the places of those E tokens. The output is good until the next call.
        """
        self.slots.record_prompt(chunks)
        output, outputs = None if self._graphs is None else self._graphs.run(chunks, aux_layers), None
        if output is None:
            outputs = self._outputs(ends, 0, aux_layers)
            output = self._run(chunks, None, aux_layers, outputs)
        return _at(ends, output, is_whole=outputs is None)

    def joined(
        self, parts: Sequence[DecodedRows], prompts: ForwardBatch | None = None, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[list[DecoderOutput], DecoderOutput]:
        """Runs rows of different numbers of tokens in one forward; returns the output of each part and of `prompts`."""
        batches = [self.slots.batch(self.slots.take(rows), tokens, positions) for rows, tokens, positions in parts]
        batch = JoinedBatch.of(*batches, *(() if prompts is None else (prompts,)))
        return _taken_apart(self.decoder.forward(batch, self.slots.cache, aux_layers=aux_layers), parts)

    def mixed(
        self,
        parts: Sequence[DecodedRows],
        chunks: FlatChunks,
        ends: torch.Tensor,
        *,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[list[DecoderOutput], DecoderOutput]:
        """Runs rows that decode and chunks of prompts in one forward; returns each part's output, and as `prefill`.

        With graphs there is one part. The output is good until the next call.
        """
        self.slots.record_prompt(chunks)
        num_decoded, outputs = sum(tokens.numel() for _, tokens, _ in parts), None
        found: tuple[list[DecoderOutput], DecoderOutput] | None = None
        if self._graphs is not None:
            ((rows, tokens, positions),) = parts
            begins = torch.arange(0, num_decoded, tokens.shape[1], device=self.device)
            begins = torch.cat((begins, chunks.ragged.begins + num_decoded))
            joined = FlatChunks(
                torch.cat((rows, chunks.slots)),
                torch.cat((tokens.flatten(), chunks.tokens)),
                torch.cat((positions.flatten(), chunks.positions)),
                replace(chunks.ragged, lengths=None, num_keys=None, begins=begins),
            )
            output = self._graphs.run(joined, aux_layers)
            found = None if output is None else _taken_apart(output, parts)
        if found is None:
            slots, outputs = self.slots.take(chunks.slots), self._outputs(ends, num_decoded, aux_layers)
            prompts = self.slots.batch(slots, chunks.tokens, chunks.positions, None, chunks.ragged, outputs)
            found = self.joined(parts, prompts, aux_layers=aux_layers)
        decoded, of_chunks = found
        return decoded, _at(ends, of_chunks, is_whole=outputs is None)

    def _run(
        self,
        chunks: FlatChunks,
        is_valid: torch.Tensor | None,
        aux_layers: tuple[int, ...],
        outputs: torch.Tensor | None = None,
    ) -> DecoderOutput:
        slots = self.slots.take(chunks.slots)
        batch = self.slots.batch(slots, chunks.tokens, chunks.positions, is_valid, chunks.ragged, outputs)
        return self.decoder.forward(batch, self.slots.cache, aux_layers=aux_layers)

    def _outputs(self, ends: torch.Tensor, num_decoded: int, aux_layers: tuple[int, ...]) -> torch.Tensor | None:
        """Returns the `outputs` of a batch of chunks, on a GPU with padding; None for all.

        `num_decoded`: other tokens of the forward, whose outputs are read as well.
        """
        if self.decoder.is_batch_invariant or {self.decoder.config.num_layers, FINAL_NORM} & set(aux_layers):
            return None
        num_read = num_decoded + len(ends)
        if self.device.type != "cuda" or not num_read:
            return ends
        # Products of few rows have kernels of their own, which nothing has made ready in this combination.
        return F.pad(ends, (0, max(forward_size(num_read), _LEAST_OUTPUTS) - num_read), value=-1)


def _taken_apart(output: DecoderOutput, parts: Sequence[DecodedRows]) -> tuple[list[DecoderOutput], DecoderOutput]:
    """Returns the output of each part in its shape, and that of the tokens after them, if there are any."""
    found, begin = [], 0
    for _, tokens, _ in parts:
        found.append(output.part(slice(begin, begin + tokens.numel()), (tokens.shape[0], tokens.shape[1])))
        begin += tokens.numel()
    return found, output.part(slice(begin, None))


def _at(ends: torch.Tensor, output: DecoderOutput, *, is_whole: bool) -> DecoderOutput:
    """Selects the hidden states at `ends`, [E] int64: from those of all tokens, or else from E, with padding after."""
    hidden = output.hidden
    return replace(output, hidden=hidden.index_select(0, ends) if is_whole else hidden[: len(ends)])
