"""The rotation of one forward's tokens, as the kernels that use it in every layer read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.services.models.kernels.kv_kernels import rotation_kernel
from slipstream.services.models.kernels.launching import overlapping

if TYPE_CHECKING:
    import torch

_TOKENS_AT_ONCE = 4


def rotation_of(positions: torch.Tensor, inverse_frequencies: torch.Tensor, max_positions: int) -> torch.Tensor:
    """Cosines and sines of each token's angles: [N, 2, head_dim / 2] float32.

    `positions`: N int64 in any shape, clamped to 0 .. `max_positions` - 1. `inverse_frequencies`: [head_dim / 2]
    float32, of `inverse_frequencies`.
    """
    half = len(inverse_frequencies)
    num_tokens = positions.numel()
    rotation = inverse_frequencies.new_empty(num_tokens, 2, half)
    if num_tokens:
        rotation_kernel[(-(-num_tokens // _TOKENS_AT_ONCE),)](
            positions.contiguous(),
            inverse_frequencies,
            rotation,
            num_tokens,
            max_positions,
            HALF=half,
            BLOCK_H=1 << (half - 1).bit_length(),
            BLOCK_T=_TOKENS_AT_ONCE,
            **overlapping(positions.device),
            num_warps=4,
        )
    return rotation
