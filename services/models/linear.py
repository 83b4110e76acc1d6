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
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return packed
        assert self.weight is not None, "a weight is only given up once it is packed"
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Rearranges the weight for the fastest product, where there is one; it cannot be read or set any more."""
        if self.weight is None or not _can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_TOKENS)
        self.weight = None


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
