"""An epoch's slots as a model's forward wants them: their KV pages, limits and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import OutOfMemoryError
from slipstream.services.models.adjustments import adjust
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
        """Allocates the KV pages. Raises OutOfMemoryError."""
        attachment = state.attachment
        num_pages, page_tokens = attachment.num_pages, attachment.page_tokens
        try:
            self._cache = PagedKV(
                self._config, num_pages=num_pages, page_size=page_tokens, device=self._device, dtype=self._dtype
            )
        except RuntimeError as error:  # what PyTorch raises on a CPU, too
            message = f"{num_pages} KV pages of {page_tokens} tokens do not fit into memory"
            raise OutOfMemoryError(message) from error
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

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, chain: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tokens at `positions` ([B, W] int64) from the logits for them ([B, W, vocab_size] float32): [B, W].

        `chain`: [B, L] int64, what the model was given that is not output yet; see `adjust`.
        """
        (num_rows, width), slots = positions.shape, self.state.slots
        if slots.adjusts_logits:
            chain = positions[:, :0] if chain is None else chain
            logits = adjust(logits, slots.adjustments, slots.history, rows, positions, chain)
        sampling = slots.sampling.take(rows).repeat(width)
        return sample(logits.view(num_rows * width, -1), sampling, positions.reshape(-1)).view(num_rows, width)

    def remember_prompt(self, rows: torch.Tensor, chunks: PaddedChunks) -> None:
        """Chunks of B prompts, for the penalties. `rows`: [B] int64 slots."""
        slots = self.state.slots
        if slots.has_penalties:
            slots.history.add_prompt(rows, chunks.tokens, chunks.is_valid)

    def remember_output(self, rows: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """The first `num_tokens` ([B] int64) of `tokens` ([B, W] int64) are output now, for the penalties."""
        slots = self.state.slots
        if slots.has_penalties:
            slots.history.add_output(rows, tokens, num_tokens)
