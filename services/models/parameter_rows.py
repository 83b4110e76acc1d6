"""Tables of requests' parameters on the model's device: a row for each slot, or for each row of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRows:
    """Tensors that have the same rows: those that a subclass has as its fields."""

    def to(self, device: torch.device | None) -> Self:
        """The same rows on a device."""
        return type(self)(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def put(self, slots: Tensor, rows: Self) -> None:
        """Replaces the rows numbered `slots`: [M] int64, without repetition."""
        for field in fields(self):
            getattr(self, field.name).index_copy_(0, slots, getattr(rows, field.name))

    def take(self, slots: Tensor) -> Self:
        """The rows numbered `slots`: [M] int64."""
        return type(self)(**{field.name: getattr(self, field.name)[slots] for field in fields(self)})

    def repeat(self, num_tokens: int) -> Self:
        """Each row `num_tokens` times in a row, for logits [N, num_tokens, V] seen as [N * num_tokens, V]."""
        repeated = {
            field.name: getattr(self, field.name).repeat_interleave(num_tokens, dim=0) for field in fields(self)
        }
        return type(self)(**repeated)
