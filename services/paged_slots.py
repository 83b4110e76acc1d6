"""An epoch's slots as a model's forward wants them: their KV pages, limits and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.services.models.batch import ForwardBatch
from slipstream.services.models.kv_cache import PagedKV
from slipstream.services.models.sampler import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.step import PromptChunk
    from slipstream.services.engine import EpochState
    from slipstream.services.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class PaddedChunks:
    """Chunks of prompts side by side: B rows of as many tokens as the longest has."""

    tokens: torch.Tensor
    """[B, W] int64."""
    positions: torch.Tensor
    """[B, W] int64; padding repeats the chunk's last position, so that it makes no row longer than it is."""
    is_valid: torch.Tensor
    """[B, W] bool: False for padding."""
    lengths: torch.Tensor
    """[B] int64."""

    @classmethod
    def of(cls, chunks: tuple[PromptChunk, ...], device: torch.device) -> PaddedChunks:
        """Lays them out on the host, and copies."""
        width = max(len(chunk.tokens) for chunk in chunks)
        tokens = torch.tensor([[*chunk.tokens, *([0] * (width - len(chunk.tokens)))] for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        columns = torch.arange(width)
        is_valid = columns < lengths[:, None]
        positions = starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        return cls(*(tensor.to(device) for tensor in (tokens, positions, is_valid, lengths)))


class PagedSlots:
    """Stream work, all of it but `open`, `close` and `index`."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        """`config`: of the layers that keep keys and values."""
        self._config = config
        self._device = device
        self._dtype = dtype
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
        """Allocates the KV pages."""
        attachment = state.attachment
        self._cache = PagedKV(
            self._config,
            num_pages=attachment.num_pages,
            page_size=attachment.page_tokens,
            device=self._device,
            dtype=self._dtype,
        )
        self._state = state

    def close(self) -> None:
        """Frees them."""
        self._cache = self._state = None

    def index(self, slots: Sequence[int]) -> torch.Tensor:
        """[B] int64 on the device."""
        return torch.tensor(slots, dtype=torch.int64).to(self._device, non_blocking=True)

    def limits(self, rows: torch.Tensor) -> torch.Tensor:
        """[B] int64: positions from here on have no KV."""
        return self.state.slots.limits[rows]

    def batch(
        self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, is_valid: torch.Tensor | None = None
    ) -> ForwardBatch:
        """B rows of W tokens. `rows`: [B] int64 slots; `tokens`, `positions`: [B, W] int64; `is_valid`: [B, W]."""
        slots = self.state.slots
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            is_valid=torch.ones_like(tokens, dtype=torch.bool) if is_valid is None else is_valid,
            page_table=slots.page_table[rows],
            limits=slots.limits[rows],
            # Only where the host can look without waiting; elsewhere the whole page list is read.
            max_kv_len=int(positions.max()) + 1 if self._device.type == "cpu" else None,
        )

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at `positions` ([B, W] int64) from the logits for them ([B, W, vocab_size] float32): [B, W]."""
        num_rows, width = positions.shape
        sampling = self.state.slots.sampling.take(rows).repeat(width)
        return sample(logits.view(num_rows * width, -1), sampling, positions.reshape(-1)).view(num_rows, width)
