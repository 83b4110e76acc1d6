"""The input of one forward: which tokens stand where, and which pages hold their keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """B rows of W query tokens each. All tensors are on the model's device and may be static buffers.

    Positions and pages may hold anything: whatever lies outside a row's limit or page table is written
    to the padding page and never read, so that running ahead of a request's end is harmless.
    """

    tokens: torch.Tensor
    """[B, W] int64 token ids."""
    positions: torch.Tensor
    """[B, W] int64 absolute positions of the tokens."""
    is_valid: torch.Tensor
    """[B, W] bool: False for padding queries, whose outputs mean nothing and whose KV is dropped."""
    page_table: torch.Tensor
    """[B, P] int64 page numbers: the KV of position p is in page `page_table[b, p // page_size]`."""
    limits: torch.Tensor
    """[B] int64: positions from here on are not kept; their queries see only the positions before it."""
    max_kv_len: int | None = None
    """A bound on the positions that any valid query sees, where the host knows it; None is the whole page table."""
