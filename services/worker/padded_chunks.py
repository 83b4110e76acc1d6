"""Chunks of prompts side by side, padded to one length for a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.worker.step import PrefillChunk
    from slipstream.services.worker.staging import Staging


MOST_PADDING = 0.25
"""Share of a group's tokens: on a fast device more padding costs more than another forward."""


def of_similar_length(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Groups neighbouring chunks of nearly the same length, in their order."""
    groups: list[list[PrefillChunk]] = []
    for chunk in chunks:
        if groups and _padding([*groups[-1], chunk]) <= MOST_PADDING:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _padding(chunks: Sequence[PrefillChunk]) -> float:
    lengths = [len(chunk.tokens) for chunk in chunks]
    return len(lengths) * max(lengths) / sum(lengths) - 1


@dataclass(frozen=True, slots=True)
class PaddedChunks:
    """B rows as long as the longest chunk, with T tokens without the padding. All tensors are on the device."""

    rows: torch.Tensor
    """[B] int64: their slots."""
    tokens: torch.Tensor
    """[B, W] int64."""
    positions: torch.Tensor
    """[B, W] int64; padding repeats the chunk's last position, so that it makes no row longer than it is."""
    is_valid: torch.Tensor
    """[B, W] bool: False for padding."""
    lengths: torch.Tensor
    """[B] int64."""
    places: torch.Tensor
    """[T] int64: which of the B * W tokens are no padding, row after row."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], staging: Staging, *, width: int | None = None) -> PaddedChunks:
        """Lays them out on the host, in rows of `width` tokens; None is as wide as the longest."""
        width = width or max(len(chunk.tokens) for chunk in chunks)
        tokens = torch.tensor([[*chunk.tokens, *([0] * (width - len(chunk.tokens)))] for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        columns = torch.arange(width)
        is_valid = columns < lengths[:, None]
        return cls(
            rows=staging.put(torch.tensor([chunk.slot for chunk in chunks])),
            tokens=staging.put(tokens),
            positions=staging.put(starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)),
            is_valid=staging.put(is_valid),
            lengths=staging.put(lengths),
            places=staging.put(is_valid.flatten().nonzero()[:, 0]),
        )

    def without_padding(self, states: torch.Tensor) -> torch.Tensor:
        """Drops the padding: [B, W, size] to [T, size], chunk after chunk."""
        return states.flatten(0, 1).index_select(0, self.places)

    def with_padding(self, states: torch.Tensor) -> torch.Tensor:
        """Adds zeros as padding: [T, size] to [B, W, size]."""
        laid_out = states.new_zeros(self.tokens.numel(), states.shape[1])
        return laid_out.index_copy_(0, self.places, states).view(*self.tokens.shape, -1)
