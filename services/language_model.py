"""A decoder with the pages and the sampling of an epoch's slots: what verify and a standalone draft both are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.logprobs import logprobs_of
from slipstream.services.paged_slots import PaddedChunks, PagedSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.future_map import Logprobs
    from slipstream.common.step import PromptChunk
    from slipstream.services.engine import EpochState
    from slipstream.services.models.decoder import Decoder, DecoderOutput


class LanguageModel:
    """Stream work, all of it but `open`, `close` and `index`."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.device = device
        self.dtype = dtype
        self._slots = PagedSlots(decoder.config, device, dtype)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.decoder.config.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return self.decoder.config.kv_bytes_per_token(self.dtype)

    def open(self, state: EpochState) -> None:
        """Allocates the KV pages and runs one forward of each width, so that the first request finds it warm."""
        self._slots.open(state)
        shape = state.attachment.shape
        padding = self.index((0,))
        for width in (1, shape.num_draft_tokens + 1, min(16, shape.chunk_tokens)):
            tokens = torch.zeros((1, width), dtype=torch.int64, device=self.device)
            positions = torch.arange(width, device=self.device)[None]
            output = self.forward(padding, tokens, positions)
            self.sample(output.hidden, padding, positions + 1)

    def close(self) -> None:
        """Frees the pages."""
        self._slots.close()

    def index(self, slots: Sequence[int]) -> torch.Tensor:
        """[B] int64 on the device."""
        return self._slots.index(slots)

    def limits(self, rows: torch.Tensor) -> torch.Tensor:
        """[B] int64: positions from here on have no KV."""
        return self._slots.limits(rows)

    def forward(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        is_valid: torch.Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> DecoderOutput:
        """Runs B rows of W tokens. `rows`: [B] int64 slots; `tokens`, `positions`: [B, W] int64; `is_valid`: [B, W]."""
        batch = self._slots.batch(rows, tokens, positions, is_valid)
        return self.decoder.forward(batch, self._slots.cache, aux_layers=aux_layers)

    def prefill(
        self, chunks: tuple[PromptChunk, ...], *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[DecoderOutput, torch.Tensor]:
        """Runs chunks of prompts side by side; returns the output and which of its [B, W] tokens count, as bool."""
        padded = PaddedChunks.of(chunks, self.device)
        rows = self.index([chunk.slot for chunk in chunks])
        self._slots.remember_prompt(rows, padded)
        output = self.forward(rows, padded.tokens, padded.positions, is_valid=padded.is_valid, aux_layers=aux_layers)
        return output, padded.is_valid

    def sample(
        self, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, chain: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The model's tokens at `positions` ([B, W] int64) from the hidden states before them ([B, W, H]): [B, W].

        `chain`: [B, L] int64, tokens of the input that are not output yet; see `adjust`.
        """
        return self._slots.sample(self.decoder.logits(hidden), rows, positions, chain)

    def sample_with_logprobs(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        chain: torch.Tensor | None,
        top_logprobs: int | None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """As `sample`, and what `logprobs_of` says of it if so many of the most likely tokens are asked for."""
        logits = self.decoder.logits(hidden)
        tokens = self._slots.sample(logits, rows, positions, chain)
        return tokens, None if top_logprobs is None else logprobs_of(logits, tokens, top_logprobs)

    def remember_output(self, rows: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """The first `num_tokens` ([B] int64) of `tokens` ([B, W] int64) are output now, for the penalties."""
        self._slots.remember_output(rows, tokens, num_tokens)
