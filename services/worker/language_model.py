"""A decoder with the pages and the sampling of an epoch's slots: what verify and a standalone draft both are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.worker.paged_slots import PagedSlots
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    from slipstream.services.models.decoder import Decoder, DecoderOutput
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.padded_chunks import PaddedChunks
    from slipstream.services.worker.paged_slots import SlotRows


class LanguageModel:
    """Stream work, all of it but `open` and `close`."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.device = device
        self.dtype = dtype
        self.slots = PagedSlots(decoder.config, device, dtype)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.decoder.config.vocab_size

    def open(self, state: EpochState) -> None:
        """Allocates the KV pages and runs one forward of each width, so that the first request finds it warm."""
        self.slots.open(state)
        padding = torch.zeros(1, dtype=torch.int64, device=self.device)
        for width in warm_up_widths(state, self.device):
            slots = self.slots.take(padding)
            tokens = torch.zeros((1, width), dtype=torch.int64, device=self.device)
            positions = torch.arange(width, device=self.device)[None]
            output = self.forward(slots, tokens, positions)
            self.sample(slots, output.hidden[:, -1:], positions[:, -1:] + 1, SamplingMode.FILTERS)

    def close(self) -> None:
        """Frees the pages."""
        self.slots.close()

    def forward(
        self,
        slots: SlotRows,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        is_valid: torch.Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> DecoderOutput:
        """Runs B rows of W tokens. `tokens`, `positions`: [B, W] int64; `is_valid`: [B, W], None for all."""
        batch = self.slots.batch(slots, tokens, positions, is_valid)
        return self.decoder.forward(batch, self.slots.cache, aux_layers=aux_layers)

    def prefill(self, slots: SlotRows, chunks: PaddedChunks, *, aux_layers: tuple[int, ...] = ()) -> DecoderOutput:
        """Runs chunks of prompts side by side; `slots` are theirs."""
        self.slots.record_prompt(chunks)
        is_valid = chunks.is_valid
        return self.forward(slots, chunks.tokens, chunks.positions, is_valid=is_valid, aux_layers=aux_layers)

    def sample(
        self,
        slots: SlotRows,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mode: SamplingMode,
        chain: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The model's tokens at `positions` ([B, W] int64) from the hidden states before them ([B, W, H]): [B, W].

        `chain`: [B, L] int64, tokens of the input that are not output yet; see `adjust`.
        """
        return self.slots.sample(slots, self.decoder.logits(hidden), positions, mode, chain)


def warm_up_widths(state: EpochState, device: torch.device) -> list[int]:
    """Of steps and prompts, as far as different code runs for them."""
    shape = state.attachment.shape
    prompts = (16,) if device.type == "cpu" else (16, 32, 64, 300, shape.chunk_tokens)
    return sorted({1, shape.num_draft_tokens + 1, *(min(width, shape.chunk_tokens) for width in prompts)})
