"""A decoder with the pages and the sampling of an epoch's slots: what verify and a standalone draft both are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.batch import ForwardBatch
from slipstream.services.models.kv_cache import PagedKV
from slipstream.services.models.sampler import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.step import PromptChunk
    from slipstream.services.engine import EpochState
    from slipstream.services.models.decoder import Decoder, DecoderOutput


class LanguageModel:
    """Stream work, all of it but `open`, `close` and `index`."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.device = device
        self.dtype = dtype
        self._state: EpochState | None = None
        self._cache: PagedKV | None = None

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
        attachment = state.attachment
        self._cache = PagedKV(
            self.decoder.config,
            num_pages=attachment.num_pages,
            page_size=attachment.page_tokens,
            device=self.device,
            dtype=self.dtype,
        )
        self._state = state
        padding = self.index((0,))
        for width in (1, attachment.shape.num_draft_tokens + 1, min(16, attachment.shape.chunk_tokens)):
            tokens = torch.zeros((1, width), dtype=torch.int64, device=self.device)
            positions = torch.arange(width, device=self.device)[None]
            output = self.forward(padding, tokens, positions)
            self.sample(output.hidden, padding, positions + 1)

    def close(self) -> None:
        """Frees the pages."""
        self._cache = self._state = None

    def index(self, slots: Sequence[int]) -> torch.Tensor:
        """[B] int64 on the device."""
        return torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)

    def limits(self, rows: torch.Tensor) -> torch.Tensor:
        """[B] int64: positions from here on have no KV."""
        return self._open_state().slots.limits[rows]

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
        state, cache = self._open_state(), self._cache
        assert cache is not None, "a forward belongs into an epoch"
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            is_valid=torch.ones_like(tokens, dtype=torch.bool) if is_valid is None else is_valid,
            page_table=state.slots.page_table[rows],
            limits=state.slots.limits[rows],
            # Only where the host can look without waiting; elsewhere the whole page list is read.
            max_kv_len=int(positions.max()) + 1 if self.device.type == "cpu" else None,
        )
        return self.decoder.forward(batch, cache, aux_layers=aux_layers)

    def prefill(
        self, chunks: tuple[PromptChunk, ...], *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[DecoderOutput, torch.Tensor]:
        """Runs chunks of prompts side by side; returns the output and which of its [B, W] tokens count, as bool."""
        width = max(len(chunk.tokens) for chunk in chunks)
        tokens = torch.tensor([[*chunk.tokens, *([0] * (width - len(chunk.tokens)))] for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        columns = torch.arange(width)
        is_valid = (columns < lengths[:, None]).to(self.device)
        # Padding repeats the chunk's last position, so that it makes no row longer than it is.
        positions = starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        rows = self.index([chunk.slot for chunk in chunks])
        output = self.forward(
            rows, tokens.to(self.device), positions.to(self.device), is_valid=is_valid, aux_layers=aux_layers
        )
        return output, is_valid

    def sample(self, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's tokens at `positions` ([B, W] int64) from the hidden states before them ([B, W, H]): [B, W]."""
        num_rows, width = positions.shape
        logits = self.decoder.logits(hidden).view(num_rows * width, -1)
        sampling = self._open_state().slots.sampling.take(rows).repeat(width)
        return sample(logits, sampling, positions.reshape(-1)).view(num_rows, width)

    def _open_state(self) -> EpochState:
        assert self._state is not None, "stream work belongs into an epoch"
        return self._state
