"""A matrix product with a weight that never changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_PACKED_FOR_TOKENS = 8
"""The number of tokens that a packed weight's layout is chosen for; it stays fast for many more."""


class Linear(nn.Module):
    """`x @ weight.T + bias`.

    oneDNN multiplies float32 on CPUs two to three times as fast as PyTorch's default when the weight is in a
    layout of its own (5 to 512 tokens, AMD with AVX-512), so `pack` replaces it by that after loading.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        """`weight`: [out_features, in_features], which may be another module's. `bias`: [out_features]."""
        super().__init__()
        self.weight: nn.Parameter | None = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        if self._packed is not None:
            rows = x.reshape(-1, x.shape[-1])
            num_rows = len(rows)
            if padding := padded_rows(num_rows) - num_rows:
                rows = F.pad(rows, (0, 0, 0, padding))
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
            return packed[:num_rows].view(*x.shape[:-1], packed.shape[-1])
        assert self.weight is not None, "a weight is only given up once it is packed"
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Rearranges the weight for the fastest product, where there is one; it cannot be read or set any more."""
        if self.weight is None or not _can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_TOKENS)
        self.weight = None


def padded_rows(num_rows: int) -> int:
    """So many rows are multiplied instead: eight sizes between a power of two and the next, an eighth more at most.

    oneDNN makes and keeps a kernel of about half a MiB for every number of rows that it meets. Prompts bring all of
    them, and a process would grow by gigabytes.
    """
    granule = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // granule) * granule


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
