"""FP8 weights: what their numbers stand for, and how the kernels read them.

The projections of all layers are e4m3 numbers (Micikevicius et al., "FP8 formats for deep learning", 2022) times
scales. Embedding, norms, biases and the output's head are not quantised, nor are activations here, whatever
`activation_scheme` or `input_activations` say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.services.models.fp8_config import BLOCK

FP8 = torch.float8_e4m3fn


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies e4m3 numbers, [rows, columns], with the scales of equal groups of rows: float32.

    `scales`: [groups, 1], or [groups, cdiv(columns, 128)].
    """
    by_row = scales.repeat_interleave(len(weight) // len(scales), 0)
    if by_row.shape[1] > 1:
        by_row = by_row.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight.to(torch.float32) * by_row


def keeps_fp8(device: torch.device, dtype: torch.dtype, *, has_whole_blocks: bool) -> bool:
    """True if a model that computes in `dtype` keeps FP8 weights as they are, else it has them in `dtype`.

    The kernels turn them into bfloat16, with instructions that GPUs have from compute capability 9 on.
    `has_whole_blocks`: rows and columns of all weights are multiples of BLOCK, as the kernels need them.
    """
    has_kernels = device.type != "cuda" or (has_whole_blocks and torch.cuda.get_device_capability(device) >= (9, 0))
    return dtype == torch.bfloat16 and has_kernels


CHUNK = 64
"""Rows of a weight that are packed together."""


@dataclass(frozen=True, slots=True)
class PackedFp8:
    """A weight, [rows, columns], as the kernels read it: in the order in which the lanes of a warp multiply it."""

    bits: torch.Tensor
    """[rows / 64, columns / 128, 8192] int8: blocks of 64 x 128 numbers."""
    arrivals: torch.Tensor
    """[rows / 64] int32: programs of a running product that have left their part of a sum; zeros otherwise.

    So products with one weight must not run side by side.
    """

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> PackedFp8:
        """Packs e4m3 numbers. `dtype`: of what they will be multiplied with; for bfloat16 their bits are woven."""
        rows, columns = weight.shape
        # By a chunk's groups of 16 rows, two of 8, each row; a block's groups of 32 columns, two of 16, of 8, pairs.
        parts = weight.view(torch.int8).view(rows // CHUNK, 4, 2, 8, columns // BLOCK, 4, 2, 2, 4, 2)
        bits = parts.permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9).reshape(rows // CHUNK, columns // BLOCK, CHUNK * BLOCK)
        if dtype == torch.bfloat16:
            for first in range(0, len(bits), _CHUNKS_WOVEN):  # which takes several times their memory
                some = bits[first : first + _CHUNKS_WOVEN]
                some.copy_(_woven(some))
        return cls(bits, torch.zeros(rows // CHUNK, dtype=torch.int32, device=weight.device))

    @property
    def num_rows(self) -> int:
        return len(self.bits) * CHUNK

    @property
    def num_columns(self) -> int:
        return self.bits.shape[1] * BLOCK


_CHUNKS_WOVEN = 16
"""Chunks whose bits are woven at a time."""


def _woven(bits: torch.Tensor) -> torch.Tensor:
    """Rearranges the bits of each four numbers, so that seven instructions make bfloat16 of them (`from_fp8`).

    The first two numbers of a word take the bits 15 and 10 to 4 of its halves, as they do in bfloat16. The others are
    where those leave room: their exponents in the bits 14 to 11, their last bits in 2 to 0, and their signs in bit 3 of
    the other one's half.
    """
    words = bits.view(torch.int32)
    first, second, third, fourth = (words >> shift & 0xFF for shift in (0, 8, 16, 24))

    def half(main: torch.Tensor, added: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        placed = (main & 0x80) << 8 | (main & 0x7F) << 4
        return placed | (added & 0x78) << 8 | (other & 0x80) >> 4 | added & 7

    return (half(first, third, fourth) | half(second, fourth, third) << 16).view(torch.int8)
