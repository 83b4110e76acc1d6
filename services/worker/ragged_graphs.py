"""A model's forward over chunks of prompts as graphs, one for each number of tokens, however they are spread over rows.

A host takes as long to launch the kernels of such a forward as the device to run them for some 450 tokens of an 8B
model: with a graph a short prompt takes half the time. Longer ones keep the device busy without.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.services.models.attention import RaggedRows
from slipstream.services.models.decoder import DecoderOutput
from slipstream.services.worker.forward_sizes import sizes_up_to
from slipstream.services.worker.graphs import capture_buckets, shortest_seconds
from slipstream.services.worker.staging import FlatChunks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from slipstream.common.wire.worker import Attachment
    from slipstream.services.worker.graphs import Buckets, Capture

    Forward = Callable[[FlatChunks, torch.Tensor, tuple[int, ...]], DecoderOutput]
    """Runs chunks; takes which of their tokens are valid ([N] bool), and the layers whose inputs are wanted, too."""

logger = logging.getLogger(__name__)

_MOST_GRAPHED = 1024
"""Tokens of the largest forward that is captured."""


class RaggedGraphs:
    """The graphs of an epoch. All methods are stream work."""

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
